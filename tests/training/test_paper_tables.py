"""Every table of the five papers runs at its smallest scale, and its report says what it is of."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from benchmarks.paper.__main__ import app
from benchmarks.paper.tables import TABLES, over
from server.training.recipe import read_recipe


@pytest.mark.parametrize("name", TABLES)
def test_a_table_runs_at_smoke_scale(name: str, tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, [name, "--seeds", "1", "--results", str(tmp_path)])
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
