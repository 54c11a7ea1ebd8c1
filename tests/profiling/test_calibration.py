"""Measured depths correct the estimates of the others; every number is worked out by hand.

The table in conftest.py at 10 GFLOP/s: 1.5, 3.25 and 7.125 ms for depths 1, 2 and 3, and 5600, 6360
and 7920 bytes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from profiles.allocation import DEEPER_SHARE, Budget, budget_depth
from profiles.calibration import DepthCosts, Taken, at_present_speed
from profiles.cost import CostTable
from profiles.errors import InvalidProfileError
from profiles.measured import BundleMeasurement, Conditions, GraphMeasurement
from tests.profiling.test_allocation_rules import DEVICE


def test_without_a_measurement_the_table_counts(cost_table: CostTable) -> None:
    costs = DepthCosts(cost_table, 20.0)
    assert [costs.latency_ms(depth) for depth in (1, 2, 3)] == [0.75, 1.625, 3.5625]
    assert [costs.memory_bytes(depth) for depth in (1, 2, 3)] == [5600, 6360, 7920]


def test_one_measured_depth_scales_the_others(cost_table: CostTable) -> None:
    costs = DepthCosts(cost_table, 10.0, {2: Taken(6.5, 1_000_000)})
    # depth 2 takes twice its estimate of 3.25 ms, so the others do
    assert [costs.latency_ms(depth) for depth in (1, 2, 3)] == [3.0, 6.5, 14.25]
    # 760 bytes less than depth 2; three times the 1560 bytes more
    assert [costs.memory_bytes(depth) for depth in (1, 2, 3)] == [999_240, 1_000_000, 1_004_680]


def test_a_depth_between_two_measured_ones_is_interpolated(cost_table: CostTable) -> None:
    costs = DepthCosts(cost_table, 10.0, {1: Taken(4.5, 10_000), 3: Taken(7.125, 33_200)})
    # 3.25 ms is 1.75 of the 5.625 ms from 1.5 to 7.125: 4.5 + 2.625 * 14/45
    assert costs.latency_ms(2) == pytest.approx(4.5 + 2.625 * 14 / 45)
    assert costs.memory_bytes(2) == 10_000 + 23_200 * 760 // 2320
    assert (costs.latency_ms(1), costs.latency_ms(3)) == (4.5, 7.125)
    assert (costs.memory_bytes(1), costs.memory_bytes(3)) == (10_000, 33_200)


def test_memory_is_never_less_than_the_tensors(cost_table: CostTable) -> None:
    costs = DepthCosts(cost_table, 10.0, {3: Taken(1.0, 0)})
    assert costs.memory_bytes(3) == 0  # as measured: a device knows best
    assert costs.memory_bytes(1) == 5600


def test_two_depths_of_one_estimate_count_as_the_slower(cost_table: CostTable) -> None:
    same = replace(cost_table.exits[2], latency_ms=4.125)  # 1 + 2 + 4.125 = 7.125, as depth 3
    table = replace(cost_table, exits={**cost_table.exits, 2: same})
    costs = DepthCosts(table, 10.0, {2: Taken(10.0, 0), 3: Taken(14.25, 0)})
    assert costs.latency_ms(1) == 3.0


def test_a_measured_depth_that_the_model_no_longer_has_is_left_out(cost_table: CostTable) -> None:
    costs = DepthCosts(cost_table, 10.0, {4: Taken(100.0, 1 << 30)})
    assert (costs.latency_ms(3), costs.memory_bytes(3)) == (7.125, 7920)


def measured(bundle: str, latency_ms: float, score: float) -> BundleMeasurement:
    return BundleMeasurement(bundle, {"exit": GraphMeasurement(latency_ms, 100, 9)}, score, 100)


def test_a_measurement_holds_at_the_speed_at_which_it_was_made() -> None:
    assert at_present_speed([]) == {}
    first, last = measured("m/1/d3", 8.0, 20.0), measured("m/1/d1", 2.0, 10.0)
    # the last one was made at half the speed, so the first would take twice its time now
    now = at_present_speed([first, last])
    assert now == {"m/1/d3": Taken(16.0, 100), "m/1/d1": Taken(2.0, 100)}


def test_the_running_bundle_tells_the_present_speed() -> None:
    both = [measured("m/1/d3", 8.0, 20.0), measured("m/1/d1", 2.0, 10.0)]
    # d1 answers in 1 ms: twice as fast as when it was measured, at 20 GFLOP/s then
    now = at_present_speed(both, Conditions("m/1/d1", latency_ms=1.0))
    assert now == {"m/1/d3": Taken(8.0, 100), "m/1/d1": Taken(1.0, 100)}
    for unknown in (Conditions("m/1/d2", latency_ms=1.0), Conditions("m/1/d1"), None):
        assert at_present_speed(both, unknown)["m/1/d1"].latency_ms == 2.0


def test_a_short_run_tells_nothing_of_the_others() -> None:
    both = [measured("m/1/d3", 8.0, 10.0), measured("m/1/d1", 0.9, 10.0)]
    now = at_present_speed(both, Conditions("m/1/d1", latency_ms=2.7))
    assert now == {"m/1/d3": Taken(8.0, 100), "m/1/d1": Taken(2.7, 100)}


def test_a_measured_depth_replaces_its_estimate_in_the_budget_rule(cost_table: CostTable) -> None:
    limits = Budget(10_000, 8.0)
    assert budget_depth(DEVICE, cost_table, limits) == 1  # 10 GFLOP/s over 4 cores: 6 ms, 13 ms
    fast = DepthCosts(cost_table, 2.5, {3: Taken(7.9, 9000)})
    assert budget_depth(DEVICE, cost_table, limits, costs=fast) == 3
    large = DepthCosts(cost_table, 2.5, {3: Taken(7.9, 10_001)})
    assert budget_depth(DEVICE, cost_table, limits, costs=large) == 2


@pytest.mark.parametrize(
    ("latency_ms", "from_one", "from_three", "new"),
    [
        (7.9, 3, 3, 3),
        (8.0, 3, 3, 3),
        (8.1, 2, 3, 3),  # above 0.8 of 10 ms: no device moves
        (10.0, 2, 3, 3),
        (10.1, 2, 2, 2),
    ],
)
def test_a_depth_at_the_limit_does_not_come_and_go(
    cost_table: CostTable, latency_ms: float, from_one: int, from_three: int, new: int
) -> None:
    assert DEEPER_SHARE == 0.8
    costs = DepthCosts(cost_table, 10.0, {2: Taken(1.0, 0), 3: Taken(latency_ms, 0)})
    limits = Budget(10_000, 10.0)
    for present, depth in ((1, from_one), (3, from_three), (None, new)):
        found = budget_depth(DEVICE, cost_table, limits, costs=costs, present=present)
        assert found == depth


def test_memory_at_the_limit_does_not_come_and_go_either(cost_table: CostTable) -> None:
    costs = DepthCosts(cost_table, 10.0, {2: Taken(1.0, 50), 3: Taken(1.0, 81)})
    for present, depth in ((1, 2), (2, 2), (3, 3), (None, 3)):
        found = budget_depth(DEVICE, cost_table, Budget(100, 10.0), costs=costs, present=present)
        assert found == depth


def test_training_counts_the_tables_own_peak(cost_table: CostTable) -> None:
    costs = DepthCosts(cost_table, 10.0, {3: Taken(1.0, 1 << 40)})
    limits = Budget(100_000, 100.0, purpose="training", batch=8)
    assert budget_depth(DEVICE, cost_table, limits, costs=costs) == 3


def test_records_travel_as_json_and_ignore_what_they_do_not_know() -> None:
    one = measured("m/1/d2", 1.5, 3.0)
    assert BundleMeasurement.from_dict({**one.to_dict(), "later": 1}) == one
    now = Conditions("m/1/d2", 1 << 30, 0.5, 3.0, None)
    assert Conditions.from_dict({**now.to_dict(), "later": 1}) == now
    assert Conditions.from_dict({"bundle": "m/1/d2"}) == Conditions("m/1/d2")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"graphs": {}}, "exit among them"),
        ({"graphs": {"exit": {"latency_ms": 1, "runs": 1}}}, "without.*memory_bytes"),
        ({"graphs": {"exit": {"latency_ms": -1, "memory_bytes": 1, "runs": 1}}}, "latency_ms"),
        ({"graphs": []}, "expected an object"),
        ({"score_gflops": 0}, "above 0"),
        ({"memory_bytes": 1 << 60}, "memory_bytes"),
        ({"bundle": ""}, "bundle"),
    ],
)
def test_a_measurement_that_cannot_be_is_refused(change: dict[str, object], expected: str) -> None:
    with pytest.raises(InvalidProfileError, match=expected):
        BundleMeasurement.from_dict({**measured("m/1/d2", 1.5, 3.0).to_dict(), **change})
