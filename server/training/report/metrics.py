"""What a run is judged by: accuracy, fairness, cost to a target, modelled latency.

docs/methods.md, "Data and measures", "HARMONY" (Eq. 12) and "SplitLPF" (fairness). Accuracies are
shares of 1. A figure that is not defined (no samples, no spread) is NaN, which JSON writes as null.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edge_sdk.errors import ConfigurationError

Labels = NDArray[np.int64]

# HARMONY, Eq. 12: BW and P_S as stated; P_C is not, and 20 fits the printed SplitFed figure
BANDWIDTH: Final = 1.0
SERVER_POWER: Final = 100.0
CLIENT_POWER: Final = 20.0


@dataclass(frozen=True, slots=True)
class Score:
    """How many of how many answers were right; scores add up."""

    correct: int
    samples: int

    @property
    def accuracy(self) -> float:
        """Share that is right; NaN without samples."""
        return self.correct / self.samples if self.samples else math.nan

    def __add__(self, other: Score) -> Score:
        """Both together."""
        return Score(self.correct + other.correct, self.samples + other.samples)


def score(predictions: Labels, labels: Labels) -> Score:
    """Count the right answers.

    Args:
        predictions, labels: (n,).
    Raises: ConfigurationError if they are not as many.
    """
    _same_length("score", predictions, labels)
    return Score(int(np.count_nonzero(predictions == labels)), len(labels))


def class_accuracy(predictions: Labels, labels: Labels, classes: int) -> NDArray[np.float64]:
    """Accuracy on the samples of each class: (classes,), NaN for a class without samples."""
    _same_length("class accuracy", predictions, labels)
    totals = np.bincount(labels, minlength=classes)
    right = np.bincount(labels[predictions == labels], minlength=classes)
    shares = np.full(len(totals), np.nan)
    np.divide(right, totals, out=shares, where=totals > 0)
    return shares


def benign_rate(predictions: Labels, labels: Labels, malignant: Collection[int]) -> float:
    """BMR: the share of malignant samples that are called benign.    BESplit, 5.1

    Ours: the paper describes the rate and gives no formula. NaN where no sample is malignant.

    Args:
        predictions, labels: (n,).
        malignant: the classes that must not be missed; all others are benign.
    """
    _same_length("BMR", predictions, labels)
    classes = np.array(sorted(malignant), np.int64)
    at_stake = np.isin(labels, classes)
    missed = at_stake & ~np.isin(predictions, classes)
    return float(missed.sum() / at_stake.sum()) if at_stake.any() else math.nan


@dataclass(frozen=True, slots=True)
class ClientSummary:
    """A run's accuracies over its clients; every client counts the same.

    Attributes:
        accuracy: mean over clients on all their test samples.
        accuracy_id, accuracy_ood: on those in and out of their distributions.
        jain, std: of the clients' accuracies on all their test samples.
    """

    accuracy: float
    accuracy_id: float
    accuracy_ood: float
    jain: float
    std: float


def summarise_clients(inside: Sequence[Score], outside: Sequence[Score] = ()) -> ClientSummary:
    """Mean over clients, and how far they are apart.

    Args:
        inside: per client, on its ID test samples (all of them where nothing is OOD).
        outside: per client, on its OOD samples; none by default. Means leave out clients without
            samples.
    """
    if outside:
        _same_length("summary", inside, outside)
        both = [one + other for one, other in zip(inside, outside, strict=True)]
    else:
        both = list(inside)
    each = _accuracies(both)
    return ClientSummary(
        _mean(each), _mean(_accuracies(inside)), _mean(_accuracies(outside)), jain(each), std(each)
    )


def pearson(alone: Sequence[float], together: Sequence[float]) -> float:
    """PC = 100 * Cov / (sd * sd) of the clients' stand-alone and collaborative accuracy.

    SplitLPF, 4.2 (scaled Pearson correlation): 100 where who does well alone does well together.
    NaN where either side is the same for all.
    """
    _same_length("PC", alone, together)
    a, b = np.asarray(alone, np.float64), np.asarray(together, np.float64)
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return math.nan
    a, b = a - a.mean(), b - b.mean()
    return float(100 * (a @ b) / math.sqrt((a @ a) * (b @ b)))


def jain(accuracies: Sequence[float]) -> float:
    """JFI = 100 * (sum s)^2 / (n * sum s^2): 100 where all are equal, 100 / n where one has all.

    SplitLPF, 4.2 (Jain's fairness index). NaN without a client that gets anything right.
    """
    s = np.asarray(accuracies, np.float64)
    return float(100 * s.sum() ** 2 / (len(s) * (s @ s))) if s.any() else math.nan


def std(accuracies: Sequence[float]) -> float:
    """Population standard deviation of the clients' accuracies. SplitLPF, 4.2."""
    return float(np.std(accuracies)) if len(accuracies) else math.nan


@dataclass(frozen=True, slots=True)
class RoundPoint:
    """What one round cost and where it led; `accuracy` is None where it was not measured."""

    round: int
    accuracy: float | None
    seconds: float
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, slots=True)
class Reached:
    """What it took to reach a target."""

    rounds: int
    seconds: float
    bytes_up: int
    bytes_down: int

    @property
    def bytes_total(self) -> int:
        """Both ways."""
        return self.bytes_up + self.bytes_down


