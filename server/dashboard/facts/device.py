"""Facts of the page of one device: what it is, runs, measured, refused and was told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from server.allocation import held_until
from server.dashboard.facts.fleet import (
    SUMS_S,
    FleetLine,
    Now,
    Told,
    fleet_lines,
    hardware_of,
)
from server.dashboard.facts.models import BundleFacts, bundle_facts, bundles_in
from server.deployment.overview import states_of
from server.registry.database import Registry
from server.registry.records import AuditEntry, Order

EVENTS: Final = 50


@dataclass(frozen=True, slots=True)
class LeftBundle:
    """A bundle that the device had to leave; its depth is not assigned until `held_until`."""

    bundle: str
    kind: str
    why: str
    failed_at: float
    count: int
    held_until: float


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device; times are UTC seconds since 1970.

    Attributes:
        profile: as the device told it.
        running: the bundle that it runs, with its operating curve.
        measured: what each bundle takes on the device.
        refused: bundles that it refused or left, and why; it does not try them again by itself.
        orders: what it was told and has not done yet.
        choices: bundles to which it may be pinned: those of the version that its fleet runs.
        events: of the audit log, newest first.
    """

    line: FleetLine
    enrolled_at: float
    approved_at: float | None
    revoked_at: float | None
    profile: dict[str, Any]
    conditions: dict[str, Any] | None
    running: BundleFacts | None
    measured: list[dict[str, Any]]
    left: list[LeftBundle]
    refused: dict[str, str]
    orders: list[Order]
    choices: list[str]
    events: tuple[AuditEntry, ...]


def device_facts(registry: Registry, models: Path, device_id: str) -> DeviceFacts:
    """The facts of one device.

    Args:
        models: folder of the exports.
    Raises: UnknownDeviceError.
    """
    device = registry.device(device_id)
    known = registry.capabilities.of(device_id)
    states = states_of(registry, (device,))
    sums = registry.telemetry.sums(since_s=SUMS_S, device=device_id)
    last = registry.telemetry.last((device_id,)).get(device_id)
    present = (Now() if last is None else Now.of(last)).completed(known.conditions)
    told = Told({device_id: hardware_of(device.profile)}, {device_id: present}, sums)
    (line,) = fleet_lines((device,), states, told)
    wanted = registry.catalogue.wanted(device.fleet)
    version = models / str(wanted.model) / str(wanted.version)
    return DeviceFacts(
        line=line,
        enrolled_at=device.enrolled_at,
        approved_at=device.approved_at,
        revoked_at=device.revoked_at,
        profile=dict(device.profile),
        conditions=None if known.conditions is None else known.conditions.to_dict(),
        running=bundle_facts(models, line.runs),
        measured=[one.to_dict() for one in known.measurements],
        left=[
            LeftBundle(
                bundle=one.bundle,
                kind=one.kind,
                why=one.why,
                failed_at=one.failed_at,
                count=one.count,
                held_until=held_until(one),
            )
            for one in known.failures
        ],
        refused=registry.membership.refused_bundles(device_id),
        orders=[one for one in registry.membership.orders() if one.device == device_id],
        choices=[manifest.bundle for manifest, _ in bundles_in(version)],
        events=registry.trail.entries(EVENTS, about=device_id),
    )
