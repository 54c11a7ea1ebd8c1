"""Looks of the alert for drift at windows of answers, and scipy's test on the same answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from edge_sdk.answers.tally import uncertainty_edges
from exporters.curve import candidate_thresholds, operating_curve
from server.alerts.drift import Drift, HeldOut, find_drift, look_alpha
from server.alerts.limits import AlertLimits

CLASSES: Final = 10
EDGES: Final = uncertainty_edges(math.log(CLASSES))
CONFIDENCE: Final = 0.95

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Share:
    """A share of windows, with its Clopper-Pearson interval of 95 %."""

    hits: int
    of: int
    low: float
    high: float

    @classmethod
    def count(cls, hits: int, of: int) -> Share:
        """The share `hits` of `of`."""
        found = stats.binomtest(hits, of).proportion_ci(CONFIDENCE, method="exact")
        return cls(hits, of, float(found.low), float(found.high))

    @property
    def value(self) -> float:
        """The best estimate."""
        return self.hits / self.of

    def __str__(self) -> str:
        return f"{self.value:.1%} ({self.low:.1%} to {self.high:.1%})"


def manifest_of(values: Floats) -> HeldOut:
    """The distribution that a manifest tells of held-out samples with these uncertainties."""
    right = np.ones(len(values), dtype=bool)
    curve = operating_curve(values, right, right, candidate_thresholds(values, CLASSES))
    found = HeldOut.of(curve)
    if found is None:
        raise ValueError("expected a curve of three points or more")
    return found


def look(values: Floats, held_out: HeldOut) -> Drift:
    """One look at a device that gave these answers, as the server sees them: a histogram."""
    counts = np.histogram(values, EDGES)[0].tolist()
    return find_drift(counts, EDGES, held_out)


@dataclass(frozen=True, slots=True)
class Level:
    """Shares of windows without a drift that each test calls one, at a nominal level."""

    alpha: float
    answers: int
    ours: Share
    scipy: Share


def false_alarms(
    pool: Floats,
    *,
    held_out: int,
    answers: int,
    windows: int,
    alphas: Sequence[float],
    seed: int = 0,
) -> list[Level]:
    """Rate at which each test errs when nothing has changed: new held-out samples for every window.

    Args:
        pool: uncertainties of pictures that nothing was trained on.
        held_out, answers: sizes of the two samples, drawn without replacement.
    """
    random = np.random.default_rng(seed)
    ours, scipy = [], []
    for _ in range(windows):
        drawn = random.choice(pool, held_out + answers, replace=False)
        known, seen = drawn[:held_out], drawn[held_out:]
        ours.append(look(seen, manifest_of(known)).p_value)
        scipy.append(stats.ks_2samp(known, seen, method="asymp").pvalue)

    def share(p_values: Sequence[float], alpha: float) -> Share:
        return Share.count(int(np.sum(np.array(p_values) < alpha)), windows)

    return [Level(alpha, answers, share(ours, alpha), share(scipy, alpha)) for alpha in alphas]


@dataclass(frozen=True, slots=True)
class Detection:
    """Shares of windows that raise an alert.

    Attributes:
        distance: of the whole pool from the held-out samples, as scipy measures it.
        ours: by the rule as it is shipped: certain enough, and far enough.
        scipy: windows that scipy's test on the samples themselves finds at the same level.
    """

    change: str
    answers: int
    distance: float
    ours: Share
    scipy: Share


def detection(
    change: str,
    seen: Floats,
    held_out: Floats,
    *,
    answers: int,
    windows: int,
    devices: int,
    seed: int = 0,
) -> Detection:
    """Rate at which windows of a changed stream raise an alert.

    Args:
        seen: uncertainties of the changed pictures. held_out: those of the bundle's manifest.
        devices: of the fleet, over which the false alarms of a day are shared.
    """
    limits, random, known = AlertLimits(), np.random.default_rng(seed), manifest_of(held_out)
    alpha = look_alpha(limits.drift_false_alarms, limits.drift_looks_per_day, devices)
    ours = scipy = 0
    for _ in range(windows):
        window = random.choice(seen, answers, replace=False)
        found = look(window, known)
        ours += int(found.distance >= limits.drift_distance and found.p_value < alpha)
        scipy += int(stats.ks_2samp(held_out, window, method="asymp").pvalue < alpha)
    whole = float(stats.ks_2samp(held_out, seen).statistic)
    return Detection(
        change, answers, whole, Share.count(ours, windows), Share.count(scipy, windows)
    )


@dataclass(frozen=True, slots=True)
class Days:
    """Days of devices without a drift, at a stated rate of false alarms a day.

    Attributes:
        certain: days with a look that is certain enough. alarms: those with an alert, for which
            the distance must be large too.
    """

    stated: float
    certain: Share
    alarms: Share


def quiet_days(pool: Floats, *, held_out: int, per_look: int, days: int, stated: float) -> Days:
    """Days with looks every quarter of an hour at the answers of the last hour, which overlap.

    Args:
        per_look: answers of a quarter of an hour.
    """
    random, limits = np.random.default_rng(2), AlertLimits()
    looks = int(limits.drift_looks_per_day)
    alpha = look_alpha(stated, looks, 1)
    certain = alarms = 0
    for _ in range(days):
        known = manifest_of(random.choice(pool, held_out, replace=False))
        quarters = np.array(
            [
                np.histogram(random.choice(pool, per_look, replace=False), EDGES)[0]
                for _ in range(looks + 3)
            ]
        )
        windows = [quarters[i : i + 4].sum(axis=0).tolist() for i in range(looks)]
        found = [find_drift(window, EDGES, known) for window in windows]
        sure = [one for one in found if one.p_value < alpha]
        certain += bool(sure)
        alarms += any(one.distance >= limits.drift_distance for one in sure)
    return Days(stated, Share.count(certain, days), Share.count(alarms, days))
