"""The plots and slopes of cost are of the committed reports."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from benchmarks.cost.__main__ import blocks, report
from benchmarks.cost.pictures import PICTURES, drawn, path_of
from benchmarks.cost.series import PLOTS, Points, Source, all_curves, curves_of
from benchmarks.cost.slopes import slope_of
from benchmarks.reports import RESULTS
from tests.house.pictures import numbers, same_picture


def test_the_report_on_cost_has_the_slopes_of_the_reports() -> None:
    shipped = orjson.loads((RESULTS / "cost.json").read_bytes())
    assert np.allclose(numbers(shipped), numbers(report(RESULTS)), atol=2e-4), "run make cost-plots"
    assert (RESULTS / "cost.md").read_text() == "\n\n".join(blocks(RESULTS)) + "\n"


def test_the_pictures_of_cost_are_of_the_reports() -> None:
    curves = list(all_curves(PLOTS, RESULTS))
    assert {path_of(plot).name for plot, _ in curves} == {one.name for one in PICTURES.glob("*")}
    for plot, found in curves:
        there = path_of(plot).read_bytes()
        assert same_picture(drawn(plot, found), there), f"{plot.name}: run make cost-plots"


def test_a_slope_is_the_exponent_of_a_power() -> None:
    slope = slope_of([1, 2, 4, 8], [3 * x**1.5 for x in (1, 2, 4, 8)])
    assert slope is not None
    assert slope.value == pytest.approx(1.5)
    assert slope.half == pytest.approx(0.0, abs=1e-9)
    assert slope.at(16) == pytest.approx(3 * 64)


def test_the_interval_of_a_slope_is_worked_out_by_hand() -> None:
    # log x = 0, 1, 2 and log y = 0, 1, 1: slope 1/2, residuals -1/6, 1/3, -1/6; their squares sum
    # to 1/6, and with one degree of freedom the error is sqrt(1/6 / 2); t(0.975, 1) = 12.7062
    slope = slope_of([1, math.e, math.e**2], [1, math.e, math.e])
    assert slope is not None
    assert slope.value == pytest.approx(0.5)
    assert slope.half == pytest.approx(12.7062 * math.sqrt(1 / 12), rel=1e-4)


def test_two_points_have_a_slope_without_an_interval_and_one_has_none() -> None:
    two = slope_of([10, 1_000], [5, 50])
    assert two is not None
    assert (str(two), math.isnan(two.half)) == ("0.50", True)
    assert slope_of([3], [4]) is None
    assert slope_of([3, 3], [4, 5]) is None


def test_a_report_that_is_not_there_is_told(tmp_path: Path) -> None:
    def read(made: Any) -> dict[str, Points]:
        return {"a": made["points"]}

    (tmp_path / "there.json").write_text('{"points": [[2, 4], [1, 2]]}')
    there, away = Source("there", "make there", read), Source("away", "make away", read)
    plot = type(PLOTS[0])("plot", "A plot", "x", "y", (there, away))
    curves, missing = curves_of(plot, tmp_path)
    assert [list(map(tuple, one.points)) for one in curves] == [[(1, 2), (2, 4)]]
    assert missing == [away]
