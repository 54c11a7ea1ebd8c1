"""The bundle that a device gets: the operator's pin, or a depth by the fleet's rule in a variant.

What the device measured itself comes before what the export estimated. A depth that the device had
to leave, for want of memory or speed, is left out for a while.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, cast

from profiles.allocation import Rule, allocate, fit_to_cut
from profiles.calibration import DepthCosts, Taken, at_present_speed
from profiles.cost import CostTable
from profiles.device import DeviceProfile
from profiles.errors import AllocationError, InvalidProfileError
from server.backend.models import StoredModel
from server.registry.records import Capability, Device, Failure, FailureKind

logger = logging.getLogger(__name__)

INT8: Final = "-int8"
# A variant replaces the present one if it takes less than this share of its time: a smaller gain
# may be noise, and every change costs the device an update.
FASTER_THAN: Final = 0.95
# A depth that a device had to leave is not assigned for this long, and twice as long each time
# again. A busy processor slows a long graph and not a short one, so a device that left a depth
# would soon look fast enough for it.
HOLD_S: Final[Mapping[FailureKind, float]] = {"memory": 3600.0, "conditions": 600.0}
HOLD_MOST_S: Final = 7 * 86_400.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The bundle for a device, and other variants of its depth that it should measure.

    Attributes:
        pinned: whether the operator chose the depth, and not what is known of the device.
    """

    depth: int
    bundle: str
    measure: tuple[str, ...] = ()
    pinned: bool = False


def choose_bundle(
    device: Device,
    model: StoredModel,
    fleet: Iterable[Device],
    rule: str,
    *,
    capability: Capability | None = None,
    now: float = 0.0,
) -> Choice:
    """The depth and the bundle for `device`.

    Of two published variants of a depth, the device gets the one that is faster there; before it
    has measured both, int8, because an export publishes it only where it is faster. A device on
    which no prefix fits gets the shallowest one.

    Args:
        fleet: the other devices, which are read only if the rule compares them.
        capability: what the device measured and reported, and the operator's pin of a depth.
        now: UTC seconds since 1970.
    """
    known = capability or Capability()
    taken = _taken(model, known)
    depth = _depth(device, model, fleet, rule, known=known, taken=taken, now=now)
    variants = _variants(model, depth)
    variant = _faster(device, variants, taken)
    unmeasured = tuple(name for name in variants if name not in taken and name != variant)
    pinned = known.pin is not None and known.pin.depth == depth
    return Choice(depth, variant, unmeasured, pinned)


def published_depths(model: StoredModel) -> tuple[int, ...]:
    """The depths at which a model has bundles, ascending."""
    return tuple(cut for cut in model.manifest.cuts if f"d{cut}" in model.manifest.variants)


def held_depths(model: StoredModel, failures: Iterable[Failure], now: float) -> set[int]:
    """Depths of this model that the device had to leave lately, and those below them.

    A version is not told apart: another training of a model takes the same memory.
    """
    failed = [
        depth_of(failure.bundle)
        for failure in failures
        if _is_of(failure.bundle, model) and now < held_until(failure)
    ]
    shallowest = min(failed, default=None)
    return {d for d in published_depths(model) if shallowest is not None and d >= shallowest}


def held_until(failure: Failure) -> float:
    """The time until which the depth that was left is not assigned, UTC seconds since 1970."""
    hold_s = HOLD_S[failure.kind] * 2.0 ** min(failure.count - 1, 30)
    return failure.failed_at + min(hold_s, HOLD_MOST_S)


def depth_of(bundle: str) -> int:
    """The depth in a bundle's name `{model}/{version}/d{depth}[-variant]`."""
    return int(bundle.rpartition("/")[2].removeprefix("d").partition("-")[0])


def is_shallower(bundle: str, than: str) -> bool:
    """Whether a bundle is of the same model as another one, and of a smaller depth."""
    return _form(bundle)[0] == _form(than)[0] and depth_of(bundle) < depth_of(than)


