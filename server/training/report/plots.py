"""Accuracy, loss and bytes of a run as pictures; the only importer of matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]


def plot_rounds(rows: Rows, folder: Path) -> None:
    """Write accuracy.png, loss.png and bytes.png into `folder`."""
    rounds = [row["round"] for row in rows]
    for name, label in (("accuracy", "accuracy on the test part"), ("loss", "training loss")):
        figure, axes = _axes(label)
        points = [(row["round"], row[name]) for row in rows if row[name] is not None]
        axes.plot([at for at, _ in points], [value for _, value in points], marker=".")
        figure.savefig(folder / f"{name}.png", dpi=120)
    figure, axes = _axes("MB, all rounds so far")
    for way in ("up", "down"):
        megabytes = [total / 1e6 for total in accumulate(row[f"bytes_{way}"] for row in rows)]
        axes.plot(rounds, megabytes, label=way)
    axes.legend()
    figure.savefig(folder / "bytes.png", dpi=120)


def _axes(label: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel("round")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    return figure, axes
