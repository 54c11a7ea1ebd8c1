"""A fleet to look at: a server's state with a trained model, simulated devices and their past."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import orjson
import torch

from benchmarks.dashboard.simulated import LARGEST, SimulatedDevice
from edge_sdk.manifest import BundleManifest
from edge_sdk.nets import build
from edge_sdk.training.data.load import load_dataset
from exporters.model import export_model
from profiles.measured import BundleMeasurement, Conditions, GraphMeasurement
from profiles.reference import load_reference
from server.registry.alerts.alert import Changes, Finding
from server.registry.database import Registry
from server.registry.rollouts.records import Member as RolloutMember
from server.registry.rollouts.records import RolloutPlan
from server.registry.selection.selection import Selection
from server.registry.telemetry.history import LastReading
from server.registry.telemetry.reading import Reading
from server.rollouts.start import start_rollout
from server.state import existing_registry

PAST_S: Final = 3_500.0
BEAT_S: Final = 30.0
EPOCHS: Final = 12
CUTS: Final = (1, 2, 4)
FAR: Final = "belt-2"  # a device with a bad link
CANARIES: Final = ("oven-cam", "fridge-cam")  # the first share of a roll-out
WATCHED_S: Final = 420.0
ALERTS_S: Final = 60.0
HARDWARE: Final = ("raspberry-pi-4", "raspberry-pi-5", "raspberry-pi-zero-2-w", "jetson-nano")


@dataclass(frozen=True, slots=True)
class Member:
    """One device of the picture: its fleet, tags and depth, and what it is like."""

    name: str
    fleet: str
    tags: tuple[str, ...]
    depth: int
    device: SimulatedDevice


def make_models(models: Path, epochs: int = EPOCHS) -> None:
    """Train a small network on the digits and export it as versions 1, 2 and 3."""
    data = load_dataset("digits")
    torch.set_num_threads(1)
    net = build("tiny", mean=data.mean, std=data.std, seed=0)
    inputs = torch.from_numpy(np.ascontiguousarray(data.x_train))
    labels = torch.from_numpy(data.y_train)
    optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    loss = torch.nn.functional.cross_entropy
    for version in (1, 2, 3):
        net.train()
        for _ in range(epochs):
            for rows in torch.split(torch.randperm(len(labels), generator=generator), 64):
                optimiser.zero_grad()
                exits, final = net.forward_exits(inputs[rows])
                own = torch.stack([loss(logits, labels[rows]) for logits in exits.values()])
                total = loss(final, labels[rows]) + own.mean()
                total.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                optimiser.step()
        net.eval()
        export_model(
            net,
            data.x_test,
            data.y_test,
            models,
            name="digits",
            version=version,
            class_names=[str(digit) for digit in range(10)],
            depths=CUTS,
            int8="never",
        )


def make_training(state: Path, report: Path, names: Sequence[str]) -> None:
    """Leave rounds where a training with devices has its own.

    Accuracy, loss and bytes are those of a committed report; who took part is drawn.
    """
    rounds = orjson.loads(report.read_bytes())["runs"][4]["rounds"]
    draw = np.random.default_rng(0)
    folder = state / "training" / "yard-digits"
    folder.mkdir(parents=True)
    with (folder / "log.jsonl").open("wb") as log:
        for row in rounds:
            away = [name for name in names if draw.random() < 0.08]
            there = [name for name in names if name not in away]
            why = dict.fromkeys(away, "no heartbeat for 30 s")
            who = {"participants": there, "missing": away, "missing_why": why}
            log.write(orjson.dumps({**row, **who}, option=orjson.OPT_APPEND_NEWLINE))


def members() -> list[Member]:
    """Fourteen devices in three fleets."""
    places = {
        "yard": ("gate-cam", "porch-cam", "barn-cam", "drive-cam", "fence-cam"),
        "kitchen": ("oven-cam", "fridge-cam", "counter-cam", "door-cam"),
        "line-1": ("press-a", "press-b", "belt-1", "belt-2", "packer"),
    }
    found: list[Member] = []
    for fleet, names in places.items():
        for name in names:
            number = len(found)
            depth = CUTS[number % len(CUTS)]
            device = SimulatedDevice(
                name,
                f"digits/2/d{depth}",
                seed=number,
                fallback=0.31 if name == FAR else 0.02,
                rate=2.0 + number % 5,
                doubt=0.10 + 0.02 * (number % 4),
                device_ms=0.4 + 0.3 * depth,
                memory_bytes=(220 + 70 * (number % 6)) * 1_000_000,
            )
            tags = ("outdoor",) if fleet == "yard" else ()
            found.append(Member(name, fleet, tags, depth, device))
    return found


def fill(state: Path, fleet: list[Member]) -> None:
    """Enrol the devices at a server that has run once, with an hour of history."""
    pictured = fleet[1].device
    folder = state / "models" / pictured.bundle.replace("/d", "/bundles/d")
    curve = BundleManifest.load(folder).gate.curve
    inside = [(one.threshold, one.exit_rate) for one in curve if one.threshold < LARGEST]
    pictured.held_out = tuple(sorted(inside))
    with existing_registry(state) as registry:
        registry.catalogue.activate("digits", 2)
        for number, member in enumerate(fleet):
            _enrol(registry, member, HARDWARE[number % len(HARDWARE)])
        now = time.time()
        for step in range(int(PAST_S / BEAT_S)):
            at = now - PAST_S + BEAT_S * (step + 1)
            if now - at <= WATCHED_S:
                _take_version(fleet)
            registry.telemetry.record(
                {
                    member.name: LastReading(
                        at, Reading.from_heartbeat(member.device.heartbeat(30))
                    )
                    for member in fleet
                }
            )
        registry.touch(*(member.name for member in fleet[:-1]))
        left = fleet[3]
        why = "golden inputs: 3 of 16 answers differ from the export's"
        registry.reports.note_update(left.name, "digits/1/d1", "digits/2/d1", why)
        registry.capabilities.pin(fleet[1].name, bundle=f"digits/2/d{fleet[1].depth}")
        _start_rollout(registry, now)
        _pass_an_alert(registry)
        waits = registry.create_token("yard", approve=True)
        registry.redeem_token(waits, "shed-cam", load_reference("raspberry-pi-5").to_dict())


def wait_for_alerts(state: Path) -> None:
    """Wait until the running server has found what is wrong with the devices."""
    until = time.monotonic() + ALERTS_S
    with existing_registry(state) as registry:
        while {one.kind for one in registry.alerts.open()} < {"fallbacks", "refused"}:
            if time.monotonic() > until:
                raise SystemExit("the server opened no alerts")
            time.sleep(0.5)


def _take_version(fleet: list[Member]) -> None:
    """Let the canaries run version 3 from now on."""
    for member in fleet:
        if member.name in CANARIES:
            member.device.bundle = f"digits/3/d{member.depth}"


def _start_rollout(registry: Registry, now: float) -> None:
    """Leave a roll-out to the kitchen whose first share has run the version for some minutes."""
    shares, health = (0.5, 1.0), "fallback<5%,exit>60%,latency<80ms"
    chosen = Selection(fleet="kitchen")
    plan = RolloutPlan("digits", 3, chosen, shares, health, wait_s=600.0, answers_min=200)
    started = start_rollout(registry, plan, who="operator:anna")
    runs = {one.device: one.running or "" for one in registry.reports.all().values()}
    joined = [
        RolloutMember(started.id, name, 0, runs[name], now - WATCHED_S, now - WATCHED_S)
        for name in CANARIES
    ]
    registry.rollouts.apply(started, replace(started, watched_at=now - WATCHED_S), joined=joined)
    taken = {name: runs[name].replace("digits/2", "digits/3") for name in CANARIES}
    registry.reports.note_running(taken)


def _pass_an_alert(registry: Registry) -> None:
    """Leave an alert that was over by itself."""
    text = "last heard 6 minutes ago; is it on, and does it reach the broker?"
    opened, _ = registry.alerts.apply(Changes(opening=[Finding("silent", "barn-cam", text)]))
    registry.alerts.apply(Changes(closing=opened))


def _enrol(registry: Registry, member: Member, hardware: str) -> None:
    token = registry.create_token(member.fleet)
    profile = replace(load_reference(hardware), name=hardware).to_dict()
    registry.redeem_token(token, member.name, profile)
    bundle = f"digits/2/d{member.depth}"
    registry.assign(member.name, member.depth, bundle)
    registry.reports.note_running({member.name: bundle})
    if member.tags:
        registry.tags.add(member.name, member.tags)
    for depth in CUTS:
        took = GraphMeasurement(0.3 + 0.3 * depth, 900_000 * depth, 50)
        measured = BundleMeasurement(f"digits/2/d{depth}", {"exit": took}, 2.5, 1_100_000 * depth)
        registry.capabilities.measured(member.name, measured)
    now = Conditions(bundle, member.device.memory_bytes, None, None, 38.0)
    registry.capabilities.report_conditions(member.name, now)
