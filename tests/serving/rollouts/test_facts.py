"""Which points of the devices' history count for the health of a share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from server.registry.rollouts.records import Member, Rollout, RolloutPlan
from server.registry.telemetry.point import TelemetryPoint
from server.rollouts.facts import BehaviourSums, HealthJudge

NOW = 10_000.0
OLD, NEW = "cnn/1/d2", "cnn/2/d1"
JOINED, TAKEN = 9_000.0, 9_100.0
MEMBER = Member(1, "pi-1", 0, OLD, JOINED, TAKEN)


class Past:
    """The history of some devices in memory: points by device."""

    def __init__(self, **points: list[TelemetryPoint]) -> None:
        self._points = {name.replace("_", "-"): found for name, found in points.items()}

    def of(self, device_id: str, *, since_s: float, points_max: int) -> Sequence[TelemetryPoint]:
        found = [one for one in self._points.get(device_id, []) if one.at >= NOW - since_s]
        return found[-points_max:]


def point(
    at: float, bundle: str, *, exits: int = 0, offloads: int = 0, fallbacks: int = 0
) -> TelemetryPoint:
    return TelemetryPoint(at, 30.0, exits, offloads, fallbacks, bundle=bundle)


def rollout(health: str) -> Rollout:
    plan = RolloutPlan("cnn", 2, health=health, answers_min=100)
    return Rollout(1, plan, 1, "running", 0, JOINED, JOINED, "operator")


def test_only_spans_that_lie_after_the_switch_count_for_the_share() -> None:
    past = Past(
        pi_1=[
            point(TAKEN - 30.0, OLD, fallbacks=1_000),
            point(TAKEN + 10.0, NEW, fallbacks=500),  # it holds answers of both versions
            point(TAKEN + 40.0, NEW, exits=70),
            point(TAKEN + 70.0, NEW, exits=30),
            point(TAKEN + 99.0, OLD, fallbacks=900),  # it went back
        ]
    )
    judge = HealthJudge(past, NOW)
    (finding,) = judge(rollout("fallback<5%"), [MEMBER], [])
    assert judge.share is not None
    assert (judge.share.exits, judge.share.fallbacks) == (100, 0)
    assert finding.verdict == "good"


def test_a_comparison_is_with_the_devices_that_stayed_at_the_same_time() -> None:
    mine = [point(TAKEN + 40.0, NEW, exits=20, offloads=60, fallbacks=20)]
    stayed = [
        point(JOINED - 10.0, OLD, fallbacks=1_000),  # before
        point(JOINED + 100.0, OLD, offloads=90, fallbacks=10),
        point(JOINED + 200.0, NEW, fallbacks=1_000),  # not of those that stayed
    ]
    judge = HealthJudge(Past(pi_1=mine, pi_2=stayed), NOW)
    (finding,) = judge(rollout("fallback<1.5x"), [MEMBER], ["pi-2"])
    # 20 of 80 queries, and 10 of 100 by those that stayed
    assert (finding.verdict, finding.value) == ("worse", 0.25)
    assert finding.limit is not None
    assert round(finding.limit, 6) == 0.15


def test_where_nobody_stayed_a_share_is_compared_with_itself_before() -> None:
    past = Past(
        pi_1=[
            point(JOINED - 10_000.0, OLD, fallbacks=1_000),  # too long ago
            point(JOINED - 60.0, OLD, offloads=80, fallbacks=20),
            point(TAKEN + 40.0, NEW, offloads=79, fallbacks=21),
        ]
    )
    (finding,) = HealthJudge(past, NOW)(rollout("fallback<1.2x"), [MEMBER], [])
    assert (finding.verdict, finding.value) == ("good", 0.21)
    (finding,) = HealthJudge(Past(pi_1=[]), NOW)(rollout("fallback<1.2x"), [MEMBER], [])
    assert finding.verdict == "unknown"


def test_a_device_that_was_told_to_ask_nobody_says_nothing_of_the_version() -> None:
    told = [
        replace(point(TAKEN + 40.0, NEW, exits=1_000), offloading=False),
        point(TAKEN + 70.0, NEW, exits=10, offloads=90),
    ]
    stayed = [replace(point(JOINED + 100.0, OLD, exits=1_000), offloading=False)]
    judge = HealthJudge(Past(pi_1=told, pi_2=stayed), NOW)
    alone, beside = judge(rollout("exit>20%,exit>0.5x"), [MEMBER], ["pi-2"])
    assert judge.share is not None
    assert (judge.share.exits, judge.share.offloads) == (10, 90)
    assert (alone.verdict, beside.verdict) == ("worse", "unknown")


def test_running_sums_read_each_point_once_and_come_to_the_same() -> None:
    points = [point(TAKEN + 30.0 * n, NEW, exits=n, fallbacks=1) for n in range(1, 20)]
    asked: list[float] = []
    now = 0.0

    class Growing(Past):
        def of(
            self, device_id: str, *, since_s: float, points_max: int
        ) -> Sequence[TelemetryPoint]:
            asked.append(since_s)
            there = [one for one in points if now - since_s <= one.at <= now]
            return there[-points_max:]

    sums = BehaviourSums(Growing())
    for one in points:
        now = one.at + 1.0
        judge, again = HealthJudge(Growing(), now, sums), HealthJudge(Growing(), now)
        judge(rollout("fallback<5%"), [MEMBER], [])
        spans = list(asked)
        again(rollout("fallback<5%"), [MEMBER], [])
        assert judge.share == again.share
        asked[:] = spans
    assert judge.share is not None
    assert (judge.share.exits, judge.share.fallbacks) == (190, 19)
    assert max(asked[1:]) < 60.0  # not since the version was taken


def test_a_judgement_stops_reading_at_its_budget_and_the_next_goes_on() -> None:
    class Slow(Past):
        def of(
            self, device_id: str, *, since_s: float, points_max: int
        ) -> Sequence[TelemetryPoint]:
            time.sleep(0.02)
            return super().of(device_id, since_s=since_s, points_max=points_max)

    names = [f"pi-{n}" for n in range(10)]
    past = Slow(**{name: [point(TAKEN + 40.0, NEW, exits=20)] for name in names})
    sums = BehaviourSums(past, 0.05)
    members = [replace(MEMBER, device=name) for name in names]
    verdicts = []
    for _ in range(10):
        judge = HealthJudge(past, NOW, sums)
        (finding,) = judge(rollout("fallback<5%"), members, [])
        verdicts.append((judge.whole, finding.verdict))
    assert verdicts[0] == (False, "unknown")
    assert verdicts[-1] == (True, "good")
