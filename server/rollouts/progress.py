"""Progress of a roll-out: a pure state machine, one step at a time.

    running     devices of a share take the version, then they are watched; then comes the next
                share, and after the last one the roll-out is done
    paused      no device joins, nothing is judged
    done        the fleets' own version is this one now; or, for a tag or a device, it stays
    failed      by itself: the devices go back to what they ran
    aborted     by the operator: the same
    superseded  the operator gave the fleets another version meanwhile, and they run that

A roll-out is kept whole in the registry, so each step may be the last one of a server, and the next
server goes on from there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from server.deployment.calls import version_of
from server.registry.records import Device, DeviceReport, FleetModel
from server.registry.rollouts.records import BACK, Member, Rollout
from server.registry.selection.standing import past_reason
from server.rollouts.health import Finding

# a device that says it runs the old bundle so long after the end has no update under way
RETURN_S: Final = 120.0
NAMED_MOST: Final = 5  # devices that a reason names

Event = Literal["", "share", "done", "failed", "superseded"]


@dataclass(frozen=True, slots=True)
class Facts:
    """Knowledge with which a step is made.

    Attributes:
        now: UTC seconds since 1970.
        fleets: what each fleet should run, by name.
        devices: that are enrolled and not shut out.
        pinned: ids of devices that are pinned to a bundle: pins come first.
        present: ids of devices that were heard from lately.
        running: bundles that devices said they run in heartbeats since the last step, by id.
        reports: the last report of each device, by id.
        heard_at: times of these heartbeats, UTC seconds since 1970, by id; now where it is missing.
        settled: whether the server has run long enough to have heard each device that is there.
    """

    now: float
    fleets: Mapping[str, FleetModel]
    devices: Sequence[Device]
    pinned: Collection[str] = ()
    present: Collection[str] = ()
    running: Mapping[str, str] = field(default_factory=dict)
    reports: Mapping[str, DeviceReport] = field(default_factory=dict)
    heard_at: Mapping[str, float] = field(default_factory=dict)
    settled: bool = True


# findings on the devices of a share, by id; those that stayed come second
Judge = Callable[[Rollout, Sequence[Member], Sequence[str]], Sequence[Finding]]


@dataclass(frozen=True, slots=True)
class Step:
    """The outcome of a step: the roll-out and its members as they are then.

    Attributes:
        joined: members that are new. changed: members that are not as before.
        event: what happened, for the audit log; "" if nothing did.
    """

    rollout: Rollout
    joined: tuple[Member, ...] = ()
    changed: tuple[Member, ...] = ()
    event: Event = ""


def step(rollout: Rollout, members: Sequence[Member], facts: Facts, judge: Judge) -> Step:
    """The next step of a roll-out.

    Args:
        members: of the roll-out.
        judge: called only if the health of the share matters for this step.
    """
    if rollout.state in BACK:
        return Step(rollout, changed=_changed(members, _returning(rollout, members, facts)))
    if rollout.standing and _is_past(rollout, members, facts):
        return Step(replace(rollout, standing=False, reason=past_reason(rollout.base)))
    if not rollout.live:
        return Step(rollout)
    moved = {one.device for one in in_force(rollout, members, facts)}
    noted = [
        _noted(rollout, one, facts) if one.device in moved else _released(one, facts)
        for one in members
    ]
    changed = _changed(members, noted)
    if is_superseded(rollout, facts):
        over = _ended(rollout, "superseded", facts, _other_order(rollout, facts))
        return Step(over, (), changed, "superseded")
    if rollout.state == "paused":
        return Step(rollout, changed=changed)
    return _run(rollout, noted, changed, facts, judge)


def in_force(rollout: Rollout, members: Iterable[Member], facts: Facts) -> list[Member]:
    """The members that the roll-out still moves: active, not pinned, in a fleet where it counts."""
    moved = {device.id for device in facts.devices if _may_move(rollout, device, facts)}
    return [one for one in members if one.device in moved]


def eligible(rollout: Rollout, facts: Facts) -> list[Device]:
    """The devices that the roll-out may move, in the order in which they join.

    Devices that are there come first: a share of devices that are away could not be judged. Among
    them a hash of roll-out and device decides, so that no device always goes first.
    """
    found = [
        device
        for device in facts.devices
        if rollout.plan.selection.matches(device) and _may_move(rollout, device, facts)
    ]
    return sorted(found, key=lambda one: (one.id not in facts.present, place(rollout, one.id)))


def place(rollout: Rollout, device: str) -> str:
    """A device's place in the order of a roll-out: the same at all times, another in each one."""
    return hashlib.sha256(f"{rollout.id} {rollout.plan} {device}".encode()).hexdigest()


