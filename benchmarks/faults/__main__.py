"""Full figures under faults, written to benchmarks/results/faults.json and .md.

    python -m benchmarks.faults figures
    python -m benchmarks.faults figures black-hole registry-kill
    python -m benchmarks.faults page

A figure that is made again replaces its line of the report; the others stay. Figures that need
root and loop devices are reported as not run where there are none.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.faults.figures import FIGURES
from benchmarks.faults.page import rewrite
from benchmarks.faults.report import MISSED, read_outcomes, write_report
from benchmarks.faults.run import make_figure
from benchmarks.reports import RESULTS, Results

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.command(epilog="Example: python -m benchmarks.faults figures black-hole")
def figures(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"Some of {', '.join(FIGURES)}.", show_default="all of them"),
    ] = None,
    soak_minutes: Annotated[
        float, typer.Option(min=0.1, help="How long a soak lasts; the goal names an hour.")
    ] = 10.0,
    results: Results = RESULTS,
) -> None:
    """Make figures, and write the report after each."""
    unknown = sorted(set(names or []) - set(FIGURES))
    if unknown:
        raise typer.BadParameter(f"expected some of {', '.join(FIGURES)}, got {', '.join(unknown)}")
    path: Path = results / "faults"
    missed = False
    for name in names or FIGURES:
        minutes = FIGURES[name].minutes
        typer.echo(f"{time.strftime('%H:%M:%S')} {name}, about {minutes:g} minutes")
        outcome = make_figure(name, soak_minutes=soak_minutes)
        missed |= outcome["result"] == MISSED
        write_report(path, read_outcomes(path) | {name: outcome})
        typer.echo(f"{time.strftime('%H:%M:%S')} {outcome['result']}: {outcome['reached']}")
    raise typer.Exit(int(missed))


@app.command(epilog="Example: python -m benchmarks.faults page")
def page() -> None:
    """Write the tests of each row into docs/faults-tests.md, by their docstrings."""
    rewrite()


if __name__ == "__main__":
    app()
