"""Measures of a run: accuracy, fairness over clients, missed malignant samples, modelled latency.

docs/methods/common.md. Accuracies are
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

# HARMONY, Eq. 12: BW and P_S as the paper states them. It does not state P_C; 20 fits its printed
# figure for SplitFed.
BANDWIDTH: Final = 1.0
SERVER_POWER: Final = 100.0
CLIENT_POWER: Final = 20.0


@dataclass(frozen=True, slots=True)
class Score:
    """Number of right answers among samples; scores can be added.

    Attributes:
        correct: not whole where some samples weigh more than others.
    """

    correct: float
    samples: int

    @property
    def accuracy(self) -> float:
        """Share of right answers; NaN without samples."""
        return self.correct / self.samples if self.samples else math.nan

    def __add__(self, other: Score) -> Score:
        """Score of both sets of samples together."""
        return Score(self.correct + other.correct, self.samples + other.samples)


def score(predictions: Labels, labels: Labels) -> Score:
    """Count the right answers.

    Args:
        predictions, labels: (n,).
    Raises: ConfigurationError if their lengths differ.
    """
    _same_length("score", predictions, labels)
    return Score(int(np.count_nonzero(predictions == labels)), len(labels))


def benign_rate(predictions: Labels, labels: Labels, malignant: Collection[int]) -> float:
    """BMR: the share of malignant samples that are labelled benign.    BESplit, 5.1

    The formula is ours: the paper describes the rate only. NaN where no sample is malignant.

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
    """Accuracies of a run over its clients, all with the same weight.

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
    """Mean accuracies over clients, and their spread.

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


def jain(accuracies: Sequence[float]) -> float:
    """JFI = 100 * (sum s)^2 / (n * sum s^2): 100 where all are equal, 100 / n where one has all.

    SplitLPF, 4.2 (Jain's fairness index). NaN where no client has a right answer.
    """
    s = np.asarray(accuracies, np.float64)
    return float(100 * s.sum() ** 2 / (len(s) * (s @ s))) if s.any() else math.nan


def std(accuracies: Sequence[float]) -> float:
    """Population standard deviation of the clients' accuracies. SplitLPF, 4.2."""
    return float(np.std(accuracies)) if len(accuracies) else math.nan


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

    summed over clients, because depths and rates differ between them.
    """
    return math.fsum(
        load.samples
        * (
            (load.front + load.head) / load.power
            + load.offload_rate * (load.cut_channels / bandwidth + load.suffix / server_power)
        )
        for load in loads
    )


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
