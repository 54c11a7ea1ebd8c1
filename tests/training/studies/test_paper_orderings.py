"""An ordering is shown by differences seed by seed, as scipy's paired t interval has them."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from scipy import stats
from typer.testing import CliRunner

from benchmarks.paper.orderings import CLAIMS, app, differences, verdict
from benchmarks.paper.tables.catalog import TABLES
from server.training.comparison.intervals import mean_interval

ABOVE, BELOW = [72.0, 70.5, 74.0], [70.0, 69.0, 71.0]


def report_of(rows: dict[str, list[float]], measure: str) -> dict[str, object]:
    runs = [
        {"row": row, "seed": seed, "measures": {measure: figure}}
        for row, figures in rows.items()
        for seed, figure in enumerate(figures)
    ]
    return {"seeds": [0, 1, 2], "runs": runs}


def test_seeds_are_compared_in_pairs_as_scipy_does() -> None:
    apart = differences(report_of({"a": ABOVE, "b": BELOW}, "accuracy"), "accuracy", "a", "b")
    assert apart == [2.0, 1.5, 3.0]
    low, high = stats.ttest_rel(ABOVE, BELOW).confidence_interval(0.95)
    found = mean_interval(apart)
    assert (found.mean - found.half_width, found.mean + found.half_width) == pytest.approx(
        (low, high)
    )
    # unpaired, the same figures overlap: what seeds share is taken away
    assert verdict(found) == "shown"
    assert stats.ttest_ind(ABOVE, BELOW).pvalue > 0.05


@pytest.mark.parametrize(
    ("apart", "expected"),
    [([1.0, 1.2, 0.9], "shown"), ([-1.0, -1.2, -0.9], "reversed"), ([1.0, -1.2, 0.9], "open")],
)
def test_one_that_could_be_chance_is_open(apart: list[float], expected: str) -> None:
    assert verdict(mean_interval(apart)) == expected
    assert verdict(mean_interval(apart[:1])) == "open"


def test_claims_are_of_rows_and_measures_that_tables_have() -> None:
    for claim in CLAIMS:
        table = TABLES[claim.table]
        names = {row.name for row in table.rows}
        assert {claim.above, *claim.below} <= names
        assert claim.measure in table.measures


def test_gated_rows_are_compared_by_held_out_thresholds_and_others_say_so(tmp_path: Path) -> None:
    rows = {"HARMONY": ABOVE, "SplitGP, lambda 0.2": BELOW, "SplitFed": BELOW}
    report = report_of(rows, "rho 0")
    report["recipes"] = {}
    for run in report["runs"]:  # type: ignore[attr-defined]  # a list
        if run["row"] != "SplitFed":
            # by the oracle the order is the other way round
            run["measures"] |= {"rho 0 held-out": run["measures"]["rho 0"]}
            run["measures"]["rho 0 oracle"] = 99.0 if run["row"] != "HARMONY" else 90.0
    (tmp_path / "harmony-cpu.json").write_bytes(orjson.dumps(report))
    ran = CliRunner().invoke(app, ["--results", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    text = (tmp_path / "orderings-cpu.md").read_text()
    difference = "2.167 ± 1.9 | 3 of 3 | shown |"
    assert f"| rho 0 held-out | HARMONY | SplitGP, lambda 0.2 | {difference}" in text
    assert f"| rho 0 held-out | HARMONY | SplitFed (no gate) | {difference}" in text


def test_report_of_an_earlier_version_says_whose_thresholds_it_has(tmp_path: Path) -> None:
    report = report_of({"HARMONY": ABOVE, "SplitFed": BELOW}, "rho 0")
    (tmp_path / "harmony-cpu.json").write_bytes(orjson.dumps(report))
    CliRunner().invoke(app, ["--results", str(tmp_path)])
    text = (tmp_path / "orderings-cpu.md").read_text()
    assert "| rho 0 (earlier version: gated rows by the oracle) | HARMONY | SplitFed |" in text


def test_report_says_what_is_shown_and_what_was_not_run(tmp_path: Path) -> None:
    report = report_of({"SCALA": ABOVE, "Minibatch-SFL": BELOW}, "accuracy")
    (tmp_path / "scala-cpu.json").write_bytes(orjson.dumps(report))
    ran = CliRunner().invoke(app, ["--results", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    text = (tmp_path / "orderings-cpu.md").read_text()
    assert "| SCALA | Minibatch-SFL | 2.167 ± 1.9 | 3 of 3 | shown |" in text
    assert "| Minibatch-SFL | SplitFedV1 | - | - | not run |" in text
    assert "harmony-cpu.json does not exist" in ran.output


def test_one_seed_decides_nothing_and_has_no_interval(tmp_path: Path) -> None:
    report = report_of({"SCALA": ABOVE[:1], "Minibatch-SFL": BELOW[:1]}, "accuracy")
    report["seeds"] = [0]
    (tmp_path / "scala-cpu.json").write_bytes(orjson.dumps(report))
    CliRunner().invoke(app, ["--results", str(tmp_path)])
    text = (tmp_path / "orderings-cpu.md").read_text()
    difference = f"{ABOVE[0] - BELOW[0]:.4g}"
    assert f"| SCALA | Minibatch-SFL | {difference} | 1 of 1 | open |" in text
