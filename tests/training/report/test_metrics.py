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
    Score,
    jain,
    modelled_latency,
    score,
    std,
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

    Counts of prefix and suffix after 2, 3 and 4 stages from docs/methods/common.md (the third stage
    adds 128 x 256 x 9 weights and 3 x 256 of bias and BatchNorm); SplitFed has no exits. A client's
    shards are of one class in 9 of 99 cases, else of two, of 1,000 test samples each.
    """
    third = 128 * 256 * 9 + 3 * 256
    cuts = [(76_032, 128, 9_155_082), (76_032 + third, 256, 9_155_082 - third)]
    cuts.append((962_304, 256, 8_268_810))
    samples = 50 * 2000 - 50 * 1000 * 9 // 99
    loads = [ClientLoad(samples // 3, front, 0, dim, back, 1.0) for front, dim, back in cuts]
    assert modelled_latency(loads) / 1e8 == pytest.approx(104.80, abs=4.21)