def quota(share: float, count: int) -> int:
    """The number of devices in a share of `count`, at least one."""
    return min(count, max(1, math.ceil(round(share * count, 6))))


def waits_for(rollout: Rollout, members: Sequence[Member], facts: Facts) -> list[str]:
    """Ids of the members that are there and have not taken the version yet."""
    return [
        one.device
        for one in in_force(rollout, members, facts)
        if one.taken_at is None and not one.trouble and one.device in facts.present
    ]


def is_superseded(rollout: Rollout, facts: Facts) -> bool:
    """Whether no fleet is left in which the roll-out is the newest order."""
    fleet = rollout.plan.selection.fleet
    if fleet is not None and fleet not in facts.fleets:
        return False
    return not rollout.counts_for_any(facts.fleets.values())


def _run(
    rollout: Rollout,
    noted: Sequence[Member],
    changed: tuple[Member, ...],
    facts: Facts,
    judge: Judge,
) -> Step:
    """The next step of a running roll-out: back, more devices, or a look at those it has."""
    counted = in_force(rollout, noted, facts)
    troubled = [one for one in counted if one.trouble]
    if len(troubled) > rollout.plan.failures_max:
        return Step(_ended(rollout, "failed", facts, _troubles(troubled)), (), changed, "failed")
    if not facts.settled and any(not _fills(one, facts) for one in counted):
        return Step(rollout, changed=changed)  # it may be there, and was not heard yet
    joined = _joining(rollout, noted, facts)
    if joined:
        return Step(rollout, joined, changed)
    return _judged(rollout, counted, changed, facts, judge)


def _judged(
    rollout: Rollout,
    counted: Sequence[Member],
    changed: tuple[Member, ...],
    facts: Facts,
    judge: Judge,
) -> Step:
    """Watch the share; go on, or go back."""
    taken = [one for one in counted if one.taken_at is not None and not one.trouble]
    if not taken:
        return Step(rollout, changed=changed)
    if rollout.watched_at is None and not waits_for(rollout, counted, facts):
        rollout = replace(rollout, watched_at=facts.now)
    chosen = {one.device for one in counted}
    others = [one.id for one in eligible(rollout, facts) if one.id not in chosen]
    findings = judge(rollout, taken, others)
    worse = [str(finding) for finding in findings if finding.verdict == "worse"]
    if worse:
        return Step(_ended(rollout, "failed", facts, "; ".join(worse)), (), changed, "failed")
    watched = rollout.watched_at is not None and (
        facts.now - rollout.watched_at >= rollout.plan.wait_s
    )
    good = all(finding.verdict == "good" for finding in findings)
    if not watched or not good or waits_for(rollout, counted, facts):
        return Step(rollout, changed=changed)
    if rollout.stage + 1 < len(rollout.plan.shares):
        more = replace(rollout, stage=rollout.stage + 1, stage_at=facts.now, watched_at=None)
        return Step(more, (), changed, "share")
    return Step(_ended(rollout, "done", facts, ""), (), changed, "done")


def _joining(rollout: Rollout, members: Sequence[Member], facts: Facts) -> tuple[Member, ...]:
    """Members to add, so that the share has its size. Who is in it stays in it.

    A device that is away joins only the last share, in which all are: it would take the version
    when it comes back, which nobody would see before. A member that went away before it took the
    version keeps its place, and fills none of the share.
    """
    there = {one.device: one for one in members}
    candidates = eligible(rollout, facts)
    new = [one for one in candidates if one.id not in there]
    if rollout.share < 1.0:
        inside = sum(_fills(there[one.id], facts) for one in candidates if one.id in there)
        missing = quota(rollout.share, len(candidates)) - inside
        new = [one for one in new if one.id in facts.present][: max(0, missing)]
    return tuple(
        Member(rollout.id, one.id, rollout.stage, _before(rollout, one, facts), facts.now)
        for one in new
    )


