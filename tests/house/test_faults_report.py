"""The report of `make faults`: outcomes add up from run to run, and none is made up."""

from __future__ import annotations

from pathlib import Path

import orjson

from benchmarks.faults.figures import FIGURES
from benchmarks.faults.report import MET, NOT_RUN, not_run, read_outcomes, write_report

OUTCOME = {
    "rows": [1],
    "wanted": "1,000 | answered",
    "result": MET,
    "reached": "1,000",
    "numbers": {},
    "command": "make faults ARGS=black-hole",
    "seconds": 20.0,
    "machine": "two cores",
    "commit": "abc",
    "when": "today",
}


def test_outcomes_of_other_runs_stay_and_the_rest_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "faults"
    assert read_outcomes(path) == {}
    write_report(path, {"black-hole": OUTCOME})
    kill = not_run(FIGURES["registry-kill"], "needs root")
    write_report(path, read_outcomes(path) | {"registry-kill": kill})
    report = orjson.loads(path.with_suffix(".json").read_bytes())
    assert report["counts"] == {"met": 1, "missed": 0, "not run": len(FIGURES) - 1}
    assert list(report["figures"]) == list(FIGURES)
    assert report["figures"]["black-hole"] == OUTCOME
    assert report["figures"]["registry-kill"]["reached"] == "needs root"
    assert report["figures"]["flipped-bytes"]["result"] == NOT_RUN
    text = path.with_suffix(".md").read_text()
    assert "| black-hole | 1 | 1,000 \\| answered | 1,000 | met |" in text
    assert "- black-hole: `make faults ARGS=black-hole`, 20 s, two cores" in text
    assert "- registry-kill" not in text


def test_a_figure_that_is_no_longer_made_leaves_the_report(tmp_path: Path) -> None:
    path = tmp_path / "faults"
    write_report(path, {"black-hole": OUTCOME})
    raw = path.with_suffix(".json").read_bytes()
    path.with_suffix(".json").write_bytes(raw.replace(b'"black-hole"', b'"of-old"'))
    assert "of-old" not in read_outcomes(path)
