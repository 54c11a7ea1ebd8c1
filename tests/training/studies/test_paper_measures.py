"""SplitLPF's scaled Pearson correlation: by scipy and by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchmarks.paper.measures import pearson


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
