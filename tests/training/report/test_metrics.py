"""Metrics: by hand, by scipy, and by what the papers print."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from edge_sdk.errors import ConfigurationError
from server.training.report.metrics import (
    ClientLoad,
    Reached,
    RoundPoint,
    Score,
    class_accuracy,
    cost_to,
    jain,
    mean_interval,
    modelled_latency,
    pearson,
    score,
    std,
    student_t,
    summarise_clients,
)

ACCURACIES = st.lists(st.floats(0.01, 1), min_size=2, max_size=20)


# accuracy


def test_scores_count_and_add_up() -> None:
    first = score(np.array([0, 1, 2, 2]), np.array([0, 1, 1, 2]))
    assert first == Score(3, 4)
    assert first.accuracy == 0.75
    assert first + Score(0, 4) == Score(3, 8)
    assert math.isnan(Score(0, 0).accuracy)
    with pytest.raises(ConfigurationError, match="as many of both, got 1, 2"):
        score(np.array([1]), np.array([1, 2]))


def test_class_accuracy_is_per_true_class() -> None:
    predictions, truth = np.array([0, 0, 1, 3, 0]), np.array([0, 0, 0, 3, 1])
    expected = [2 / 3, 0, math.nan, 1]
    np.testing.assert_allclose(class_accuracy(predictions, truth, 4), expected)


def test_every_client_counts_the_same() -> None:
    # clients right on 9/10 and 1/2 of their own, 0/10 and 1/2 of others'
    summary = summarise_clients([Score(9, 10), Score(1, 2)], [Score(0, 10), Score(1, 2)])
    assert summary.accuracy_id == pytest.approx((0.9 + 0.5) / 2)
    assert summary.accuracy_ood == pytest.approx((0 + 0.5) / 2)
    assert summary.accuracy == pytest.approx((9 / 20 + 2 / 4) / 2)
    # JFI of .45 and .5: (.95)^2 / (2 (.2025 + .25)); their deviation is half the difference
    assert summary.jain == pytest.approx(100 * 0.9025 / 0.905)
    assert summary.std == pytest.approx(0.025)


def test_without_strangers_accuracy_is_that_on_own_classes() -> None:
    summary = summarise_clients([Score(1, 2), Score(0, 0), Score(2, 2)])
    assert summary.accuracy == summary.accuracy_id == 0.75  # the client without samples is left out
    assert math.isnan(summary.accuracy_ood)
    empty = summarise_clients([])
    assert all(math.isnan(v) for v in (empty.accuracy, empty.jain, empty.std))


# fairness


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=3, max_size=20))
def test_pc_is_a_hundred_times_pearsons_r(pairs: list[tuple[float, float]]) -> None:
    # in steps of 1/64, so that what varies at all varies by more than rounding
    alone, together = ([round(64 * v) / 64 for v in side] for side in zip(*pairs, strict=True))
    if len(set(alone)) == 1 or len(set(together)) == 1:
        assert math.isnan(pearson(alone, together))
    else:
        expected = 100 * stats.pearsonr(alone, together).statistic
        assert pearson(alone, together) == pytest.approx(expected, abs=1e-9)


def test_pc_by_hand() -> None:
    assert pearson([0.1, 0.2, 0.3], [0.5, 0.6, 0.7]) == pytest.approx(100)
    assert pearson([0.1, 0.2], [0.9, 0.3]) == pytest.approx(-100)
    assert math.isnan(pearson([0.5], [0.5]))


@given(ACCURACIES, st.floats(0.1, 10))
def test_jain_is_between_one_nth_and_all_and_knows_no_scale(s: list[float], scale: float) -> None:
    index = jain(s)
    assert 100 / len(s) - 1e-9 <= index <= 100 + 1e-9
    assert jain([scale * v for v in s]) == pytest.approx(index)
    # (mean)^2 / mean of squares = 1 / (1 + the squared coefficient of variation)
    assert index == pytest.approx(100 / (1 + stats.variation(s) ** 2))


def test_jain_by_hand() -> None:
    assert jain([0.7, 0.7, 0.7]) == pytest.approx(100)
    assert jain([0, 0, 0, 0.9]) == pytest.approx(25)
    assert jain([0.2, 0.4]) == pytest.approx(90)  # .36 / (2 * .2)
    assert math.isnan(jain([0, 0]))


def test_std_is_the_populations() -> None:
    assert std([0.2, 0.4, 0.9]) == pytest.approx(math.sqrt((0.09 + 0.01 + 0.16) / 3))
    assert math.isnan(std([]))


# cost to a target


def test_cost_counts_every_round_up_to_the_first_that_reaches_it() -> None:
    points = [
        RoundPoint(1, 0.3, 1.5, 10, 20),
        RoundPoint(2, None, 1.0, 10, 20),  # not measured, paid all the same
        RoundPoint(3, 0.6, 2.0, 11, 22),
        RoundPoint(4, 0.5, 9.0, 99, 99),
    ]
    assert cost_to(0.6, points) == Reached(3, 4.5, 31, 62)
    assert cost_to(0.2, points) == Reached(1, 1.5, 10, 20)
    assert cost_to(0.61, points) is None
    assert cost_to(0.1, []) is None
    assert Reached(3, 4.5, 31, 62).bytes_total == 93


# HARMONY, Eq. 12


def test_latency_by_hand() -> None:
    # 100 * ((2000 + 40) / 20 + 0.5 * (64 / 1 + 30000 / 100)) = 100 * (102 + 182)
    load = ClientLoad(100, 2000, 40, 64, 30_000, 0.5)
    assert modelled_latency([load]) == pytest.approx(28_400)
    assert modelled_latency([load, load]) == pytest.approx(56_800)
    exits_all = ClientLoad(10, 2000, 40, 64, 30_000, 0.0, power=1020)
    assert modelled_latency([exits_all]) == pytest.approx(20)
    # half the bandwidth and half the server: 102 + 0.5 * (128 + 600)
    assert modelled_latency([load], bandwidth=0.5, server_power=50) == pytest.approx(46_600)


def test_latency_is_near_what_the_paper_prints_for_splitfed() -> None:
    """Table 2, rho 0: 104.80 +- 4.21 x 10^8 for CIFAR-10, 50 clients, Shard-2, VGG-11.

    Counts of prefix and suffix after 2, 3 and 4 stages from docs/methods.md (the third stage adds
    128 x 256 x 9 weights and 3 x 256 of bias and BatchNorm); SplitFed has no exits. A client's
    shards are of one class in 9 of 99 cases, else of two, of 1,000 test samples each.
    """
    third = 128 * 256 * 9 + 3 * 256
    cuts = [(76_032, 128, 9_155_082), (76_032 + third, 256, 9_155_082 - third)]
    cuts.append((962_304, 256, 8_268_810))
    samples = 50 * 2000 - 50 * 1000 * 9 // 99
    loads = [ClientLoad(samples // 3, front, 0, dim, back, 1.0) for front, dim, back in cuts]
    assert modelled_latency(loads) / 1e8 == pytest.approx(104.80, abs=4.21)


# over seeds


@pytest.mark.parametrize("probability", [0.5, 0.8, 0.975, 0.995, 0.9999])
@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 30, 301])
def test_students_t_is_scipys(probability: float, degrees: int) -> None:
    assert student_t(probability, degrees) == pytest.approx(
        stats.t.ppf(probability, degrees), rel=1e-9, abs=1e-12
    )


def test_students_t_by_the_printed_table() -> None:
    # three seeds: two degrees of freedom
    assert student_t(0.975, 2) == pytest.approx(4.303, abs=5e-4)
    for probability, degrees in ((1.0, 2), (0.4, 2), (0.9, 0)):
        with pytest.raises(ConfigurationError, match="student t: expected"):
            student_t(probability, degrees)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=10))
def test_the_interval_is_scipys(values: list[float]) -> None:
    interval = mean_interval(values)
    error = stats.sem(values)
    assert interval.mean == pytest.approx(np.mean(values), abs=1e-9)
    expected = stats.t.interval(0.95, len(values) - 1, scale=error)[1] if error > 0 else 0
    assert interval.half_width == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert interval.seeds == len(values)


def test_one_seed_has_no_interval() -> None:
    interval = mean_interval([0.5])
    assert interval.mean == 0.5
    assert math.isnan(interval.half_width)
    with pytest.raises(ConfigurationError, match="at least one value"):
        mean_interval([])


def test_an_interval_reads_as_papers_print_it() -> None:
    # sd of .8 .9 1.0 is .1: 4.303 * .1 / sqrt 3
    assert str(mean_interval([0.8, 0.9, 1.0])) == "0.9 ± 0.25"
