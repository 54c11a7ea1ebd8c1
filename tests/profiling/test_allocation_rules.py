"""Eq. 1 by the paper's numbers, and the budget rule by the table in conftest.py."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from profiles.allocation import (
    DUMMY_FLOPS,
    DUMMY_SMASHED_BYTES,
    Budget,
    Rule,
    allocate,
    budget_depth,
    fit_to_cut,
    supersfl_depth,
    supersfl_latency_ms,
)
from profiles.cost import CostTable
from profiles.device import DeviceProfile
from profiles.errors import AllocationError, InvalidProfileError

DEVICE = DeviceProfile(
    name="pi-07",
    arch="aarch64",
    cores=4,
    memory_total_bytes=4 << 30,
    memory_available_bytes=1 << 30,
    accelerator=None,
    compute_score_gflops=10.0,
    link_latency_ms=6.0,
    link_bandwidth_mbps=40.0,
)


@pytest.mark.parametrize(
    ("memory_gb", "latency_ms", "depth"),
    [
        (16, 20, 11),  # 8 + 4 = 12, capped at L-1
        (8, 20, 8),  # 4 + 4
        (16, 110, 10),  # 8 + 2
        (1.9, 200, 1),  # 0 + 0, raised to 1
        (2, 200, 1),  # 1 + 0
        (6, 65, 6),  # 3 + 3: a quarter of the way up the range leaves exactly 3
        (6, 65.1, 5),
    ],
)
def test_depths_of_the_papers_fleet(memory_gb: float, latency_ms: float, depth: int) -> None:
    assert supersfl_depth(memory_gb, latency_ms, 20, 200, 12) == depth


def test_lone_device_gets_nothing_for_its_speed() -> None:
    assert supersfl_depth(8, 35, 35, 35, 12) == 4


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_unit_of_the_latency_does_not_matter(unit: float) -> None:
    depths = [supersfl_depth(4, ms * unit, 1 * unit, 5 * unit, 12) for ms in (1, 2, 3, 4, 5)]
    assert depths == [6, 5, 4, 3, 2]


def test_floor_forgives_rounding() -> None:
    assert 0.29 * 100 < 29  # 28.999999999999996
    assert supersfl_depth(100, 1, 1, 1, 50, a=0.29) == 29


def test_coefficients_weigh_memory_and_latency() -> None:
    assert supersfl_depth(8, 20, 20, 200, 12, a=0.25, b=1.0) == 3
    assert supersfl_depth(8, 20, 20, 200, 12, a=0, b=0) == 1


@pytest.mark.parametrize("latency_ms", [19.9, 200.1, -1.0])
def test_latency_outside_the_fleet_is_refused(latency_ms: float) -> None:
    with pytest.raises(InvalidProfileError, match="latency_ms"):
        supersfl_depth(8, latency_ms, 20, 200, 12)


def test_eq_1_needs_a_network_that_can_be_cut() -> None:
    with pytest.raises(InvalidProfileError, match=r"stages: expected .* at least 2, got 1"):
        supersfl_depth(8, 20, 20, 200, 1)


def test_latency_is_the_dummy_model_and_a_round_trip_of_its_output() -> None:
    # 3x3 convolutions: 28*28*32 outputs of 9 products, 14*14*64 outputs of 288
    assert DUMMY_FLOPS == 2 * (25_088 * 9 + 12_544 * 288)
    assert DUMMY_SMASHED_BYTES == 12_544
    # 7,676,928 operations at 10 GFLOP/s, 6 ms, and 2 * 100,352 bits at 40 Mbit/s
    assert supersfl_latency_ms(DEVICE) == pytest.approx(0.7676928 + 6.0 + 5.0176)


def test_latency_of_an_unknown_link_is_refused() -> None:
    with pytest.raises(InvalidProfileError, match=r"pi-07: link: expected .* measure_link"):
        supersfl_latency_ms(replace(DEVICE, link_bandwidth_mbps=None))


def test_default_budget_is_half_the_free_memory_and_50_ms() -> None:
    assert Budget.of(DEVICE) == Budget(1 << 29, 50.0, "inference", 1)
    assert Budget.of(DEVICE, purpose="training", batch=32).batch == 32


@pytest.mark.parametrize(
    ("memory_bytes", "depth"),
    # inference peaks: 4*150 + 5000 = 5600, 4*340 + 5000 = 6360, 4*730 + 5000 = 7920
    [(7920, 3), (7919, 2), (6360, 2), (6359, 1), (5600, 1)],
)
def test_budget_bounds_memory_of_inference(
    cost_table: CostTable, memory_bytes: int, depth: int
) -> None:
    assert budget_depth(DEVICE, cost_table, Budget(memory_bytes, 50.0)) == depth


@pytest.mark.parametrize(
    ("memory_bytes", "batch", "depth"),
    # training peaks at depth 2: 12*340 + B*6040; at depth 3: 12*730 + B*7030
    [(15_790, 1, 3), (15_789, 1, 2), (10_120, 1, 2), (64_480, 10, 2), (79_060, 10, 3)],
)
def test_budget_bounds_memory_of_training_by_batch(
    cost_table: CostTable, memory_bytes: int, batch: int, depth: int
) -> None:
    budget = Budget(memory_bytes, 50.0, "training", batch)
    assert budget_depth(DEVICE, cost_table, budget) == depth


@pytest.mark.parametrize(
    ("core_score_gflops", "depth"),
    # prefixes take 1.5, 3.25 and 7.125 ms at 10 GFLOP/s a core; the budget is 6.5 ms
    [(20.0, 3), (10.0, 2), (5.0, 2), (4.9, 1)],
)
def test_budget_bounds_latency_by_the_score_of_one_core(
    cost_table: CostTable, core_score_gflops: float, depth: int
) -> None:
    device = replace(DEVICE, cores=4, compute_score_gflops=4 * core_score_gflops)
    assert budget_depth(device, cost_table, Budget(1 << 20, 6.5)) == depth


def test_wide_early_exit_does_not_hide_a_deeper_cut(cost_table: CostTable) -> None:
    wide = replace(cost_table.exits[1], inference_peak_bytes=9000)
    table = replace(cost_table, exits={**cost_table.exits, 1: wide})
    assert budget_depth(DEVICE, table, Budget(8000, 50.0)) == 3


def test_device_that_fits_nothing_is_told_by_how_much(cost_table: CostTable) -> None:
    with pytest.raises(
        AllocationError, match=r"pi-07: inference at depth 1.* 5600 bytes .* at most 5599 bytes"
    ):
        budget_depth(DEVICE, cost_table, Budget(5599, 50.0))


def test_budget_looks_only_at_the_cuts_it_may_use(cost_table: CostTable) -> None:
    assert budget_depth(DEVICE, cost_table, cuts=(2, 1)) == 2
    with pytest.raises(InvalidProfileError, match="one of 1, 2, 3, got 4"):
        budget_depth(DEVICE, cost_table, cuts=(4,))


@pytest.mark.parametrize(("depth", "cut"), [(1, 2), (2, 2), (3, 2), (4, 4), (7, 6)])
def test_depth_goes_down_to_the_next_cut(depth: int, cut: int) -> None:
    assert fit_to_cut(depth, (6, 2, 4)) == cut


def test_no_cuts_at_all_are_refused() -> None:
    with pytest.raises(InvalidProfileError, match="cuts"):
        fit_to_cut(1, ())


def test_allocate_by_the_papers_rule(cost_table: CostTable) -> None:
    slow = replace(DEVICE, name="slow", link_latency_ms=60.0, memory_total_bytes=2 << 30)
    assert allocate("supersfl", DEVICE, cost_table) == 2  # alone: 4 GB give 2
    assert allocate("supersfl", DEVICE, cost_table, fleet=[slow]) == 3  # 2 + 4, capped
    assert allocate("supersfl", slow, cost_table, fleet=[DEVICE, slow]) == 1
    assert allocate("supersfl", DEVICE, cost_table, fleet=[slow], cuts=(1, 2)) == 2


def test_allocate_by_budget_needs_no_link(cost_table: CostTable) -> None:
    device = replace(DEVICE, link_latency_ms=None, link_bandwidth_mbps=None)
    assert allocate("budget", device, cost_table, budget=Budget(6360, 50.0)) == 2
    assert allocate("budget", device, cost_table) == 3


def test_unknown_rule_is_refused(cost_table: CostTable) -> None:
    with pytest.raises(InvalidProfileError, match="one of supersfl, budget, got 'fair'"):
        allocate(cast("Rule", "fair"), DEVICE, cost_table)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"memory_bytes": -1}, "memory_bytes"),
        ({"latency_ms": 0.0}, "latency_ms"),
        ({"purpose": "fun"}, "purpose"),
        ({"batch": 0}, "batch"),
    ],
)
def test_impossible_budget_is_refused(change: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidProfileError, match=f"budget: {field}: expected"):
        replace(Budget(1, 1.0), **change)  # type: ignore[arg-type]  # wrong on purpose
