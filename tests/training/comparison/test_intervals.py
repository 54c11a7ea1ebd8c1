"""Confidence intervals: by scipy, and by the printed table."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from edge_sdk.errors import ConfigurationError
from server.training.comparison.intervals import mean_interval, student_t


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


def test_a_figure_that_is_not_defined_leaves_none() -> None:
    interval = mean_interval([0.5, math.nan])
    assert math.isnan(interval.mean)
    assert math.isnan(interval.half_width)


def test_an_interval_reads_as_papers_print_it() -> None:
    # sd of .8 .9 1.0 is .1: 4.303 * .1 / sqrt 3
    assert str(mean_interval([0.8, 0.9, 1.0])) == "0.9 ± 0.25"
