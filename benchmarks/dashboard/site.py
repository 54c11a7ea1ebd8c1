"""A running server with its broker and many simulated devices, to be measured.

The state is filled once: a model, the devices, an hour of their history. It can then be started
again and again, with the dashboard and without.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from benchmarks.dashboard.simulated import SimulatedDevice
from benchmarks.dashboard.world import make_models, make_training
from benchmarks.load.clients import Load
from benchmarks.load.processes import children, memory_bytes, processor_s
from benchmarks.reports import RESULTS, child_environment
from edge_sdk import api
from edge_sdk.identity import Identity
from edge_sdk.training.data.load import load_dataset
from profiles.reference import load_reference
from server.processes import ChildProcess, ServerProcess
from server.registry.database import Registry
from server.registry.rollouts.records import RolloutPlan
from server.registry.telemetry.history import LastReading
from server.registry.telemetry.reading import Reading
from server.rollouts.start import start_rollout
from server.state import existing_registry
from server.tokens import create_token

BEAT_S: Final = 30.0
HISTORY_S: Final = 3_600.0
BUNDLES: Final = ("digits/1/d1", "digits/1/d2", "digits/1/d4")
HARDWARE: Final = ("raspberry-pi-4", "raspberry-pi-5", "raspberry-pi-zero-2-w", "jetson-nano")
FREE: Final = ("--http", "127.0.0.1:0")  # the first time; a server comes back to its ports
ASKER: Final = "asker"  # the device that asks queries
TRAINING_REPORT: Final = RESULTS / "training-availability.json"


@dataclass(frozen=True, slots=True)
class Usage:
    """Use of a process and its children up to now; seconds of the processor, bytes of memory."""

    server_s: float
    broker_s: float
    server_bytes: int
    broker_bytes: int


class Site:
    """A server's state, and who is enrolled there.

    Args:
        work: an empty folder. devices: number of simulated devices.
        broker: as `server run --mqtt` takes it; "auto" is a Mosquitto that is installed.
        history_s: how much history the devices have.
    """

    def __init__(
        self, work: Path, devices: int, broker: str = "auto", history_s: float = HISTORY_S
    ) -> None:
        self.state = work / "server"
        make_models(self.state / "models", epochs=2)
        names = [f"cam-{number:04}" for number in range(devices)]
        make_training(self.state, TRAINING_REPORT, names[:14])
        server = ServerProcess(self.state)
        server.start((*FREE, "--mqtt", broker))
        try:
            profile = load_reference("raspberry-pi-4")
            token, folder = create_token(self.state), work / ASKER
            self.asker: Identity = api.enroll(
                server.http, token, folder, profile=profile, name=ASKER
            )
        finally:
            server.stop()
        with existing_registry(self.state) as registry:
            registry.catalogue.activate("digits", 1)
            self.devices = _enrol(registry, names)
            _fill_history(registry, names, history_s)
        self.shape = load_dataset("digits").x_test.shape[1:]

    @contextlib.contextmanager
    def running(self, options: Sequence[str] = ()) -> Iterator[Running]:
        """The server, with all devices logged in and sending heartbeats."""
        server = ServerProcess(self.state)
        server.start(options)
        try:
            broker = api.locate_broker(self.asker).broker
            with _heartbeats(broker, self.devices):
                yield Running(self, server, broker)
        finally:
            server.stop()

    def link(self) -> str:
        """The secret of a new sign-in link."""
        with existing_registry(self.state) as registry:
            return registry.sign_ins.new_link("anna")

    def start_rollout(self) -> None:
        """Begin a roll-out that waits: simulated devices take no version."""
        with existing_registry(self.state) as registry:
            plan = RolloutPlan("digits", 2, shares=(0.1, 1.0), health="fallback<5%")
            start_rollout(registry, plan)


class Running:
    """A server while it runs, and its processes."""

    def __init__(self, site: Site, server: ServerProcess, broker: str) -> None:
        self.http = server.http
        self._site = site
        self._broker = broker
        self._pid = server.pid

    def load(self, rate: float, seconds: float) -> Load:
        """Queries over MQTT, `rate` a second at fixed times; the server runs the whole network."""
        asker, shape = self._site.asker, self._site.shape
        return Load(
            self._broker,
            asker.device,
            asker.credential,
            "digits",
            shape,
            seconds=seconds,
            rate=rate,
            warm_s=2.0,
        )

    def usage(self) -> Usage:
        """Use up to now; the broker is what the server started."""
        below = children(self._pid)
        return Usage(
            processor_s(self._pid),
            sum(map(processor_s, below)),
            memory_bytes(self._pid),
            sum(map(memory_bytes, below)),
        )


def _enrol(registry: Registry, names: Sequence[str]) -> list[dict[str, str]]:
    """Enrol devices; their name, credential and bundle."""
    found = []
    for number, (name, token) in enumerate(
        zip(names, registry.create_tokens(len(names)), strict=True)
    ):
        profile = load_reference(HARDWARE[number % len(HARDWARE)])
        _, credential = registry.redeem_token(token, name, profile.to_dict())
        bundle = BUNDLES[number % len(BUNDLES)]
        registry.assign(name, int(bundle.rpartition("d")[2]), bundle)
        found.append({"name": name, "credential": credential, "bundle": bundle})
    registry.reports.note_running({one["name"]: one["bundle"] for one in found})
    return found


def _fill_history(registry: Registry, names: Sequence[str], history_s: float) -> None:
    """Write the heartbeats of so long, as they would have come."""
    devices = [
        SimulatedDevice(name, BUNDLES[number % len(BUNDLES)], number)
        for number, name in enumerate(names)
    ]
    now = time.time()
    for beat in range(int(history_s / BEAT_S)):
        at = now - history_s + BEAT_S * beat
        registry.telemetry.record(
            {
                one.name: LastReading(at, Reading.from_heartbeat(one.heartbeat(BEAT_S)))
                for one in devices
            }
        )


@contextlib.contextmanager
def _heartbeats(broker: str, devices: Sequence[dict[str, str]]) -> Iterator[None]:
    """A process that sends the heartbeats of these devices, once all of them are logged in."""
    asked = {"port": int(broker.rpartition(":")[2]), "every_s": BEAT_S, "devices": devices}
    command = [sys.executable, "-P", "-m", "benchmarks.dashboard.heartbeats"]
    child = ChildProcess("the devices", command, environment=child_environment())
    child.write_line(orjson.dumps(asked).decode())
    child.expect("up", "did not log in")
    try:
        yield
    finally:
        child.close()
