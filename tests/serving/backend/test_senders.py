"""Accounts of senders: token buckets by hand, with a clock that is a number."""

from __future__ import annotations

import numpy as np
import pytest

from edge_sdk.errors import ConfigurationError
from server.backend.senders import SENDERS_MAX, SenderCounts, SenderLimits, Senders, TokenBucket
from server.errors import ExpiredError, OverloadedError, ServerError
from tests.clock import Clock


def test_a_bucket_gives_a_second_at_once_and_then_its_rate() -> None:
    bucket = TokenBucket(4.0, 0.0)
    for _ in range(4):
        assert bucket.wait_s(1, 0.0) == 0
        bucket.take(1)
    assert bucket.wait_s(1, 0.0) == 0.25
    assert bucket.wait_s(1, 0.25) == 0
    bucket.take(1)
    assert bucket.wait_s(1, 0.25) == 0.25
    assert bucket.wait_s(4, 100.0) == 0  # and no more than a second's, however long it was idle
    bucket.take(4)
    assert bucket.wait_s(1, 100.0) == 0.25


def test_a_cost_above_the_whole_bucket_passes_and_leaves_a_debt() -> None:
    """10 tokens a second and a query of 30: three seconds' worth, so one every three seconds."""
    bucket = TokenBucket(10.0, 0.0)
    assert bucket.wait_s(30, 0.0) == 0
    bucket.take(30)
    assert bucket.wait_s(30, 0.0) == pytest.approx(3.0)
    assert bucket.wait_s(30, 2.9) == pytest.approx(0.1)
    assert bucket.wait_s(30, 3.0) == pytest.approx(0.0)


def test_a_rate_below_one_a_second_is_kept() -> None:
    bucket = TokenBucket(0.5, 0.0)
    assert bucket.wait_s(1, 0.0) == 0
    bucket.take(1)
    assert bucket.wait_s(1, 0.0) == 2.0


def test_each_sender_has_limits_of_its_own() -> None:
    clock = Clock()
    senders = Senders(SenderLimits(requests=2), clock=clock)
    for _ in range(2):
        senders.arrived("pi-1", 100)
    with pytest.raises(OverloadedError, match="pi-1: expected at most 2 requests a second") as err:
        senders.arrived("pi-1", 100)
    assert err.value.retry_after_s == 0.5
    senders.arrived("pi-2", 100)
    clock.now = 0.5
    senders.arrived("pi-1", 100)
    assert senders.counts()["pi-1"] == SenderCounts(requests=4, bytes=400, limited=1)


def test_a_refused_query_takes_from_no_bucket() -> None:
    senders = Senders(SenderLimits(requests=1, bytes=100), clock=Clock())
    senders.arrived("pi", 100)
    clockless = Senders(SenderLimits(requests=10, bytes=100), clock=Clock())
    clockless.arrived("pi", 100)
    for _ in range(50):
        with pytest.raises(OverloadedError, match="100 bytes"):
            clockless.arrived("pi", 100)
    for _ in range(9):
        clockless.arrived("pi", 0)  # nine of ten requests are left
    with pytest.raises(OverloadedError, match="10 requests"):
        clockless.arrived("pi", 0)


def test_samples_are_limited_once_they_are_known() -> None:
    clock = Clock()
    senders = Senders(SenderLimits(rows=64), clock=clock)
    senders.read("pi", 32)
    senders.read("pi", 32)
    with pytest.raises(OverloadedError, match="64 rows"):
        senders.read("pi", 1)
    clock.now = 0.5
    senders.read("pi", 32)


def test_without_limits_everything_passes_and_is_counted() -> None:
    senders = Senders()
    for _ in range(1000):
        senders.arrived("pi", 10)
        senders.read("pi", 2)
    for outcome in (np.zeros(1), OverloadedError("full"), ExpiredError("late"), ServerError("no")):
        senders.settled("pi", outcome)
    assert senders.counts() == {
        "pi": SenderCounts(
            requests=1000, rows=2000, bytes=10_000, answered=1, refused=1, expired=1, failed=1
        )
    }


def test_memory_is_bounded_as_devices_come_and_go() -> None:
    senders = Senders(SenderLimits(requests=1e9))
    for number in range(SENDERS_MAX + 500):
        senders.arrived(f"device-{number}", 1)
        senders.arrived("stays", 1)
    counts = senders.counts()
    assert len(counts) == SENDERS_MAX
    assert counts["stays"].requests == SENDERS_MAX + 500


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf")])
def test_a_limit_is_more_than_nothing(bad: float) -> None:
    with pytest.raises(ConfigurationError, match="limit: rows"):
        SenderLimits(rows=bad)


def test_a_sender_that_the_queue_refused_is_refused_unread_for_a_twentieth_of_its_time() -> None:
    clock = Clock(100.0)
    senders = Senders(clock=clock)
    senders.arrived("greedy", 10)
    senders.settled("greedy", OverloadedError("full", retry_after_s=2.0))
    clock.now += 0.099
    for refuse in (senders.arrived, senders.refuse_early):
        with pytest.raises(OverloadedError, match="answer locally") as refused:
            refuse("greedy", 10)
        assert refused.value.retry_after_s == 2.0
        senders.refuse_early("small", 10)  # others are not
    assert senders.counts()["greedy"] == SenderCounts(requests=3, bytes=30, refused=3)
    assert "small" not in senders.counts()
    clock.now += 0.002
    senders.refuse_early("greedy", 10)
    senders.arrived("greedy", 10)
    assert senders.counts()["greedy"].requests == 4


def test_a_sender_above_its_own_limit_is_not_closed_by_it() -> None:
    senders = Senders(SenderLimits(requests=1.0), clock=Clock())
    senders.arrived("pi", 10)
    with pytest.raises(OverloadedError, match="requests a second"):
        senders.arrived("pi", 10)
    senders.refuse_early("pi", 10)


def test_bytes_that_were_not_declared_are_a_debt() -> None:
    clock = Clock()
    senders = Senders(SenderLimits(bytes=100), clock=clock)
    senders.arrived("app", 0)
    senders.arrived_more("app", 350)
    with pytest.raises(OverloadedError, match=r"in 2\.50 s"):
        senders.arrived("app", 0)
    clock.now += 2.5
    senders.arrived("app", 0)
    assert senders.counts()["app"].bytes == 350
