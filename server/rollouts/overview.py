"""A roll-out as people see it: how far it is, what it waits for, its devices, its health.

The command line, the API and the dashboard show the same. All of it is in the registry, so a server
need not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from edge_sdk.cli.times import ago, plural
from server.registry.database import Registry
from server.registry.records import DeviceReport
from server.registry.rollouts.records import BACK, Member, Rollout
from server.rollouts.facts import BehaviourSums, HealthJudge, read_facts
from server.rollouts.health import Finding, parse_health
from server.rollouts.progress import Facts, eligible, in_force, quota, waits_for

NAMED_MOST: Final = 5


@dataclass(frozen=True, slots=True)
class ConditionState:
    """One health condition.

    Attributes:
        verdict: "good", "worse" or "unknown"; "" while it is paused, and after the end.
        value, limit: of the share's devices; shares, or milliseconds.
    """

    condition: str
    verdict: str
    value: float | None = None
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class MemberState:
    """A device of a share.

    Attributes:
        share: with which it joined, 0 to 1.
        state: "waiting" until it runs the version, "runs it", "failed", "going back", "back", or
            "left" once another order counts for it.
        before: bundle that it ran when it joined. runs: that it runs now.
        last_seen: UTC seconds since 1970.
    """

    device: str
    share: float
    state: str
    before: str | None
    runs: str | None
    why: str
    last_seen: float | None


@dataclass(frozen=True, slots=True)
class RolloutState:
    """One roll-out. Times are UTC seconds since 1970.

    Attributes:
        version: `MODEL/VERSION`. base: the one that its fleets should run without it.
        devices: that it may move. members: in the shares so far; taken: of those, how many run it.
        answers: of the share's devices since they took the version, while they are judged.
        waits: what the next step waits for, in words; "" if for nothing.
    """

    id: int
    version: str
    base: str
    selection: str
    state: str
    share: float
    shares: tuple[float, ...]
    wait_s: float
    answers_min: int
    failures_max: int
    started_at: float
    stage_at: float
    watched_at: float | None
    ended_at: float | None
    standing: bool
    reason: str
    who: str
    devices: int
    joined: int
    taken: int
    answers: int
    waits: str
    health: tuple[ConditionState, ...]
    members: tuple[MemberState, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return asdict(self)


def rollout_states(registry: Registry) -> list[RolloutState]:
    """Every roll-out, newest first."""
    facts = read_facts(registry)
    return [_state(registry, one, facts) for one in registry.rollouts.all()]


def rollout_state(registry: Registry, rollout_id: int) -> RolloutState:
    """The roll-out with that number.

    Raises: UnknownRolloutError.
    """
    return _state(registry, registry.rollouts.of(rollout_id), read_facts(registry))


class NewestRollouts:
    """Reads the newest roll-outs again and again; one thread at a time uses it.

    Each look reads what came since the one before: of the history, only new points; of a roll-out
    that is over, nothing, and it is told without its devices.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._sums: dict[int, BehaviourSums] = {}
        self._over: dict[tuple[int, int], RolloutState] = {}  # by number and revision

    def read(self, most: int) -> tuple[list[RolloutState], int]:
        """The newest `most` roll-outs, newest first, and the number of older ones."""
        registry = self._registry
        facts, found = read_facts(registry), registry.rollouts.all()
        moving = {one.id for one in registry.rollouts.to_step()}
        shown = found[:most]
        sums = {one.id: self._sums_of(one.id) for one in shown if one.live}
        self._sums = sums
        over, states = {}, []
        for one in shown:
            key = one.id, one.revision
            state = self._over.get(key) or _state(registry, one, facts, sums.get(one.id))
            if one.id not in moving:
                state = over[key] = replace(state, members=())
            states.append(state)
        self._over = over
        return states, len(found) - len(shown)

    def _sums_of(self, number: int) -> BehaviourSums:
        return self._sums.get(number) or BehaviourSums(self._registry.telemetry)


