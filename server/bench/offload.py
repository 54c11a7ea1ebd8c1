"""One offload at a time, against a bare paho echo of the same bytes over the same broker."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from edge_sdk import AgentSettings, EdgeAgent, api
from edge_sdk.bundles.store import BundleStore
from edge_sdk.manifest import ModelManifest
from edge_sdk.session import Array
from edge_sdk.settings import Power
from profiles.reference import load_reference
from server.backend.ladder import Entry, LadderEngine
from server.bench.brokers import (
    ECHO_USER,
    NO_MOSQUITTO,
    PING_USER,
    QUERY,
    REPLY,
    Broker,
    embedded,
    find_mosquitto,
    mosquitto,
)
from server.bench.echo import connect
from server.bench.measure import Row, at_most, not_measured, take_turns
from server.bench.models import export_random
from server.processes import ChildProcess, ServerProcess
from server.tokens import create_token

NEVER = -1.0  # below every uncertainty: nothing exits
GOAL = 1.5
GOAL_MS = 1.0
PACE_S = 1e-3


def run(work: Path, *, quick: bool) -> list[Row]:
    """Median round trip; less the model's own time, also as a ratio to the echo's; goals 1.0, 1.5.

    The query of a caller that waits alone goes at QoS 0, and so does the echo.
    """
    rows = []
    with embedded() as broker:
        rows += _measure(work / "embedded", broker, "embedded:127.0.0.1:0", quick)
    if find_mosquitto() is None:
        rows.append(not_measured("offload round trip, p50, Mosquitto", "x", GOAL, NO_MOSQUITTO))
    else:
        (work / "mosquitto").mkdir()
        with mosquitto(work) as broker:
            url = f"mqtt://127.0.0.1:{broker.port}"
            rows += _measure(work / "mosquitto", broker, url, quick)
    return rows


def _measure(work: Path, broker: Broker, mqtt: str, quick: bool) -> list[Row]:
    state = work / "server"
    folder, manifest = export_random("cnn6", (1, 28, 28), (2,), state / "models")
    x = np.random.default_rng(1).normal(size=(1, 28, 28)).astype(np.float32)
    with open_agent(work, state, mqtt) as agent:
        model_s = model_time(folder, manifest, agent.device_folder, x)
        agent.predict(x)
        payload_bytes = agent.bytes_of_one(x)
        with echo(broker, payload_bytes) as ping:
            turns = [lambda: agent.offload(x), lambda: ping(0)]
            ours_s, echo_s = interleaved(turns, 5 if quick else 15)
    name = f"offload round trip, p50, {broker.name}, {payload_bytes} bytes"
    ratio = (ours_s - model_s) / echo_s
    return [
        at_most(f"{name}: ratio to paho echo at QoS 0", ratio, "x", GOAL, echo_s * 1e3),
        at_most(f"{name}: with the model", ours_s * 1e3, "ms", GOAL_MS, echo_s * 1e3),
    ]


class BenchAgent:
    """The agent of one measurement."""

    def __init__(self, agent: EdgeAgent, device_folder: Path) -> None:
        self._agent = agent
        self.device_folder = device_folder
        self.predict = agent.predict
        self.status = agent.status

    def bytes_of_one(self, x: Array) -> int:
        before = self._agent.status().bytes_up
        self._agent.predict(x)
        return self._agent.status().bytes_up - before

    def offload(self, x: Array) -> None:
        answer = self._agent.predict(x, deadline_s=5.0)
        if answer.source != "server":
            raise RuntimeError(f"offload benchmark: {answer.reason}")


@contextlib.contextmanager
def open_agent(
    work: Path, state: Path, mqtt: str, power: Power | None = None
) -> Iterator[BenchAgent]:
    """A server with the models in `state`, and the agent of a device enrolled there."""
    server = ServerProcess(state)
    server.start(("--http", "127.0.0.1:0", "--mqtt", mqtt))
    try:
        device = work / "device"
        profile = load_reference("raspberry-pi-4")
        api.enroll(server.http, create_token(state), device, profile=profile, name="bench")
        with EdgeAgent.open(device, AgentSettings(threshold=NEVER, power=power)) as agent:
            yield BenchAgent(agent, BundleStore(device).active().folder)
    finally:
        server.stop()


def model_time(folder: Path, manifest: ModelManifest, device_folder: Path, x: Array) -> float:
    """Seconds of the device's and the server's graphs alone, at the pace of an offload."""
    engine = LadderEngine(folder, manifest, threads=1)
    shapes = {segment.entry: segment.input.shape for segment in manifest.segments}
    entry = Entry(2, np.zeros((1, *shapes[2]), np.float32))
    with EdgeAgent.from_bundle(device_folder) as alone:
        device_s, server_s = take_turns(
            [lambda: alone.predict(x), lambda: engine.run([entry])],
            rounds=7,
            calls=100,
            pause_s=PACE_S,
        )
    return device_s + server_s


@contextlib.contextmanager
def echo(broker: Broker, size_bytes: int) -> Iterator[Callable[[int], None]]:
    """Function that sends `size_bytes` at a QoS to a bare paho process, and waits for them."""
    command = [sys.executable, "-P", "-m", "server.bench.echo", str(broker.port)]
    command += [ECHO_USER, "echo", QUERY, REPLY]
    other = ChildProcess("the echo", command)
    other.expect("ready", "did not start")
    client = connect(broker.port, PING_USER, "ping", REPLY)
    came = threading.Event()
    client.on_message = lambda *_: came.set()
    payload = bytes(size_bytes)

    def ping(qos: int) -> None:
        came.clear()
        client.publish(QUERY, payload, qos=qos)
        if not came.wait(5):
            raise RuntimeError(f"{broker.name}: no echo within 5 s")

    try:
        yield ping
    finally:
        client.disconnect()
        client.loop_stop()
        other.close()


def interleaved(candidates: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """Median seconds of one call of each candidate, which take turns."""
    for warm in candidates:
        for _ in range(30):
            warm()
            time.sleep(0.001)
    return take_turns(candidates, rounds=rounds, calls=60)
