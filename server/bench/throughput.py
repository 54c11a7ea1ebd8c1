"""The server end to end over MQTT, 32 queries in flight, against the ladder engine alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

from edge_sdk.manifest import ModelManifest
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.mqtt.messages import Message
from edge_sdk.wire.broker_address import BrokerAddress
from edge_sdk.wire.codecs import encode
from edge_sdk.wire.frames import Tensor, unpack
from edge_sdk.wire.messages import Query, new_id, pack_query, read_reply
from edge_sdk.wire.topics import Kind, Topic
from server.backend.ladder import LadderEngine
from server.bench.brokers import NO_MOSQUITTO, find_mosquitto, mosquitto
from server.bench.ladder import DEPTHS, queries
from server.bench.measure import Row, at_least, not_measured
from server.bench.models import export_random
from server.processes import ServerProcess

IN_FLIGHT = 32
GOAL = 0.9
DEVICE = "bench"


def run(work: Path, *, quick: bool) -> list[Row]:
    """Queries a second over Mosquitto, as a ratio to the engine alone; goal 0.9."""
    name = f"server over MQTT, resnet18, {IN_FLIGHT} in flight, Mosquitto"
    if find_mosquitto() is None:
        return [not_measured(name, "x", GOAL, NO_MOSQUITTO)]
    state = work / "server"
    folder, manifest = export_random("resnet18", (3, 64, 64), DEPTHS, state / "models")
    seconds = 4.0 if quick else 10.0
    with mosquitto(work) as broker:
        url = f"mqtt://127.0.0.1:{broker.port}"
        server = ServerProcess(state)
        server.start(
            ("--http", "127.0.0.1:0", "--mqtt", url, "--threads", "1", "--batch", str(IN_FLIGHT))
        )
        try:
            served = _LoadGenerator(url, manifest).run(seconds)
        finally:
            server.stop()
    alone = _engine_alone(folder, manifest, seconds)
    return [at_least(f"{name}: throughput to the engine alone", served / alone, "x", GOAL, alone)]


class _LoadGenerator:
    """Keeps 32 queries in flight and counts replies."""

    def __init__(self, url: str, manifest: ModelManifest) -> None:
        self._manifest = manifest
        self._tensors = self._endless()
        self._answered = 0
        self._problems: list[str] = []
        self._sending = True
        self._link = MqttLink(BrokerAddress.parse(url), client_id=DEVICE, password="-")  # noqa: S106 - the benchmark's broker has no logins
        self._query = str(Topic("default", DEVICE, Kind.QUERY))
        self._link.subscribe(str(Topic("default", DEVICE, Kind.REPLY)), self._receive)
        self._first = threading.Event()

    def run(self, seconds: float) -> float:
        """Replies a second, measured for so long."""
        self._link.start()
        self._link.wait_connected(5)
        for _ in range(IN_FLIGHT):
            self._send()
        if not self._first.wait(20):
            raise RuntimeError("throughput benchmark: no reply")
        time.sleep(1.0)
        before, start = self._answered, time.perf_counter()
        time.sleep(seconds)
        rate = (self._answered - before) / (time.perf_counter() - start)
        self._sending = False
        self._link.stop()
        if self._problems:
            raise RuntimeError(f"throughput benchmark: {self._problems[0]}")
        return rate

    def _endless(self) -> Iterator[Tensor]:
        tensors = []
        for entry in queries(self._manifest):
            array, parameters = encode(entry.array, "int8")
            tensors.append(Tensor(f"z{entry.depth}", array, parameters))
        while True:
            yield from tensors

    def _send(self) -> None:
        name, version = self._manifest.name, self._manifest.version
        query = Query(new_id(), name, version, next(self._tensors), 60_000.0)
        self._link.publish(self._query, pack_query(query))

    def _receive(self, message: Message) -> None:
        reply = read_reply(unpack(message.payload))
        if reply.problem is not None:
            self._problems.append(f"{reply.problem}: {reply.detail}")
        self._answered += 1
        self._first.set()
        if self._sending:
            self._send()


def _engine_alone(folder: Path, manifest: ModelManifest, seconds: float) -> float:
    """Queries a second of the same batches, run by the engine alone."""
    engine = LadderEngine(folder, manifest, threads=1)
    entries = queries(manifest, IN_FLIGHT)
    engine.run(entries)
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        engine.run(entries)
        done += len(entries)
    return done / (time.perf_counter() - start)