def _state(
    registry: Registry, rollout: Rollout, facts: Facts, sums: BehaviourSums | None = None
) -> RolloutState:
    members = registry.rollouts.members(rollout.id)
    counted = in_force(rollout, members, facts)
    taken = [one for one in counted if one.taken_at is not None and not one.trouble]
    chosen = {one.device for one in counted}
    candidates = eligible(rollout, facts) if rollout.live else []
    others = [one.id for one in candidates if one.id not in chosen]
    health: tuple[ConditionState, ...] = tuple(
        ConditionState(one.text, "") for one in parse_health(rollout.plan.health).conditions
    )
    answers, waits = 0, ""
    if rollout.live:
        findings: tuple[Finding, ...] = ()
        if rollout.state == "running" and health:
            judge = HealthJudge(registry.telemetry, facts.now, sums)
            findings = judge(rollout, taken, others)
            health = tuple(
                ConditionState(one.condition.text, one.verdict, one.value, one.limit)
                for one in findings
            )
            answers = judge.share.answers if judge.share is not None else 0
        waits = _waits(rollout, counted, facts, findings, answers)
    elif rollout.state in BACK:
        waits = _way_back(members, facts)
    return RolloutState(
        id=rollout.id,
        version=str(rollout.plan),
        base=f"{rollout.plan.model}/{rollout.base}",
        selection=str(rollout.plan.selection),
        state=rollout.state,
        share=rollout.share,
        shares=rollout.plan.shares,
        wait_s=rollout.plan.wait_s,
        answers_min=rollout.plan.answers_min,
        failures_max=rollout.plan.failures_max,
        started_at=rollout.started_at,
        stage_at=rollout.stage_at,
        watched_at=rollout.watched_at,
        ended_at=rollout.ended_at,
        standing=rollout.standing,
        reason=rollout.reason,
        who=rollout.who,
        devices=len(candidates) if rollout.live else len(members),
        joined=len(members),
        taken=sum(one.taken_at is not None for one in members),
        answers=answers,
        waits=waits,
        health=health,
        members=_member_states(rollout, members, counted, facts),
    )


def _waits(
    rollout: Rollout,
    counted: Sequence[Member],
    facts: Facts,
    findings: Sequence[Finding],
    answers: int,
) -> str:
    """Text that says what the next step of a live roll-out waits for."""
    if rollout.state == "paused":
        return "an operator: `splitedge server rollout resume`"
    devices = eligible(rollout, facts)
    if not devices:
        return "a device that it may move: all are pinned, shut out or of other fleets now"
    chosen = {one.device for one in counted}
    free = [one.id for one in devices if one.id in facts.present and one.id not in chosen]
    if free and len(counted) < quota(rollout.share, len(devices)):
        return "the server to choose its devices, within seconds while it runs"
    if late := waits_for(rollout, counted, facts):
        return f"{_named(late)} to take the version"
    if not any(one.taken_at is not None for one in counted):
        away = [one.device for one in counted] or [one.id for one in devices]
        return f"{_named(away)} to come back"
    reasons = []
    begin = facts.now if rollout.watched_at is None else rollout.watched_at
    left = rollout.plan.wait_s - (facts.now - begin)
    if left > 0:
        reasons.append(f"{left:.0f} s more of watching")
    if rollout.plan.health and answers < rollout.plan.answers_min:
        reasons.append(f"{rollout.plan.answers_min - answers} more answers of the share")
    else:
        unknown = [one.condition.metric for one in findings if one.verdict == "unknown"]
        reasons += [f"a value of {metric}, which no device has told yet" for metric in unknown]
    return " and ".join(reasons)


def _way_back(members: Sequence[Member], facts: Facts) -> str:
    """The devices of an ended roll-out that are not back yet."""
    waiting = [one.device for one in members if one.before and one.returned_at is None]
    if not waiting:
        return ""
    away = [device for device in waiting if device not in facts.present]
    return f"{_named(waiting)} to go back" + (f"; {_named(away)} is away" if away else "")


def _member_states(
    rollout: Rollout, members: Sequence[Member], counted: Sequence[Member], facts: Facts
) -> tuple[MemberState, ...]:
    seen = {device.id: device.last_seen for device in facts.devices}
    inside = {one.device for one in counted}
    found = []
    for one in members:
        report = facts.reports.get(one.device, DeviceReport(one.device))
        found.append(
            MemberState(
                device=one.device,
                share=rollout.plan.shares[one.stage],
                state=_word(rollout, one, one.device in inside),
                before=one.before,
                runs=report.running,
                why=one.trouble,
                last_seen=seen.get(one.device),
            )
        )
    return tuple(found)


def _word(rollout: Rollout, member: Member, counts: bool) -> str:
    if rollout.state in BACK:
        return "going back" if member.before and member.returned_at is None else "back"
    if rollout.live and not counts:
        return "left"
    if member.trouble:
        return "failed"
    return "waiting" if member.taken_at is None else "runs it"


def _named(devices: Sequence[str]) -> str:
    named = ", ".join(devices[:NAMED_MOST])
    more = len(devices) - NAMED_MOST
    return f"{named} and {more} more" if more > 0 else named


def summary(state: RolloutState) -> str:
    """A roll-out in one sentence."""
    about = f"roll-out {state.id} of {state.version} ({state.selection})"
    if state.state in ("running", "paused"):
        joined = f"{plural(state.joined, 'device')} in the share"
        share = f"{100 * state.share:g} %: {joined}, {state.taken} of them on it"
        waits = f"; waits for {state.waits}" if state.waits else ""
        return f"{about} is {state.state} at {share}{waits}"
    when = ago(state.ended_at).replace("now", "just now")
    reason = f": {state.reason}" if state.reason else ""
    waits = f"; waits for {state.waits}" if state.waits else ""
    ended = "failed" if state.state == "failed" else f"was {state.state}"
    return f"{about} {ended} {when}{reason}{waits}"
