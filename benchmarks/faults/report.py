"""The report of the figures under faults: one outcome a figure, kept from run to run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import orjson

from benchmarks.faults.figures import FIGURES, Figure
from benchmarks.reports import write

TITLE: Final = "Figures under faults"
MET: Final = "met"
MISSED: Final = "missed"
NOT_RUN: Final = "not run"
Result = Literal["met", "missed", "not run"]
Outcomes = Mapping[str, Mapping[str, Any]]


def read_outcomes(path: Path) -> dict[str, dict[str, Any]]:
    """Outcome of each figure in the report `path`.json; empty where there is no report."""
    file = path.with_suffix(".json")
    if not file.exists():
        return {}
    outcomes: dict[str, dict[str, Any]] = orjson.loads(file.read_bytes())["figures"]
    return {name: outcome for name, outcome in outcomes.items() if name in FIGURES}


def not_run(figure: Figure, why: str) -> dict[str, Any]:
    """Outcome of a figure that was not made."""
    return {"rows": figure.rows, "wanted": figure.wanted, "result": NOT_RUN, "reached": why}


def write_report(path: Path, outcomes: Outcomes) -> None:
    """Write `path`.json and `path`.md: the outcome of every figure, in the order of FIGURES.

    Raises: StorageError.
    """
    every = {
        name: outcomes.get(name) or not_run(figure, "no run of it so far")
        for name, figure in FIGURES.items()
    }
    counts = {
        result: sum(outcome["result"] == result for outcome in every.values())
        for result in (MET, MISSED, NOT_RUN)
    }
    report = {"title": TITLE, "command": "make faults", "counts": counts, "figures": every}
    write(path, report, [f"# {TITLE}", _summary(counts), _table(every), _commands(every)])


def _summary(counts: Mapping[str, int]) -> str:
    words = ", ".join(f"{count} {result}" for result, count in counts.items())
    return (
        "`make faults` makes them all, `make faults ARGS=NAME` one. The rows are those of"
        f" [docs/faults.md](../../docs/faults.md). {words}."
    )


def _table(outcomes: Outcomes) -> str:
    lines = ["| figure | rows | wanted | reached | |", "| --- | --- | --- | --- | --- |"]
    for name, outcome in outcomes.items():
        cells = [name, ", ".join(map(str, outcome["rows"])), outcome["wanted"], outcome["reached"]]
        lines.append(f"| {' | '.join(_cell(text) for text in cells)} | {outcome['result']} |")
    return "\n".join(lines)


def _commands(outcomes: Outcomes) -> str:
    lines = ["## How each was made"]
    lines += [
        f"- {name}: `{outcome['command']}`, {outcome['seconds']:.0f} s, {outcome['machine']},"
        f" commit {outcome['commit']}, {outcome['when']}"
        for name, outcome in outcomes.items()
        if outcome["result"] != NOT_RUN
    ]
    return "\n".join([lines[0], "", *lines[1:]])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
