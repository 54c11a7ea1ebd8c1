"""Confidence intervals over the seeds of a comparison."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

from edge_sdk.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean over seeds and the half width of its confidence interval."""

    mean: float
    half_width: float
    seeds: int

    def __str__(self) -> str:
        """The interval as papers print it."""
        return f"{self.mean:.4g} ± {self.half_width:.2g}"


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean and t interval of a few seeds' figures: mean ± t * s / sqrt(n), n - 1 degrees.

    With one value the half width is NaN: one run says nothing about the spread. Both are NaN where
    a value is.
    """
    if not values:
        raise ConfigurationError("interval: expected at least one value, got none")
    if any(map(math.isnan, values)):
        return Interval(math.nan, math.nan, len(values))
    if len(values) == 1:
        return Interval(values[0], math.nan, 1)
    t = student_t(0.5 + confidence / 2, len(values) - 1)
    half_width = t * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(statistics.fmean(values), half_width, len(values))


def student_t(probability: float, degrees: int) -> float:
    """The value below which Student's t falls with that probability, in [0.5, 1).

    Raises: ConfigurationError for another probability, or fewer than 1 degree of freedom.
    """
    if not 0.5 <= probability < 1 or degrees < 1:
        raise ConfigurationError(
            f"student t: expected a probability in [0.5, 1) and at least 1 degree of freedom,"
            f" got {probability} and {degrees}"
        )
    return float(stdtrit(degrees, probability))
