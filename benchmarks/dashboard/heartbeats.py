"""Heartbeats of many simulated devices, from one process.

    python -P -m benchmarks.dashboard.heartbeats <<< '{"port": 1883, "every_s": 30, "devices": []}'

It reads one line of JSON, because 500 credentials are too long for a command line, and prints `up`
once all are logged in. It sends until its standard input closes, each device at its own moment of
the interval.
"""

from __future__ import annotations

import selectors
import sys
import time
from typing import Any

import orjson

from benchmarks.dashboard.simulated import SimulatedDevice
from benchmarks.mqtt.client import Client, Login, State
from edge_sdk.wire.topics import Kind, Topic
from server.listening.descriptors import raise_descriptor_limit

AT_ONCE = 50
UP_S = 60.0


def main() -> None:
    """Read what is asked for from the standard input, and do it."""
    raise_descriptor_limit()
    asked: dict[str, Any] = orjson.loads(sys.stdin.readline())
    selector = selectors.DefaultSelector()
    devices = [
        SimulatedDevice(one["name"], one["bundle"], number)
        for number, one in enumerate(asked["devices"])
    ]
    clients = [
        Client(
            Login(
                one["name"], one["name"], one["credential"], (_topic(one["name"], Kind.COMMAND),)
            ),
            selector,
            None,
            received=lambda *_: None,
            changed=lambda _: None,
        )
        for one in asked["devices"]
    ]
    topics = [_topic(device.name, Kind.TELEMETRY) for device in devices]
    _connect(clients, selector, asked["port"])
    selector.register(sys.stdin, selectors.EVENT_READ)
    print("up", flush=True)
    every_s, began, sent = float(asked["every_s"]), time.monotonic(), 0
    while True:
        due = began + every_s * sent / len(devices)
        for key, _ in selector.select(max(0.0, min(due - time.monotonic(), 0.5))):
            if key.fileobj is sys.stdin:
                return
            key.data.ready()
        if time.monotonic() >= due:
            number = sent % len(devices)
            beat = devices[number].heartbeat(every_s)
            if clients[number].state is State.UP:
                clients[number].publish(topics[number], orjson.dumps(beat))
            sent += 1


def _topic(device: str, kind: Kind) -> str:
    return str(Topic("default", device, kind))


def _connect(clients: list[Client], selector: selectors.BaseSelector, port: int) -> None:
    waiting, until = list(clients), time.monotonic() + UP_S
    started: list[Client] = []
    while not all(client.state is State.UP for client in clients):
        while waiting and sum(client.state is not State.UP for client in started) < AT_ONCE:
            started.append(waiting.pop())
            started[-1].start(port)
        for key, _ in selector.select(0.05):
            key.data.ready()
        if time.monotonic() > until:
            raise SystemExit("not all devices are up")


if __name__ == "__main__":
    main()
