"""Targets that roll-outs set for devices: one input of the assignment, pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from server.registry.records import Device, FleetModel
from server.registry.rollouts.records import BACK, Order


@dataclass(frozen=True, slots=True)
class Target:
    """A version that a device should run, and the very bundle of it where one is given."""

    version: str
    bundle: str | None = None

    @classmethod
    def of_bundle(cls, bundle: str) -> Self:
        """The target that is one bundle, `MODEL/VERSION/VARIANT`."""
        return cls(bundle.rpartition("/")[0], bundle)


def target_of(orders: Iterable[Order], fleet: FleetModel) -> Target | None:
    """The version or bundle that roll-outs want of a device; None if its fleet decides.

    The newest order wins: a roll-out does not count in a fleet that was given another version
    since. While a roll-out is live, its devices should run its version. After it failed or was
    aborted, a device should run the very bundle that it ran before, until it does. A roll-out of
    a tag or of one device that is done stays in force, until the device's fleet is given another
    version.

    Args:
        orders: of roll-outs about the device, newest first.
        fleet: what its fleet should run.
    """
    for order in orders:
        rollout, member = order.rollout, order.member
        if not rollout.counts_for(fleet):
            continue
        stands = rollout.standing and member.returned_at is None
        if rollout.live or stands:
            return Target(str(rollout.plan))
        going_back = rollout.state in BACK and member.returned_at is None
        if going_back and member.before is not None:
            return Target.of_bundle(member.before)
    return None


def targets_of(
    orders: Sequence[Order], devices: Iterable[Device], fleets: Mapping[str, FleetModel]
) -> dict[str, Target]:
    """Target of each of these devices, by device id; a device that is left to its fleet has none.

    Args:
        orders: newest first. fleets: the model of each fleet, by name.
    """
    of_device: dict[str, list[Order]] = {}
    for order in orders:
        of_device.setdefault(order.member.device, []).append(order)
    found = {}
    for device in devices:
        fleet = fleets.get(device.fleet)
        if fleet is None or device.id not in of_device:
            continue
        target = target_of(of_device[device.id], fleet)
        if target is not None:
            found[device.id] = target
    return found
