"""Plots of how cost grows, from the committed reports.

    python -m benchmarks.cost

Draws docs/pictures/cost/NAME.svg for each plot that has a report, writes
benchmarks/results/cost.json and .md with the slopes, and says which reports are missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cost.pictures import PICTURES, drawn, fitted, path_of
from benchmarks.cost.series import PLOTS, Curve, Plot, curves_of
from benchmarks.cost.slopes import Slope
from benchmarks.reports import RESULTS, Results, write
from edge_sdk.durable import make_folder, write_atomic


def main(
    results: Results = RESULTS,
    pictures: Annotated[
        Path,
        typer.Option(metavar="DIR", show_default="docs/pictures/cost", help="Folder of pictures."),
    ] = PICTURES,
) -> None:
    """Draw all plots, and write their slopes."""
    make_folder(pictures)
    for plot in PLOTS:
        curves, missing = curves_of(plot, results)
        if curves:
            write_atomic(path_of(plot, pictures), drawn(plot, curves))
        for source in missing:
            typer.echo(f"{plot.title}: no report {source.report} yet: {source.command} makes it")
    write(results / "cost", report(results), blocks(results))


def report(results: Path) -> dict[str, Any]:
    """All slopes, by plot and curve; the points are in the reports."""
    return {
        "command": "python -m benchmarks.cost",
        "plots": {
            plot.name: {curve.name: _figures(plot, curve) for curve in curves_of(plot, results)[0]}
            for plot in PLOTS
        },
    }


def _figures(plot: Plot, curve: Curve) -> dict[str, Any]:
    slope = fitted(plot, curve)
    values = {} if slope is None else {"slope": round(slope.value, 4), "half_width": _half(slope)}
    return {"report": curve.report, "points": len(curve.points), **values}


def _half(slope: Slope) -> float | None:
    """Half of the interval's width; None with two points, which have none."""
    return None if isnan(slope.half) else round(slope.half, 4)


def blocks(results: Path) -> list[str]:
    """The report's text."""
    return [
        "# How cost grows",
        (
            "Each curve is a line in log-log scale, y = a x^b: b with its 95 % interval by"
            " Student's t. 0 does not grow, 1 grows as fast as x. All points are from the report"
            " that is named, which says on which machine they were measured."
        ),
        *_sections(results),
        "`python -m benchmarks.cost` draws and writes all of this from the committed reports.",
    ]


def _sections(results: Path) -> Iterator[str]:
    for plot in PLOTS:
        curves, missing = curves_of(plot, results)
        yield f"## {plot.title}"
        if curves:
            yield f"![{plot.title}](../../docs/pictures/cost/{plot.name}.svg)"
            rows = [f"| {plot.y}, by {plot.x} | from | to | slope b | report |", "|---" * 5 + "|"]
            yield "\n".join([*rows, *(_row(plot, curve) for curve in curves)])
        for source in missing:
            yield f"No report `{source.report}` yet: `{source.command}` makes it."


def _row(plot: Plot, curve: Curve) -> str:
    (low, first), (high, last) = curve.points[0], curve.points[-1]
    slope = fitted(plot, curve)
    shown = "-" if slope is None else str(slope)
    return (
        f"| {curve.name} | {_shown(first)} at {low:,g} | {_shown(last)} at {high:,g} | {shown} |"
        f" [{curve.report}]({curve.report}.md) |"
    )


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"


if __name__ == "__main__":
    typer.run(main)