def _depth(
    device: Device,
    model: StoredModel,
    fleet: Iterable[Device],
    rule: str,
    *,
    known: Capability,
    taken: Mapping[str, Taken],
    now: float,
) -> int:
    cuts = published_depths(model)
    if known.pin is not None and known.pin.depth is not None:
        if known.pin.depth in cuts:
            return known.pin.depth
        logger.warning(
            "device=%s is pinned to depth %d, and %s/%s has only %s: its rule chooses",
            *(device.id, known.pin.depth, model.manifest.name, model.manifest.version, cuts),
        )
    held = held_depths(model, known.failures, now)
    allowed = [cut for cut in cuts if cut not in held]
    if not allowed:
        return cuts[0]
    cost = CostTable.from_dict(model.manifest.cost)
    profile = _present_profile(device, known)
    measured = _measured_depths(model, taken)
    try:
        return allocate(
            cast("Rule", rule),
            profile,
            cost,
            fleet=_profiles(fleet),
            cuts=allowed,
            costs=DepthCosts(cost, profile.core_score_gflops, measured),
            present=device.depth if _is_of(device.bundle, model) else None,
        )
    except (AllocationError, InvalidProfileError) as err:
        depth = fit_to_cut(0, allowed)
        logger.warning("device=%s gets the shallowest prefix: %s", device.id, err)
        return depth


def _taken(model: StoredModel, known: Capability) -> dict[str, Taken]:
    """Time and memory of the model's bundles on the device, as far as it measured them.

    A bundle that it has not measured counts as the same variant of another version, the one that it
    measured last: another training of a model takes the same time and memory.
    """
    found = at_present_speed(known.measurements, known.conditions)
    last = {_form(bundle): taken for bundle, taken in found.items()}
    bundles = [name for depth in published_depths(model) for name in _variants(model, depth)]
    return {
        name: found.get(name, last[_form(name)])
        for name in bundles
        if name in found or _form(name) in last
    }


def _is_of(bundle: str | None, model: StoredModel) -> bool:
    return bundle is not None and bundle.split("/")[0] == model.manifest.name


def _form(bundle: str) -> tuple[str, str]:
    """Model and variant in a bundle's name."""
    model, _, variant = bundle.split("/")
    return model, variant


def _present_profile(device: Device, known: Capability) -> DeviceProfile:
    """The device's profile, with the memory and the link that its agent reported last."""
    profile = DeviceProfile.from_dict(device.profile)
    found = known.conditions
    if found is None:
        return profile
    if found.memory_available_bytes is not None:
        available = min(found.memory_available_bytes, profile.memory_total_bytes)
        profile = replace(profile, memory_available_bytes=available)
    if found.round_trip_ms is not None:
        profile = replace(profile, link_latency_ms=found.round_trip_ms)
    if found.bandwidth_mbps is not None:
        profile = replace(profile, link_bandwidth_mbps=found.bandwidth_mbps)
    return profile


def _measured_depths(model: StoredModel, taken: Mapping[str, Taken]) -> dict[int, Taken]:
    """Measurement of each depth of the model, in its fastest variant."""
    found: dict[int, Taken] = {}
    for depth in published_depths(model):
        of_depth = [taken[name] for name in _variants(model, depth) if name in taken]
        if of_depth:
            found[depth] = min(of_depth, key=lambda one: one.latency_ms)
    return found


def _variants(model: StoredModel, depth: int) -> list[str]:
    """The names of the published bundles of a depth, int8 first."""
    manifest = model.manifest
    return [
        f"{manifest.name}/{manifest.version}/{variant}"
        for variant in (f"d{depth}{INT8}", f"d{depth}")
        if variant in manifest.variants
    ]


def _faster(device: Device, variants: list[str], taken: Mapping[str, Taken]) -> str:
    """The variant that is faster on the device; the present one where they are alike."""
    present = device.bundle if device.bundle in variants else variants[0]
    if any(name not in taken for name in variants):
        return variants[0]
    fastest = min(variants, key=lambda name: taken[name].latency_ms)
    gained = taken[fastest].latency_ms <= FASTER_THAN * taken[present].latency_ms
    return fastest if gained else present


def _profiles(fleet: Iterable[Device]) -> Iterator[DeviceProfile]:
    for device in fleet:
        profile = DeviceProfile.from_dict(device.profile)
        if profile.link is not None:
            yield profile
