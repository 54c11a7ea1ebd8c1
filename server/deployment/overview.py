"""Overview of a fleet's models: what each device runs, wants and refused, by device and by version.

The command line and the API show the same; both read the registry alone, so a server need not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from server.deployment.calls import version_of
from server.deployment.presence import Presence, presence_of
from server.registry.database import Registry
from server.registry.records import Device, DeviceReport, FleetModel, ModelVersion
from server.registry.rollouts.targets import targets_of
from server.registry.transactions import check_id


@dataclass(frozen=True, slots=True)
class DeviceState:
    """One device.

    Attributes:
        depth, bundle: as the server assigned them last.
        runs: bundle that the device says it runs.
        wants: bundle that it should run, `MODEL/VERSION/VARIANT`; `MODEL/VERSION` until it has
            asked for its bundle of that version.
        refused, why: bundle that it could not take on, and the reason.
        last_seen: UTC seconds since 1970.
        presence: `waiting` for the operator's approval; `never` heard of since it enrolled.
        approved: False while the device waits for the operator's approval.
        pinned: depth or bundle to which the operator pinned it; None if its fleet's rule chooses.
        tags: the operator's words for it.
        title: what people call it; None if they use its id.
    """

    device: str
    fleet: str
    depth: int | None
    bundle: str | None
    runs: str | None
    wants: str | None
    refused: str | None
    why: str | None
    last_seen: float | None
    presence: Presence
    revoked: bool
    pinned: str | None = None
    approved: bool = True
    tags: tuple[str, ...] = ()
    title: str | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A device that could not take on a version, and the reason."""

    device: str
    why: str


@dataclass(frozen=True, slots=True)
class VersionState:
    """One published version.

    Attributes:
        published_at: UTC seconds since 1970.
        activated_at: when it last became active; None if it never did, or was rolled back.
        fleets: that should run it; `pinned` are those of them that stay at it.
        wanted_by, run_by: ids of devices that should run it, and of those that do.
        refused_by: devices that could not take it on.
    """

    model: str
    version: int
    active: bool
    published_at: float
    activated_at: float | None
    fleets: tuple[str, ...]
    pinned: tuple[str, ...]
    wanted_by: tuple[str, ...]
    run_by: tuple[str, ...]
    refused_by: tuple[Refusal, ...]


def device_states(
    registry: Registry, fleet: str | None = None, *, tag: str | None = None
) -> list[DeviceState]:
    """Every device, or those of one fleet, or those with a tag, by id.

    Raises: BadRequestError for a fleet or a tag that is not an id.
    """
    return states_of(registry, tagged(registry.devices(fleet, profiles=False), tag))


def tagged(devices: Sequence[Device], tag: str | None) -> Sequence[Device]:
    """The devices that carry a tag; all of them for None.

    Raises: BadRequestError for a tag that is not an id.
    """
    if tag is None:
        return devices
    check_id(tag, "tag")
    return [device for device in devices if tag in device.tags]


def states_of(registry: Registry, devices: Sequence[Device]) -> list[DeviceState]:
    """The state of each of these devices, in their order."""
    pins = registry.capabilities.pinned()
    own = {device: pin.bundle for device, pin in pins.items() if pin.bundle is not None}
    fleets = _fleets_of(registry, devices)
    for device, target in targets_of(registry.rollouts.orders(), devices, fleets).items():
        own.setdefault(device, target.bundle or target.version)
    states = _states(devices, registry.reports.all(), fleets, own, registry.rollouts.now())
    return [
        replace(one, pinned=str(pins[one.device])) if one.device in pins else one for one in states
    ]


def version_states(registry: Registry) -> list[VersionState]:
    """Every published version, by name and version."""
    fleets = registry.catalogue.fleets()
    states = [state for state in device_states(registry) if not state.revoked]
    return [_version_state(one, fleets, states) for one in registry.catalogue.versions()]


def _fleets_of(registry: Registry, devices: Iterable[Device]) -> dict[str, FleetModel]:
    known = {one.fleet: one for one in registry.catalogue.fleets()}
    for fleet in {device.fleet for device in devices} - known.keys():
        known[fleet] = registry.catalogue.wanted(fleet)  # all of its devices are revoked
    return known


def _states(
    devices: Iterable[Device],
    reports: Mapping[str, DeviceReport],
    fleets: Mapping[str, FleetModel],
    own: Mapping[str, str],
    now: float,
) -> list[DeviceState]:
    """The devices' states.

    Args:
        own: version or bundle that a device should run whatever its fleet runs, by id.
        now: UTC seconds since 1970.
    """
    states = []
    for device in devices:
        report = reports.get(device.id, DeviceReport(device.id))
        revoked = device.revoked_at is not None
        wants = _wants(device, own.get(device.id) or _version_of_fleet(fleets[device.fleet]))
        states.append(
            DeviceState(
                device=device.id,
                fleet=device.fleet,
                depth=device.depth,
                bundle=device.bundle,
                runs=report.running,
                wants=None if revoked else wants,
                refused=report.refused,
                why=report.why,
                last_seen=device.last_seen,
                presence=presence_of(device, now),
                revoked=revoked,
                approved=device.approved_at is not None,
                tags=device.tags,
                title=device.title,
            )
        )
    return states


def _version_of_fleet(fleet: FleetModel) -> str | None:
    return None if fleet.model is None else f"{fleet.model}/{fleet.version}"


def _wants(device: Device, order: str | None) -> str | None:
    """The bundle that a device should run; `MODEL/VERSION` until it has asked for its bundle."""
    return device.bundle if version_of(device.bundle) == order else order


def _version_state(
    one: ModelVersion, fleets: Iterable[FleetModel], states: Iterable[DeviceState]
) -> VersionState:
    name = str(one)
    key = (one.name, one.version)
    of_version = [fleet for fleet in fleets if (fleet.model, fleet.version) == key]
    return VersionState(
        model=one.name,
        version=one.version,
        active=one.active,
        published_at=one.published_at,
        activated_at=one.activated_at,
        fleets=tuple(fleet.fleet for fleet in of_version),
        pinned=tuple(fleet.fleet for fleet in of_version if fleet.pinned),
        wanted_by=tuple(s.device for s in states if _is_of(s.wants, name)),
        run_by=tuple(s.device for s in states if _is_of(s.runs, name)),
        refused_by=tuple(Refusal(s.device, s.why or "") for s in states if _is_of(s.refused, name)),
    )


def _is_of(bundle: str | None, version: str) -> bool:
    return bundle is not None and (bundle == version or version_of(bundle) == version)
