"""Accuracy, loss and bytes of runs as pictures; the only importer of matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

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


def plot_curves(curves: Mapping[str, Sequence[Rows]], path: Path) -> None:
    """Write a picture of accuracy by rounds and by megabytes, a line for each name.

    A line is the mean over the seeds; its band reaches from the worst seed to the best.

    Args:
        curves: by name, the rounds of each seed, which all have as many.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    by_rounds, by_bytes = figure.subplots(1, 2, sharey=True)
    for name, seeds in curves.items():
        rounds, megabytes, accuracy = _curve(seeds)
        for axes, across in ((by_rounds, rounds), (by_bytes, megabytes)):
            (line,) = axes.plot(across, accuracy.mean(0), label=name)
            axes.fill_between(
                across, accuracy.min(0), accuracy.max(0), alpha=0.2, color=line.get_color()
            )
    by_rounds.set(xlabel="round", ylabel="accuracy on the test part, %")
    by_bytes.set(xlabel="MB, all rounds so far, mean over the seeds")
    for axes in (by_rounds, by_bytes):
        axes.grid(alpha=0.3)
    by_rounds.legend()
    figure.savefig(path, dpi=120)


def _curve(seeds: Sequence[Rows]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Rounds that measured, megabytes up to them, and accuracies in % (seed, round)."""
    measured = [at for at, row in enumerate(seeds[0]) if row["accuracy"] is not None]
    moved = np.cumsum([[row["bytes_up"] + row["bytes_down"] for row in rows] for rows in seeds], 1)
    accuracy = np.array([[100 * rows[at]["accuracy"] for at in measured] for rows in seeds])
    rounds = np.array([seeds[0][at]["round"] for at in measured])
    return rounds, moved.mean(0)[measured] / 1e6, accuracy


def _axes(label: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel("round")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    return figure, axes
