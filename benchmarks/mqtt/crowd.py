"""Many devices at one broker, and a backend that answers them, each in a process of its own.

    python -m benchmarks.mqtt.crowd backend '{"port": 1883, ...}'
    python -m benchmarks.mqtt.crowd devices '{"port": 1883, "devices": 500, ...}'

Both print `up` once all are logged in and subscribed. The devices then do what lines on their
standard input say: `load RATE SECONDS`, or `storm`, which waits until all have come back; each is
answered with a line of JSON. The backend ends when its standard input closes.
"""

from __future__ import annotations

import random
import selectors
import ssl
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import orjson

from benchmarks.mqtt.client import Client, Login, State
from edge_sdk.mqtt.link import RECONNECT_FIRST_S, RECONNECT_LAST_S
from edge_sdk.wire.frames import Tensor
from edge_sdk.wire.messages import Query, Reply, pack_query, pack_reply
from edge_sdk.wire.topics import Kind, Topic, all_devices
from server.listening.descriptors import raise_descriptor_limit

FLEET: Final = "default"
BACKEND: Final = "backend"
AT_ONCE: Final = 100  # connections being set up at a time, when all start together
DRAIN_S: Final = 3.0
LIMIT_S: Final = 55.0
# what a device of the digits model sends from depth 2, and the server's answer
QUERY: Final = pack_query(
    Query("0" * 32, "digits", "1", Tensor("z2", np.zeros((1, 32, 5, 5), np.float16)), 1e3)
)
REPLY: Final = pack_reply(Reply("0" * 32, {"logits": np.zeros((1, 10), np.float32)}), "digits", "1")


@dataclass(frozen=True, slots=True)
class Where:
    """The broker, and who logs in there.

    Attributes:
        ca: PEM file of the broker's certificate; None without TLS.
        qos: quality of service of queries and of their answers.
    """

    port: int
    password: str
    devices: int = 0
    ca: str | None = None
    qos: int = 0

    def tls(self) -> ssl.SSLContext | None:
        """The context of all clients."""
        return None if self.ca is None else ssl.create_default_context(cafile=self.ca)


