"""The loop of roll-outs: the server's housekeeping calls it every second."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from server.registry.database import Registry
from server.registry.rollouts.records import Member, Rollout
from server.rollouts.facts import SETTLED_S, BehaviourSums, HealthJudge, History, read_facts
from server.rollouts.health import Finding
from server.rollouts.progress import Facts, Step, step

logger = logging.getLogger(__name__)

# the history of a share is read so often: it has a point every ten seconds at most
JUDGE_S: Final = 5.0
# while no roll-out is live: devices go back, which may last until one is switched on again
BACK_S: Final = 10.0
# the thread of this loop follows revocations too, so a judgement reads no longer than this at once
READING_S: Final = 0.5


class RolloutRunner:
    """Brings the roll-outs of a registry forward, step by step.

    Args:
        history: of the devices. clock: monotonic seconds.
    """

    def __init__(self, registry: Registry, history: History, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._history = history
        self._clock = clock
        self._began = clock()
        self._running: dict[str, str] = {}
        self._heard_at: dict[str, float] = {}
        self._next_back = 0.0
        self._sums: dict[int, BehaviourSums] = {}
        self._judged: dict[int, tuple[float, int, tuple[Finding, ...]]] = {}

    def heard(self, running: Mapping[str, str], at: Mapping[str, float]) -> None:
        """Take news of devices.

        Args:
            running: bundles that they said they run in heartbeats.
            at: times of the heartbeats, UTC seconds since 1970, by device.
        """
        self._running.update(running)
        self._heard_at.update(at)

    def turn(self) -> None:
        """Make the next step of each roll-out for which something may be due."""
        rollouts = self._registry.rollouts.to_step()
        if rollouts and not any(one.live for one in rollouts):
            if self._clock() < self._next_back:
                return
            self._next_back = self._clock() + BACK_S
        if rollouts:
            settled = self._clock() - self._began >= SETTLED_S
            facts = read_facts(
                self._registry,
                self._running,
                heard_at=self._heard_at,
                settled=settled,
            )
            for rollout in rollouts:
                self._step(rollout, facts)
        self._running.clear()  # kept after a failure: the next turn takes it
        self._heard_at.clear()
        live = {one.id for one in rollouts}
        self._judged = {key: found for key, found in self._judged.items() if key in live}
        self._sums = {key: sums for key, sums in self._sums.items() if key in live}

    def _step(self, rollout: Rollout, facts: Facts) -> None:
        members = self._registry.rollouts.members(rollout.id)
        sums = self._sums.setdefault(rollout.id, BehaviourSums(self._history, READING_S))
        judge = HealthJudge(self._history, facts.now, sums)
        done = step(rollout, members, facts, self._seldom(judge))
        kept = self._registry.rollouts.apply(
            rollout, done.rollout, joined=done.joined, changed=done.changed, event=done.event
        )
        if kept and (done.event or done.joined):
            _log(done)

    def _seldom(self, judge: HealthJudge) -> Callable[..., tuple[Finding, ...]]:
        """The judgement of the last seconds where there is one of the same revision."""

        def judged(
            rollout: Rollout, taken: Sequence[Member], others: Sequence[str]
        ) -> tuple[Finding, ...]:
            at, of_stage, findings = self._judged.get(rollout.id, (float("-inf"), -1, ()))
            if self._clock() - at < JUDGE_S and of_stage == rollout.stage:
                return findings
            findings = judge(rollout, taken, others)
            if judge.whole:
                self._judged[rollout.id] = self._clock(), rollout.stage, findings
            return findings

        return judged


def _log(done: Step) -> None:
    rollout = done.rollout
    if done.event in ("failed", "superseded"):
        logger.warning(
            "rollout=%d model=%s %s: %s", rollout.id, rollout.plan, rollout.state, rollout.reason
        )
        return
    joined = ", ".join(one.device for one in done.joined)
    told = f"joined by {joined}" if joined else rollout.state
    share = 100 * rollout.share
    logger.info("rollout=%d model=%s share=%g%% %s", rollout.id, rollout.plan, share, told)
