"""The cost of a kill, counted by hand: latencies before, during and after, and the rate."""

from __future__ import annotations

import pytest

from benchmarks.load.backends import DEADLINE_MS, cost_of
from benchmarks.load.clients import ANSWERED, NO_REPLY
from benchmarks.load.timed_crowd import Asked

KILL = 10.0
RATE = 8.0  # two queries in each window of a quarter of a second


def test_the_cost_of_a_kill_is_that_of_the_queries_around_it() -> None:
    before = [Asked(at, 0.010, ANSWERED) for at in (9.0, 9.5)]
    under_way = [Asked(9.9, DEADLINE_MS / 2e3 + 0.1, ANSWERED), Asked(9.95, 9.0, NO_REPLY)]
    meanwhile = [Asked(10.1, 0.020, ANSWERED)]  # one alone in its window: the rate is not back
    after = [Asked(11.0 + n / RATE, 0.030, ANSWERED) for n in range(8)]
    early = [Asked(1.0, 5.0, NO_REPLY)]  # while the load warms up

    cost = cost_of([*early, *before, *under_way, *meanwhile, *after], RATE, 8.0, KILL)

    assert cost.outcomes == {ANSWERED: 12, NO_REPLY: 1}
    assert (cost.lost, cost.sent_again) == (1, 1)
    assert cost.before_ms == pytest.approx(10.0)
    assert cost.worst_ms == pytest.approx(DEADLINE_MS / 2 + 100)
    assert cost.after_ms == pytest.approx(30.0)
    assert cost.back_s == pytest.approx(1.0)  # the window of 11.0 to 11.25 has both


def test_a_rate_that_does_not_come_back_is_said_so() -> None:
    assert cost_of([Asked(9.0, 0.01, ANSWERED)], RATE, 8.0, KILL).back_s == float("inf")