class Crowd:
    """Clients that connect, and come back as an agent's link does: with jitter, ever later."""

    def __init__(self, where: Where, logins: Sequence[Login]) -> None:
        self._port = where.port
        self._qos = where.qos
        self._selector = selectors.DefaultSelector()
        self._trying = 0
        self._up = 0
        self._retries: list[tuple[float, Client]] = []
        self.latencies: list[float] = []
        self.sent = 0
        tls = where.tls()
        self.clients = [
            Client(login, self._selector, tls, received=self.received, changed=self._changed)
            for login in logins
        ]
        self._states = dict.fromkeys(self.clients, State.DOWN)

    @property
    def all_up(self) -> bool:
        """Whether every client is logged in and subscribed."""
        return self._up == len(self.clients)

    @property
    def all_down(self) -> bool:
        """Whether none is."""
        return self._up == 0

    def connect(self) -> float:
        """Connect all, some at a time; the seconds it took."""
        began, waiting = time.monotonic(), list(reversed(self.clients))
        while not self.all_up:
            while waiting and self._trying < AT_ONCE:
                waiting.pop().start(self._port)
            self.turn(0.01)
            if time.monotonic() - began > LIMIT_S:
                raise SystemExit(f"{self._up} of {len(self.clients)} are up after {LIMIT_S:g} s")
        return time.monotonic() - began

    def load(self, rate: float, seconds: float) -> dict[str, Any]:
        """Send queries at fixed times, each of the next device, and time the answers."""
        self.latencies, self.sent = [], 0
        began, lag = time.monotonic(), 0.0
        total = int(rate * seconds)
        topics = [str(Topic(FLEET, name(n), Kind.QUERY)) for n in range(len(self.clients))]
        while self.sent < total:
            now = time.monotonic()
            while self.sent < total and (due := began + self.sent / rate) <= now:
                number = self.sent % len(self.clients)
                client = self.clients[number]
                self.sent += 1
                lag = max(lag, now - due)
                if client.state is State.UP:
                    client.due.append(due)
                    client.publish(topics[number], QUERY, self._qos)
            self.turn(max(0.0, min(began + self.sent / rate - time.monotonic(), 0.01)))
        end = time.monotonic() + DRAIN_S
        while len(self.latencies) < total and time.monotonic() < end:
            self.turn(0.01)
        ms = sorted(1e3 * each for each in self.latencies)
        return {
            "rate": rate,
            "sent": total,
            "answered": len(ms),
            "p50_ms": round(statistics.median(ms), 2) if ms else None,
            "p99_ms": round(ms[int(0.99 * len(ms))], 2) if ms else None,
            "generator_late_ms": round(1e3 * lag, 1),
        }

    def storm(self) -> dict[str, Any]:
        """Wait until all have lost the broker, and then until all are back."""
        began = time.monotonic()
        while self.all_up and time.monotonic() - began < LIMIT_S:
            self.turn(0.01)
        lost = time.monotonic()
        while not self.all_down and time.monotonic() - lost < 1:
            self.turn(0.01)
        while not self.all_up and time.monotonic() - began < LIMIT_S:
            self.turn(0.01)
        return {"back": self._up, "seconds": round(time.monotonic() - lost, 2)}

    def turn(self, wait_s: float) -> None:
        """Handle what is ready, and start the clients that are due to try again."""
        for key, _ in self._selector.select(wait_s):
            key.data.ready()
        if self._retries:
            now = time.monotonic()
            due = [client for at, client in self._retries if at <= now]
            self._retries = [each for each in self._retries if each[0] > now]
            for client in due:
                client.start(self._port)

    def received(self, client: Client, _topic: bytes, _payload: bytes) -> None:
        """Time the answer of the oldest query."""
        if client.due:
            self.latencies.append(time.monotonic() - client.due.popleft())

    def _changed(self, client: Client) -> None:
        before, after = self._states[client], client.state
        self._states[client] = after
        self._up += (after is State.UP) - (before is State.UP)
        self._trying += _tries(after) - _tries(before)
        if after is State.DOWN:
            bound = min(RECONNECT_FIRST_S * 2 ** min(client.failures, 10), RECONNECT_LAST_S)
            wait_s = random.uniform(bound / 2, bound)
            self._retries.append((time.monotonic() + wait_s, client))


class Backend(Crowd):
    """One client that answers each query of every device."""

    def answer_until_end(self) -> None:
        """Answer, and come back after a loss, until standard input closes."""
        self._selector.register(sys.stdin, selectors.EVENT_READ, _StandardInput())
        while True:
            self.turn(0.1)

    def received(self, client: Client, topic: bytes, _payload: bytes) -> None:
        """Answer the query."""
        client.publish(topic.decode().removesuffix(Kind.QUERY) + Kind.REPLY, REPLY, self._qos)


class _StandardInput:
    """The end of the parent's pipe: nothing is written there, so it is ready when it closes."""

    def ready(self) -> None:
        """End this process."""
        raise SystemExit(0)


def name(number: int) -> str:
    """The id of the device of that number."""
    return f"device-{number}"


def main() -> None:
    """Run one side until its standard input closes."""
    raise_descriptor_limit()
    side, where = sys.argv[1], Where(**orjson.loads(sys.argv[2]))
    if side == BACKEND:
        login = Login(f"{BACKEND}-crowd", BACKEND, where.password, [all_devices(Kind.QUERY)])
        backend = Backend(where, [login])
        backend.connect()
        _say({"up": 1})
        backend.answer_until_end()
        return
    logins = [
        Login(
            name(number),
            name(number),
            where.password,
            [str(Topic(FLEET, name(number), kind)) for kind in (Kind.REPLY, Kind.COMMAND)],
        )
        for number in range(where.devices)
    ]
    crowd = Crowd(where, logins)
    _say({"up": where.devices, "seconds": round(crowd.connect(), 2)})
    for line in sys.stdin:
        words = line.split()
        if words[0] == "load":
            _say(crowd.load(float(words[1]), float(words[2])))
        else:
            _say(crowd.storm())


def _tries(state: State) -> bool:
    return state not in (State.DOWN, State.UP)


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(line).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
