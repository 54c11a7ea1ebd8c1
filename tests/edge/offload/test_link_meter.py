"""The link by its messages; times are set by the test, and the figures are worked out by hand."""

from __future__ import annotations

import pytest

from edge_sdk.offload.link_meter import KEPT_MOST, UNDER_WAY_MOST, LinkMeter, LinkSample
from tests.clock import Clock


def exchange(
    meter: LinkMeter, clock: Clock, seconds: float, up: int, down: int, *, probe: bool = False
) -> None:
    meter.sent("x", up, probe=probe)
    clock.now += seconds
    meter.answered("x", down)


def test_probes_tell_the_round_trip_and_long_offloads_the_bandwidth() -> None:
    clock = Clock()
    meter = LinkMeter(clock)
    for seconds in (0.02, 0.01, 0.03):
        exchange(meter, clock, seconds, 100, 60, probe=True)
    # 100,000 bytes in 0.12 s, of which the round trip takes 0.02: 8 Mbit/s
    exchange(meter, clock, 0.12, 99_000, 1_000)
    found = meter.take()
    assert found.round_trip_ms == pytest.approx(20.0)
    assert found.bandwidth_mbps == pytest.approx(8.0)
    assert meter.take() == LinkSample()
    # the round trip is still known
    exchange(meter, clock, 0.22, 100_000, 0)
    found = meter.take()
    assert found.round_trip_ms is None
    assert found.bandwidth_mbps == pytest.approx(4.0)


def test_an_offload_that_is_short_or_mostly_round_trip_tells_nothing() -> None:
    clock = Clock()
    meter = LinkMeter(clock)
    exchange(meter, clock, 0.5, 100_000, 0)
    assert meter.take() == LinkSample()  # no probe yet
    exchange(meter, clock, 0.02, 100, 60, probe=True)
    exchange(meter, clock, 0.5, 2_000, 100)
    exchange(meter, clock, 0.039, 100_000, 0)
    assert meter.take().bandwidth_mbps is None


def test_what_is_never_answered_is_forgotten() -> None:
    clock = Clock()
    meter = LinkMeter(clock)
    for number in range(2 * UNDER_WAY_MOST):
        meter.sent(str(number), 100, probe=True)
    assert len(meter._under_way) == UNDER_WAY_MOST
    meter.answered("0", 100)
    assert meter.take() == LinkSample()
    for _ in range(2 * KEPT_MOST):
        exchange(meter, clock, 1.0, 100, 100, probe=True)
    assert len(meter._probes_s) == KEPT_MOST
