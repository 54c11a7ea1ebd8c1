"""Rounds to an accuracy, by hand-made curves, and the committed page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
from typer.testing import CliRunner

from benchmarks.pages.rounds import app, rounds_to
from benchmarks.paper.report import RESULTS


def test_the_first_round_that_measured_it_counts() -> None:
    curve = np.array([np.nan, 40.0, np.nan, 62.0, 58.0, 71.0])
    assert [rounds_to(target, curve) for target in (40.0, 60.0, 70.0, 80.0)] == [2, 4, 6, None]


def test_seeds_that_got_there_are_averaged_and_counted(tmp_path: Path) -> None:
    runs = [
        {"row": "SCALA", "curve": [30.0, 55.0, 65.0]},
        {"row": "SCALA", "curve": [52.0, 40.0, 50.0]},
        {"row": "FedLC", "curve": [10.0, 20.0, 30.0]},
    ]
    (tmp_path / "scala-cpu.json").write_bytes(orjson.dumps({"runs": runs}))
    ran = CliRunner().invoke(app, ["--results", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    text = (tmp_path / "rounds-cpu.md").read_text()
    assert "| row | to 50 % | to 60 % |\n" in text
    # rounds 2 and 1: t for two values is 12.7, and 12.7 * 0.707 / 1.41 = 6.4
    assert "| SCALA | 1.5 ± 6.4 | 3 (1 of 2) |" in text
    assert "| FedLC | - | - |" in text


def test_the_committed_page_is_of_the_committed_reports(tmp_path: Path) -> None:
    for report in RESULTS.glob("*-cpu.json"):
        (tmp_path / report.name).symlink_to(report)
    CliRunner().invoke(app, ["--results", str(tmp_path)])
    committed = (RESULTS / "rounds-cpu.md").read_text()
    assert (tmp_path / "rounds-cpu.md").read_text() == committed, "run benchmarks.pages.rounds"