def cost_to(target: float, points: Iterable[RoundPoint]) -> Reached | None:
    """Rounds, seconds and bytes up to the first round that measured at least `target`.

    Returns: None where no round did.
    """
    seconds, up, down = 0.0, 0, 0
    for rounds, point in enumerate(points, start=1):
        seconds += point.seconds
        up += point.bytes_up
        down += point.bytes_down
        if point.accuracy is not None and point.accuracy >= target:
            return Reached(rounds, seconds, up, down)
    return None


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """One client in Eq. 12.

    Attributes:
        samples: its test samples.
        front, head: parameters of its prefix and exit head; 0 for a head it does not run.
        cut_channels: channels of the smashed data.
        suffix: parameters of the server's part from its cut.
        offload_rate: share of samples that go to the server; 1 without early exits.
        power: P_C.
    """

    samples: int
    front: int
    head: int
    cut_channels: int
    suffix: int
    offload_rate: float
    power: float = CLIENT_POWER


def modelled_latency(
    loads: Iterable[ClientLoad], *, bandwidth: float = BANDWIDTH, server_power: float = SERVER_POWER
) -> float:
    """Latency of all clients' test samples, in the paper's units (its tables print it / 10^8).

    Latency = |D| * ((|f| + |h|) / P_C + Pr(tx) * (dim_cut / BW + |S| / P_S))    HARMONY, Eq. 12

    summed over clients, whose depths and rates differ.
    """
    return math.fsum(
        load.samples
        * (
            (load.front + load.head) / load.power
            + load.offload_rate * (load.cut_channels / bandwidth + load.suffix / server_power)
        )
        for load in loads
    )


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean over seeds and the half width of its confidence interval."""

    mean: float
    half_width: float
    seeds: int

    def __str__(self) -> str:
        """As papers print it."""
        return f"{self.mean:.4g} ± {self.half_width:.2g}"


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean and t interval of a few seeds' figures: mean ± t * s / sqrt(n), n - 1 degrees.

    With one value the half width is NaN: one run says nothing about the spread.
    """
    if not values:
        raise ConfigurationError("interval: expected at least one value, got none")
    if len(values) == 1:
        return Interval(values[0], math.nan, 1)
    t = student_t(0.5 + confidence / 2, len(values) - 1)
    half_width = t * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(statistics.fmean(values), half_width, len(values))


def student_t(probability: float, degrees: int) -> float:
    """The value below which Student's t falls with that probability, in [0.5, 1).

    By bisection of the distribution function, which has a closed form for whole degrees of
    freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4): a server needs no scipy for it.
    """
    if not 0.5 <= probability < 1 or degrees < 1:
        raise ConfigurationError(
            f"student t: expected a probability in [0.5, 1) and at least 1 degree of freedom,"
            f" got {probability} and {degrees}"
        )
    inside = 2 * probability - 1  # A(t) = P(|T| < t)
    low, high = 0.0, math.pi / 2  # t = sqrt(degrees) * tan(angle)
    while (middle := (low + high) / 2) not in (low, high):
        if _t_inside(middle, degrees) < inside:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(high)


def _t_inside(angle: float, degrees: int) -> float:
    odd = degrees % 2
    cosine, term, total = math.cos(angle), 1.0, 0.0
    if odd:
        term = cosine
    for power in range(odd, degrees - 1, 2):  # the next factor is (power + 1) / (power + 2)
        total += term
        term *= (power + 1) / (power + 2) * cosine**2
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def _accuracies(scores: Sequence[Score]) -> list[float]:
    return [entry.accuracy for entry in scores if entry.samples]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _same_length(
    owner: str, left: Sequence[object] | Labels, right: Sequence[object] | Labels
) -> None:
    if len(left) != len(right):
        raise ConfigurationError(
            f"{owner}: expected as many of both, got {len(left)}, {len(right)}"
        )
