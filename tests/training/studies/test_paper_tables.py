"""Every table of the five papers runs at its smallest scale, and its report names its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from typer.testing import CliRunner

from benchmarks.paper.__main__ import app
from benchmarks.paper.local_only import local_only_scores
from benchmarks.paper.measures import _LOCAL_ONLY, measured
from benchmarks.paper.recipes import job_of
from benchmarks.paper.tables import TABLES, over
from server.training.recipe.recipe import read_recipe
from server.training.report.evaluate import Evaluator
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds


@pytest.mark.parametrize("name", TABLES)
def test_a_table_runs_at_smoke_scale(name: str, tmp_path: Path) -> None:
    places = ["--results", str(tmp_path), "--work", str(tmp_path / "work")]
    ran = CliRunner().invoke(app, [name, "--seeds", "1", *places])
    assert ran.exit_code == 0, ran.output
    report = orjson.loads((tmp_path / f"{name}-smoke.json").read_bytes())
    table = TABLES[name]
    assert [run["row"] for run in report["runs"]] == [row.name for row in table.rows]
    for run in report["runs"]:
        assert run["measures"].keys() == set(table.measures)
        assert run["seconds"] > 0
        assert run["megabytes"] > 0
    assert report["command"].startswith(f"python -m benchmarks.paper {name} ")
    text = (tmp_path / f"{name}-smoke.md").read_text()
    for row in table.rows:
        assert f"| {row.name} |" in text
        for figure in row.paper.values():
            assert f"{figure:.2f}" in text


@pytest.mark.parametrize("scale", ["smoke", "cpu", "full"])
@pytest.mark.parametrize("name", TABLES)
def test_every_scale_of_every_row_is_a_recipe(name: str, scale: str) -> None:
    for row in TABLES[name].rows:
        recipe = read_recipe(over(TABLES[name].scales[scale], row.recipe))  # type: ignore[index]  # a scale
        assert recipe.train.rounds >= 2


def test_an_unknown_table_is_told_which_there_are() -> None:
    ran = CliRunner().invoke(app, ["nosuch"])
    assert ran.exit_code != 0
    assert "splitlpf-udd" in ran.output


def test_pearson_is_of_clients_alone_and_together_at_one_training_alone_a_seed() -> None:
    table = TABLES["splitlpf-udds"]
    _LOCAL_ONLY.clear()
    alone: list[list[float]] = []
    for row in table.rows[:2]:
        recipe = job_of("splitlpf-udds", table, row, "smoke").recipe
        simulation, rows = build_simulation(recipe), list[Any]()
        for _ in run_rounds(simulation, rows):
            pass
        found = measured(simulation, rows, ["pearson"])["pearson"]
        alone.append([(s.inside + s.outside).accuracy for s in local_only_scores(recipe)])
        scores = Evaluator(simulation).clients(supervised=True)
        together = [(s.inside + s.outside).accuracy for s in scores]
        assert found == pytest.approx(100 * np.corrcoef(alone[-1], together)[0, 1])
    assert alone[0] == alone[1]  # methods differ in nothing that one trains by alone
    assert len(_LOCAL_ONLY) == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["scala", "--row", "nosuch"], "--row: expected some of SCALA"),
        (["scala", "--device", "toaster"], "expected cpu or cuda"),
        (["scala", "--scale", "cpu", "--data", "nowhere"], "nowhere"),
    ],
)
def test_a_mistake_is_one_sentence_and_no_report_is_touched(
    words: list[str], expected: str, tmp_path: Path
) -> None:
    places = ["--results", str(tmp_path / "results"), "--work", str(tmp_path / "work")]
    ran = CliRunner().invoke(app, [*words, "--seeds", "1", *places])
    assert ran.exit_code in {1, 2}
    assert expected in " ".join(ran.output.replace("│", " ").split())
    assert not isinstance(ran.exception, AssertionError | KeyError)
    assert not (tmp_path / "results").exists()
