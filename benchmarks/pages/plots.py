"""Curves of the papers' tables, drawn from the committed reports: docs/pictures/curves/NAME.svg."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
import orjson
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks.reports import ROOT
from edge_sdk.durable import make_folder, write_atomic

CURVES: Final = ROOT / "docs" / "pictures" / "curves"
# the same report gives the same bytes; text stays text
_FORM: Final[dict[Any, Any]] = {"svg.hashsalt": "splitedge", "svg.fonttype": "none", "font.size": 9}

Curves = Mapping[str, NDArray[np.float64]]


def curves_of(report: Mapping[str, Any]) -> Curves:
    """Accuracy in %, (seed, round), by row; NaN in rounds that were not measured.

    Rows that were measured after the last round alone, or with seeds of different lengths, have no
    curve.
    """
    by_row: dict[str, list[Sequence[float | None]]] = {}
    for run in report["runs"]:
        by_row.setdefault(run["row"], []).append(run.get("curve") or [])
    return {
        row: np.array(seeds, np.float64)
        for row, seeds in by_row.items()
        if len({len(seed) for seed in seeds}) == 1
        and min(sum(value is not None for value in seed) for seed in seeds) > 1
    }


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


def draw(report: Path, folder: Path = CURVES) -> Path | None:
    """Draw the curves of a report, if it has any; the picture.

    Args:
        report: its JSON.
    Raises: StorageError.
    """
    curves = curves_of(orjson.loads(report.read_bytes()))
    if not curves:
        return None
    make_folder(folder)
    path = folder / report.with_suffix(".svg").name
    picture = drawn(curves)
    if not path.exists() or path.read_bytes() != picture:
        write_atomic(path, picture)
    return path
