"""Measures of SplitLPF's tables: PC by scipy and by hand, and what comes of rows and networks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchmarks.paper.measures import measured, pearson
from server.training.recipe.recipe import read_recipe
from server.training.report.evaluate import Evaluator
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds


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


def test_measures_of_backs_and_votes_are_those_of_rows_and_networks() -> None:
    recipe: dict[str, Any] = {
        "method": "splitlpf",
        "data": {"name": "digits", "clients": 3, "partition": "udd", "train_max": 200}
        | {"test_max": 100, "held_out": 0},
        "train": {"backbone": "tiny", "rounds": 2, "learning_rate": 0.1, "batch": 16, "depth": 2},
        "evaluate": {"local": True},
    }
    run, rows = build_simulation(read_recipe(recipe)), list[dict[str, Any]]()
    for _ in run_rounds(run, rows):
        pass
    rows[0] |= {"zeroed": [], "participants": ["a", "b"]}
    rows[1] |= {"zeroed": ["a"], "participants": ["a", "b", "c"]}
    local = dict(zip(run.clients, [0.5, 0.25, 0.75], strict=True))
    rows[1]["local"] |= {"each": local, "accuracy_clients": 0.5}
    refit = replace(run, method=replace(run.method, refit_epochs=1))
    scores = Evaluator(refit).clients(supervised=True)
    names = ("zeroed", "local", "local pearson", "refitted", "pearson")
    found = measured(run, rows, names)
    assert found["zeroed"] == pytest.approx((0 + 100 / 3) / 2)
    assert found["local"] == 50
    assert found["refitted"] == pytest.approx(100 * sum(s.accuracy for s in scores) / 3)
    # without these, a run has none
    plain = replace(run, method=replace(run.method, client=replace(run.method.client, back=None)))
    del rows[1]["local"]
    assert all(
        math.isnan(value)
        for value in (
            measured(run, rows, ["local"])["local"],
            measured(run, rows, ["local pearson"])["local pearson"],
            measured(plain, rows, ["refitted"])["refitted"],
        )
    )
