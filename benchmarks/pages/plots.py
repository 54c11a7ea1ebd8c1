"""Curves of the papers' tables, drawn from the committed reports: docs/pictures/curves/NAME.svg."""

from __future__ import annotations

import io
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from benchmarks.paper.curves import Curves
from benchmarks.reports import ROOT

CURVES: Final = ROOT / "docs" / "pictures" / "curves"
# the same report gives the same bytes; text stays text
_FORM: Final[dict[Any, Any]] = {"svg.hashsalt": "splitedge", "svg.fonttype": "none", "font.size": 9}


def drawn(curves: Curves) -> bytes:
    """A picture of the curves as SVG: means over the seeds, bands from the worst to the best."""
    with mpl.rc_context(_FORM):
        figure = Figure(figsize=(7.2, 3.4), layout="constrained")
        axes = figure.add_subplot()
        for number, (row, seeds) in enumerate(curves.items()):
            measured = ~np.isnan(seeds).all(0)
            rounds = np.flatnonzero(measured) + 1
            found = seeds[:, measured]
            # the colours are used up after ten rows
            look = "-" if number < 10 else "--"
            (line,) = axes.plot(rounds, found.mean(0), look, label=row)
            low, high, colour = found.min(0), found.max(0), line.get_color()
            axes.fill_between(rounds, low, high, alpha=0.15, color=colour, linewidth=0)
        axes.set(xlabel="round", ylabel="accuracy on the test part, %")
        axes.grid(alpha=0.3)
        figure.legend(loc="outside right center")
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()
