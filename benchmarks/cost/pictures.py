"""Pictures of the plots, in log-log scale with their lines, as SVG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.cost.series import Curve, Plot
from benchmarks.cost.slopes import Slope, slope_of
from benchmarks.reports import ROOT

PICTURES: Final = ROOT / "docs" / "pictures" / "cost"
# the same report gives the same bytes; text stays text
_FORM: Final[dict[Any, Any]] = {"svg.hashsalt": "splitedge", "svg.fonttype": "none", "font.size": 9}


def fitted(plot: Plot, curve: Curve) -> Slope | None:
    """The slope of a curve of a plot."""
    points = [(x, y) for x, y in curve.points if x >= plot.fit_from and x > 0 and y > 0]
    return slope_of([x for x, _ in points], [y for _, y in points])


def drawn(plot: Plot, curves: Sequence[Curve]) -> bytes:
    """The picture: points, and the fitted lines, dashed."""
    with mpl.rc_context(_FORM):
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        axes = figure.add_subplot()
        for number, curve in enumerate(curves):
            xs, ys = zip(*curve.points, strict=True)
            slope, colour = fitted(plot, curve), f"C{number % 10}"
            label = curve.name if slope is None else f"{curve.name}: slope {slope}"
            axes.plot(xs, ys, "o", color=colour, label=label, markersize=4)
            if slope is not None:
                ends = max(min(xs), plot.fit_from), max(xs)
                axes.plot(ends, [slope.at(end) for end in ends], "--", color=colour, linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel=plot.x, ylabel=plot.y)
        axes.grid(alpha=0.3, which="both")
        figure.legend(loc="outside right center")
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def path_of(plot: Plot, folder: Path = PICTURES) -> Path:
    """The picture's file."""
    return folder / f"{plot.name}.svg"
