"""A committed report of a table still comes out when its row is trained again."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.jobs.results import Report, Trial, read_report
from benchmarks.paper.__main__ import app
from benchmarks.paper.recipes import job_of
from benchmarks.paper.report import RESULTS, report_path
from benchmarks.paper.tables.catalog import TABLES

TABLE = TABLES["repeated"]
COMMITTED = read_report(report_path(RESULTS, "repeated", "smoke"))
AGAIN = ["repeated", "--scale", "smoke", "--seeds", "1"]
# In points. Another processor rounds otherwise, and training makes such differences grow: six runs
# whose first weights differ by 1e-6 of their size ended within 4.5 points of each other.
TOLERANCE = 8.0


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The table, trained by its command."""
    folder = tmp_path_factory.mktemp("repeated")
    places = ["--results", str(folder), "--work", str(folder / "work")]
    ran = CliRunner().invoke(app, [*AGAIN, *places])
    assert ran.exit_code == 0, ran.output
    return read_report(report_path(Path(folder), "repeated", "smoke"))


def trial_of(report: Report, row: str) -> Trial:
    (trial,) = [trial for trial in report.trials if trial.row == row]
    return trial


@pytest.mark.parametrize("row", [row.name for row in TABLE.rows])
def test_a_committed_row_comes_out_again(again: Report, row: str) -> None:
    committed, found = trial_of(COMMITTED, row), trial_of(again, row)
    assert found.megabytes == committed.megabytes
    assert found.measures.keys() == committed.measures.keys()
    assert found.measures == pytest.approx(committed.measures, abs=TOLERANCE)
    assert min(found.measures.values()) > 50  # it learns: chance is 10


def test_the_committed_report_is_of_the_recipes_as_they_are() -> None:
    command = f"python -m benchmarks.paper {' '.join(AGAIN)}"
    for row in TABLE.rows:
        job = job_of("repeated", TABLE, row, "smoke")
        found = COMMITTED.trial_of(job, TABLE.measures)
        assert found is not None, f"{row.name}: its recipe has changed; train it again: {command}"


def test_it_has_the_three_figures_of_a_gated_pair() -> None:
    three = {f"clients {choice}" for choice in ("held-out", "fleet", "oracle")}
    assert set(trial_of(COMMITTED, "SuperSFL").measures) == {*TABLE.measures, *three}
