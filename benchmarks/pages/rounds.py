"""Rounds that each row of the papers' tables takes to an accuracy (RTA), from the reports' curves.

    python -m benchmarks.pages.rounds --scale cpu

Trains nothing: reads the reports of `python -m benchmarks.paper` and writes rounds-SCALE.md next to
them. Seconds to an accuracy (TTA) of all methods are in training-DATA.md (benchmarks.training).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import numpy as np
import orjson
import typer
from numpy.typing import NDArray

from benchmarks.paper.curves import Curves, curves_of
from benchmarks.paper.report import RESULTS, report_path
from benchmarks.paper.tables.catalog import TABLES
from benchmarks.paper.tables.table import Scale
from benchmarks.reports import PaperResults
from edge_sdk.durable import make_folder, write_atomic
from server.training.comparison.intervals import mean_interval

TARGETS: Final[Sequence[float]] = (50.0, 60.0, 70.0, 80.0, 90.0)

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: python -m benchmarks.pages.rounds --scale cpu")
def rounds(
    scale: Annotated[Scale, typer.Option(help="Scale of the reports.")] = "cpu",
    results: PaperResults = RESULTS,
) -> None:
    """Count the rounds to each accuracy in the reports of a scale."""
    about = (
        f"Scale `{scale}`. Rounds up to the first that measured so much accuracy on the test part,"
        " mean ± half width of the 95 % interval over the seeds that got there; `2 of 3` says how"
        " many did, `-` that none did. An accuracy that no row of a table reached has no column."
        " Made from the curves of the committed reports."
    )
    blocks = ["# Rounds to an accuracy", about]
    for name in TABLES:
        path = report_path(results, name, scale).with_suffix(".json")
        curves = curves_of(orjson.loads(path.read_bytes())) if path.is_file() else {}
        if curves:
            lines = _table(curves, _command(name, scale))
            blocks += [f"## {TABLES[name].title}", *lines]
    path = report_path(results, "rounds", scale).with_suffix(".md")
    make_folder(path.parent)
    text = "\n\n".join(blocks)
    write_atomic(path, f"{text}\n".encode())
    typer.echo(f"{text}\n\nwritten to {path}")


def rounds_to(target: float, curve: NDArray[np.float64]) -> int | None:
    """The first round that measured at least `target`, from 1; None where none did.

    Args:
        curve: (rounds,) accuracy by round in %, NaN where it was not measured.
    """
    reached = np.flatnonzero(curve >= target)  # NaN is not
    return int(reached[0]) + 1 if len(reached) else None


def _table(curves: Curves, command: str) -> list[str]:
    targets = [t for t in TARGETS if any(bool((seeds >= t).any()) for seeds in curves.values())]
    head = ["row", *(f"to {target:g} %" for target in targets)]
    rows = [head, ["---"] * len(head)]
    for row, seeds in curves.items():
        rows.append([row, *(_cell([rounds_to(t, seed) for seed in seeds]) for t in targets)])
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    return [table, f"Curves of `{command}`."]


def _cell(found: Sequence[int | None]) -> str:
    known = [float(each) for each in found if each is not None]
    if not known:
        return "-"
    text = f"{known[0]:g}" if len(set(known)) == 1 else str(mean_interval(known))
    return text if len(known) == len(found) else f"{text} ({len(known)} of {len(found)})"


def _command(name: str, scale: Scale) -> str:
    return f"python -m benchmarks.paper {name} --scale {scale}"


if __name__ == "__main__":
    app()
