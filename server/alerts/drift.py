"""Drift of a device's inputs, found without labels: its uncertainties against the held-out ones.

The test is that of Kolmogorov and Smirnov for two samples, on what is known of both: the counts of
the heartbeats' histogram, and the exit rates of the bundle's operating curve. Where one of the two
distribution functions is known at a threshold and the other only beside it, the smaller distance
counts, so the statistic is never above that of the samples themselves.

    D = sup |F_device(u) - F_held_out(u)|
    p <= e * exp(-2 D^2 nm / (n + m))        Wei and Dudley, Stat. Probab. Lett. 82 (2012), n = m

A device is looked at many times, at windows that overlap. Each look may be wrong with probability
alpha = false alarms a day / (looks a day * devices), so all looks of a day together are wrong at
most that often (Bonferroni; it needs no independence of the looks).

The test takes answers for independent draws. A camera that shows one scene for an hour gives
answers that are none: small differences then look certain. So the distance has to be large too.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from edge_sdk.manifest import GatePoint

SAMPLES_MOST: Final = 50_000
# a rate is a count over the number of samples, rounded as floats are
_ROUNDING: Final = 1e-7


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Distribution function of the held-out uncertainties, where it is known.

    Attributes:
        thresholds: ascending. rates: share of the samples below each of them.
        samples: number of samples, or a divisor of it: the test is then only more careful.
    """

    thresholds: tuple[float, ...]
    rates: tuple[float, ...]
    samples: int

    @classmethod
    def of(cls, curve: Sequence[GatePoint]) -> HeldOut | None:
        """The distribution behind an operating curve; None for a curve of too few points."""
        points = sorted((point.threshold, point.exit_rate) for point in curve)
        if len(points) < 3:
            return None
        thresholds, rates = zip(*points, strict=True)
        return cls(thresholds, rates, sample_count(rates))


@dataclass(frozen=True, slots=True)
class Drift:
    """Result of one look.

    Attributes:
        distance: largest distance of the two distribution functions that is certain, in [0, 1].
        p_value: upper bound of the probability of such a distance without a drift.
        answers: of the device.
        less_sure: whether the device is less sure than on the held-out samples, where they are
            furthest apart.
    """

    distance: float
    p_value: float
    answers: int
    less_sure: bool


def sample_count(rates: Sequence[float]) -> int:
    """The number of samples behind shares: the smallest at which each share is a whole count.

    It divides the true number. Above SAMPLES_MOST it is taken for SAMPLES_MOST.
    """
    counts = np.arange(1, SAMPLES_MOST + 1)
    fits = np.ones(SAMPLES_MOST, dtype=bool)
    for rate in rates:
        product = counts * rate
        fits &= np.abs(product - np.round(product)) < _ROUNDING
    found = np.flatnonzero(fits)
    return int(counts[found[0]]) if len(found) else SAMPLES_MOST


def find_drift(counts: Sequence[int], edges: Sequence[float], held_out: HeldOut) -> Drift:
    """Compare a device's answers with the held-out samples.

    Args:
        counts: answers by uncertainty. edges: of the bins, one more than counts, ascending.
    """
    answers = sum(counts)
    if answers == 0:
        return Drift(0.0, 1.0, 0, less_sure=False)
    below = [0.0]
    for count in counts:
        below.append(below[-1] + count / answers)
    furthest = 0.0  # positive: the device has more below, so it is surer
    # at the largest uncertainty both functions are 1, whatever the counts of the last bin are
    known = [(edge, share) for edge, share in zip(edges[:-1], below[:-1], strict=True)]
    pairs = zip(held_out.thresholds, held_out.rates, strict=True)
    points = [(threshold, rate) for threshold, rate in pairs if threshold < edges[-1]]
    for at, share in known:
        furthest = _further(furthest, _apart(share, *_between(at, points)))
    for at, rate in points:
        furthest = _further(furthest, -_apart(rate, *_between(at, known)))
    distance = abs(furthest)
    p_value = smirnov_bound(distance, answers, held_out.samples)
    return Drift(distance, p_value, answers, less_sure=furthest < 0)


def smirnov_bound(distance: float, n: int, m: int) -> float:
    """Upper bound of P(D >= distance) for two samples of one distribution, of n and m values."""
    return min(1.0, math.exp(1 - 2 * distance**2 * n * m / (n + m)))


def look_alpha(false_alarms_per_day: float, looks_per_day: float, devices: int) -> float:
    """The probability with which one look may be wrong."""
    return false_alarms_per_day / (looks_per_day * max(1, devices))


def _between(at: float, points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Bounds of a distribution function at a place, by its values at others."""
    places = [place for place, _ in points]
    before, after = bisect_right(places, at) - 1, bisect_left(places, at)
    low = points[before][1] if before >= 0 else 0.0
    high = points[after][1] if after < len(points) else 1.0
    return low, high


def _apart(value: float, low: float, high: float) -> float:
    """The distance of a value from an interval, with its sign; 0 inside."""
    return max(0.0, value - high) + min(0.0, value - low)


def _further(first: float, second: float) -> float:
    return second if abs(second) > abs(first) else first