def _fills(member: Member, facts: Facts) -> bool:
    """Whether a member fills a place of its share: it is there, or showed what it thinks of it."""
    return bool(member.taken_at or member.trouble) or member.device in facts.present


def _before(rollout: Rollout, device: Device, facts: Facts) -> str | None:
    """The bundle to which a device goes back: what it says it runs, else what it was given."""
    report = facts.reports.get(device.id)
    bundle = device.bundle if report is None or report.running is None else report.running
    return None if version_of(bundle) == str(rollout.plan) else bundle


def _noted(rollout: Rollout, member: Member, facts: Facts) -> Member:
    """A member with what its device said since."""
    version = str(rollout.plan)
    running = facts.running.get(member.device)
    if running is not None and version_of(running) == version:
        # it runs, whatever was in the way before: an operator may have helped it
        # the time of the heartbeat: the device's history begins its next point there, and a turn
        # of a busy server comes seconds later
        said_at = min(facts.now, facts.heard_at.get(member.device, facts.now))
        taken_at = said_at if member.taken_at is None else member.taken_at
        return replace(member, taken_at=taken_at, trouble="")
    if running is not None and member.taken_at is not None and not member.trouble:
        return replace(member, trouble=f"it went back to {running} by itself")
    report = facts.reports.get(member.device)
    if report is not None and version_of(report.refused) == version and not member.trouble:
        return replace(member, trouble=f"it refused {report.refused}: {report.why or 'no reason'}")
    return member


def _released(member: Member, facts: Facts) -> Member:
    """A member that does not move now: under a pin it runs what the operator chose."""
    return replace(member, taken_at=None) if member.device in facts.pinned else member


def _is_past(rollout: Rollout, members: Iterable[Member], facts: Facts) -> bool:
    """Whether the fleets of all members were given another version since."""
    inside = {one.device for one in members}
    fleets = {one.fleet for one in facts.devices if one.id in inside}
    return not any(
        name in facts.fleets and rollout.counts_for(facts.fleets[name]) for name in fleets
    )


def _returning(rollout: Rollout, members: Sequence[Member], facts: Facts) -> list[Member]:
    """Members after the end of a roll-out that goes back: those that are back are noted.

    So are those that follow another order by now.
    """
    counts = {
        device.id
        for device in facts.devices
        if device.fleet in facts.fleets and rollout.counts_for(facts.fleets[device.fleet])
    }
    settled = facts.now - (rollout.ended_at or 0.0) >= RETURN_S
    found = []
    for one in members:
        back = one.before is not None and facts.running.get(one.device) == one.before
        # a device that never ran the version may still be fetching it
        over = (back and (one.taken_at is not None or settled)) or one.device not in counts
        if over and one.returned_at is None:
            found.append(replace(one, returned_at=facts.now))
        else:
            found.append(one)
    return found


def _may_move(rollout: Rollout, device: Device, facts: Facts) -> bool:
    fleet = facts.fleets.get(device.fleet)
    counts = fleet is not None and rollout.counts_for(fleet)
    return counts and device.active and device.id not in facts.pinned


def _ended(
    rollout: Rollout,
    state: Literal["done", "failed", "superseded"],
    facts: Facts,
    reason: str,
) -> Rollout:
    chosen = rollout.plan.selection
    narrow = chosen.tag is not None or chosen.device is not None
    standing = state == "done" and narrow
    return replace(rollout, state=state, ended_at=facts.now, standing=standing, reason=reason)


def _other_order(rollout: Rollout, facts: Facts) -> str:
    fleet = facts.fleets.get(rollout.plan.selection.fleet or "")
    if fleet is not None:
        return f"fleet {fleet.fleet} was given {fleet.model}/{fleet.version} meanwhile"
    return f"no fleet should run {rollout.plan.model}/{rollout.base} any more"


def _troubles(members: Sequence[Member]) -> str:
    named = [f"{one.device}: {one.trouble}" for one in members[:NAMED_MOST]]
    more = len(members) - len(named)
    return "; ".join([*named, f"and {more} more"] if more else named)


def _changed(before: Sequence[Member], after: Sequence[Member]) -> tuple[Member, ...]:
    return tuple(new for old, new in zip(before, after, strict=True) if new != old)
