"""Curves of the rows of a report: accuracy by round, of every seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
