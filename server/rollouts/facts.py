"""Facts that roll-outs are judged by, read from the registry."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from server.deployment.calls import version_of
from server.deployment.presence import is_online
from server.registry.database import Registry
from server.registry.rollouts.records import Member, Rollout
from server.rollouts.health import Behaviour, Finding, Point, behaviour_of, parse_health
from server.rollouts.progress import Facts

# so long after its start the server has heard each device that is there
SETTLED_S: Final = 35.0
POINTS_MAX: Final = 1_000
# without devices that stayed, a share is compared with itself before it took the version
BEFORE_S: Final = 3_600.0
# a device has a new point every ten seconds at most; after half an hour none is thinned yet
READ_S: Final = 10.0
WHOLE_S: Final = 1_800.0

# whether a device's point counts
Counts = Callable[[str, Point], bool]


class History(Protocol):
    """History of the devices, as the registry keeps it."""

    def of(self, device_id: str, *, since_s: float, points_max: int) -> Sequence[Point]:
        """The points of a device in the last `since_s` seconds, oldest first."""


def read_facts(
    registry: Registry,
    running: Mapping[str, str] | None = None,
    *,
    heard_at: Mapping[str, float] | None = None,
    settled: bool = True,
) -> Facts:
    """Read what is known now.

    Args:
        running: bundles that devices said they run in heartbeats since the last step.
        heard_at: times of these heartbeats, UTC seconds since 1970.
        settled: whether each device that is there has been heard.
    """
    now = registry.rollouts.now()
    pins = registry.capabilities.pinned().items()
    devices = tuple(one for one in registry.devices(profiles=False) if one.active)
    return Facts(
        now=now,
        fleets={one.fleet: one for one in registry.catalogue.fleets()},
        devices=devices,
        pinned=frozenset(device for device, pin in pins if pin.bundle is not None),
        present=frozenset(one.id for one in devices if is_online(one, now)),
        running=running or {},
        reports=registry.reports.all(),
        heard_at=heard_at or {},
        settled=settled,
    )


@dataclass(slots=True)
class _Sum:
    """The behaviour of a device so far: what came since the last look is added to it."""

    read_at: float
    last_at: float
    counts: Behaviour
    audits: Behaviour  # of the last point


class BehaviourSums:
    """Running sums over the devices' history, so that each point is read once.

    Args:
        budget_s: seconds of reading after which a judgement stops; the next one goes on from there.
    """

    def __init__(self, history: History, budget_s: float = math.inf) -> None:
        self._history = history
        self._budget_s = budget_s
        self._sums: dict[tuple[Any, ...], _Sum] = {}
        self._used: set[tuple[Any, ...]] = set()
        self._end = math.inf

    def begin(self) -> None:
        """Begin a judgement: its budget starts, and sums that the last one did not use go."""
        self._sums = {key: one for key, one in self._sums.items() if key in self._used}
        self._used = set()
        self._end = time.monotonic() + self._budget_s

    def add(
        self, devices: Mapping[str, float], now: float, what: str, counts: Counts
    ) -> Behaviour | None:
        """The behaviour of devices, in the points that count, since a time of each.

        Points with offloading switched off never count: a device answers all inputs itself then,
        however uncertain it is.

        Args:
            devices: that time of each device, UTC seconds since 1970.
            what: name of the rule `counts`.
        Returns: None if the budget is used up and a device was never read.
        """
        keys = {(what, device, begin): device for device, begin in devices.items()}
        self._used.update(keys)
        # who was not read for longest comes first, so that a small budget reaches all
        ordered = sorted(keys, key=lambda key: self._sums[key].read_at if key in self._sums else 0)
        for key in ordered:
            if time.monotonic() >= self._end:
                break
            self._read(key, now, counts)
        if any(key not in self._sums for key in keys):
            return None
        found = Behaviour()
        for key in keys:
            found += self._sums[key].counts + self._sums[key].audits
        return found

    def _read(self, key: tuple[Any, ...], now: float, counts: Counts) -> None:
        _, device, begin = key
        known = self._sums.get(key)
        if known is not None and now - known.read_at < READ_S:
            return
        if known is None or now - known.read_at > WHOLE_S:  # points may be thinned since
            known = _Sum(now, -math.inf, Behaviour(), Behaviour())
        since = max(begin, known.last_at)
        points = self._history.of(device, since_s=max(1.0, now - since), points_max=POINTS_MAX)
        new = [one for one in points if one.at > known.last_at]
        counted = [one for one in new if one.offloading and counts(device, one)]
        if counted:
            whole = behaviour_of(counted)
            known.counts += replace(whole, audits=0, disagreements=0)
            known.audits = Behaviour(audits=whole.audits, disagreements=whole.disagreements)
        if new:
            known.last_at = new[-1].at
        known.read_at = now
        self._sums[key] = known


class HealthJudge:
    """Judges the health of a share by the devices' history.

    Args:
        now: UTC seconds since 1970.
        sums: those of the judgements before; None reads the whole history.
    """

    def __init__(self, history: History, now: float, sums: BehaviourSums | None = None) -> None:
        self._now = now
        self._sums = sums or BehaviourSums(history)
        self.share: Behaviour | None = Behaviour()
        self.whole = True

    def __call__(
        self, rollout: Rollout, taken: Sequence[Member], others: Sequence[str]
    ) -> tuple[Finding, ...]:
        """The finding of each condition; afterwards `share` has the share's behaviour.

        If the sums' budget was too small, `whole` is False then, and all findings are unknown.

        Args:
            taken: members that run the version. others: ids of the devices that stayed.
        """
        health = parse_health(rollout.plan.health)
        if not health.conditions:
            return ()
        self._sums.begin()
        share = self.share = self._of_share(rollout, taken)
        others_too = share is not None and health.compares
        compared = self._of_others(rollout, taken, others) if others_too else Behaviour()
        self.whole = share is not None and compared is not None
        if share is None or compared is None:
            share = compared = Behaviour()
        return health.judge(share, compared, rollout.plan.answers_min)

    def _of_share(self, rollout: Rollout, taken: Iterable[Member]) -> Behaviour | None:
        """Behaviour of the share's devices since each of them took the version."""
        version = str(rollout.plan)
        begins = {one.device: one.taken_at or self._now for one in taken}

        def counts(device: str, one: Point) -> bool:
            within = one.at - one.span_s >= begins[device] - 1.0
            return version_of(one.bundle) == version and within

        return self._sums.add(begins, self._now, f"{rollout.id} share", counts)

    def _of_others(
        self, rollout: Rollout, taken: Sequence[Member], others: Iterable[str]
    ) -> Behaviour | None:
        """Behaviour of the devices that stayed; of the share itself before, if these are few."""
        version, number = str(rollout.plan), rollout.id
        begin = min((one.joined_at for one in taken), default=self._now)

        def stays(_device: str, one: Point) -> bool:
            return version_of(one.bundle) != version and one.at - one.span_s >= begin

        since = dict.fromkeys(others, begin)
        stayed = self._sums.add(since, self._now, f"{number} others", stays)
        if stayed is None or stayed.answers >= rollout.plan.answers_min:
            return stayed
        joined = {one.device: one.joined_at for one in taken}

        def is_before(device: str, one: Point) -> bool:
            return version_of(one.bundle) != version and one.at <= joined[device]

        before = {device: at - BEFORE_S for device, at in joined.items()}
        return self._sums.add(before, self._now, f"{number} before", is_before)
