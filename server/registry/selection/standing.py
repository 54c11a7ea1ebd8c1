"""The end of standing roll-outs, in the very transaction that gives fleets another version.

Whoever looked only afterwards would miss a fleet that was given another version and went back at
once: the roll-out would be in force again, and its devices would leave what the operator chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sqlalchemy import Connection, and_, select, update

from server.registry.records import FleetModel
from server.registry.schema import devices, rollout_members, rollouts

Wanted = Callable[[Iterable[str]], Iterable[FleetModel]]


def counts_in(fleet: FleetModel, base: tuple[str, int], *, own: bool) -> bool:
    """Whether a roll-out is the newest order for a fleet.

    Args:
        base: model and version that its fleets should run without it.
        own: whether it is of that fleet by name.
    """
    return (fleet.model, fleet.version) == base and (own or not fleet.pinned)


def past_reason(base: int) -> str:
    """Why a roll-out that stood does so no longer."""
    return f"it no longer counts: the devices were given another version than {base}"


def end_standing(connection: Connection, now: float, wanted: Wanted) -> None:
    """Release the devices of standing roll-outs whose fleets were given another version.

    A roll-out without a device that is left ends to stand.

    Args:
        now: UTC seconds since 1970.
        wanted: what fleets of these names should run, inside the transaction.
    """
    standing = select(rollouts.c.id, rollouts.c.model, rollouts.c.base, rollouts.c.fleet)
    for rollout in connection.execute(standing.where(rollouts.c.standing)).all():
        members = _fleets_of_members(connection, rollout.id)
        own = rollout.fleet is not None
        kept = {
            one.fleet
            for one in wanted(sorted(set(members.values())))
            if counts_in(one, (rollout.model, rollout.base), own=own)
        }
        released = [device for device, fleet in members.items() if fleet not in kept]
        if not released:
            continue
        this = rollout_members.c.rollout == rollout.id
        gone = and_(this, rollout_members.c.device.in_(released))
        connection.execute(update(rollout_members).where(gone).values(returned_at=now))
        values: dict[str, Any] = {"revision": rollouts.c.revision + 1}
        if len(released) == len(members):
            values |= {"standing": False, "reason": past_reason(rollout.base)}
        connection.execute(update(rollouts).where(rollouts.c.id == rollout.id).values(values))


def _fleets_of_members(connection: Connection, rollout: int) -> dict[str, str]:
    """Fleet of each device that the roll-out still keeps at its version, by id."""
    query = (
        select(devices.c.id, devices.c.fleet)
        .join(rollout_members, rollout_members.c.device == devices.c.id)
        .where(rollout_members.c.rollout == rollout, rollout_members.c.returned_at.is_(None))
    )
    return {row.id: row.fleet for row in connection.execute(query)}
