"""Slopes of costs: the straight line through points in log-log scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Final

import numpy as np
from scipy import stats

CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True)
class Slope:
    """The exponent b of y = a x^b.

    Attributes:
        value: 0 does not grow, 1 grows with x, -1 falls with it.
        half: half width of the 95 % interval by Student's t; NaN with two points.
        scale: a.
    """

    value: float
    half: float
    scale: float

    def at(self, x: float) -> float:
        """The line's y at x."""
        return float(self.scale * x**self.value)

    def __str__(self) -> str:
        interval = "" if np.isnan(self.half) else f" ± {self.half:.2f}"
        return f"{self.value:.2f}{interval}"


def slope_of(xs: Sequence[float], ys: Sequence[float]) -> Slope | None:
    """The least-squares line through (log x, log y); None with fewer than two different x.

    Args:
        xs, ys: above 0.
    """
    if len(set(xs)) < 2:
        return None
    logs = np.log(np.asarray(xs, float)), np.log(np.asarray(ys, float))
    if len(xs) == 2:
        value = float((logs[1][1] - logs[1][0]) / (logs[0][1] - logs[0][0]))
        return Slope(value, nan, float(np.exp(logs[1][0] - value * logs[0][0])))
    line = stats.linregress(*logs)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(xs) - 2) * line.stderr
    return Slope(float(line.slope), float(half), float(np.exp(line.intercept)))
