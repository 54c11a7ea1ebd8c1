"""Thresholds of clients' gated pairs, chosen in three ways that reports name.

    held_out    each client's own, best on samples of its own that nobody trained on, and where
                these leave several, on those of all clients together: the headline
    fleet       one for all clients, best on the held-out samples of all of them together
    oracle      each client's own, best on the very test samples of the figure: the papers' choice,
                and an upper bound of what a gate can reach

Only the oracle reads labels of the test part (docs/decisions/0028-which-threshold.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from edge_sdk.gate.gate import largest_uncertainty
from edge_sdk.manifest import GatePolicy

Right = NDArray[np.bool_]
Choice = Literal["held_out", "fleet", "oracle"]

CHOICES: Final[tuple[Choice, ...]] = get_args(Choice)
# Entropy in nats, for 10 classes. For other numbers of classes and other gates the same shares of
# the largest uncertainty.
THRESHOLDS: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.2, 1.6, 2.3)


@dataclass(frozen=True, slots=True)
class PairAnswers:
    """Answers of a client's exit head and of the server to the same n samples.

    Attributes:
        uncertainty: (n,) float64, of the exit head, in the gate's unit.
        exit_right, server_right: (n,) whether the exit head and the server are right.
        weights: (n,) of the samples, with mean 1; None where they count alike.
    """

    uncertainty: NDArray[np.float64]
    exit_right: Right
    server_right: Right
    weights: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.uncertainty)

    def exits(self, threshold: float) -> Right:
        """(n,) whether a sample is answered by the exit head."""
        below: Right = self.uncertainty < threshold
        return below

    def right(self, threshold: float) -> Right:
        """(n,) whether the pair's answer is right."""
        right: Right = np.where(self.exits(threshold), self.exit_right, self.server_right)
        return right

    def count(self, threshold: float) -> float:
        """Number of right answers, each by its weight."""
        return self._weighted(self.right(threshold))

    def exit_rate(self, threshold: float) -> float:
        """Share of the samples that the exit head answers; NaN without samples."""
        return self._weighted(self.exits(threshold)) / len(self) if len(self) else math.nan

    def _weighted(self, which: Right) -> float:
        return float(which.sum() if self.weights is None else which @ self.weights)


def threshold_grid(policy: GatePolicy, classes: int) -> list[float]:
    """THRESHOLDS in the unit of a gate, ascending.

    Args:
        policy: the gate as text (edge_sdk.gate_form).
    """
    largest = largest_uncertainty(policy, classes)
    return [point * (largest / math.log(10)) for point in THRESHOLDS]


def right_answers(grid: Sequence[float], answers: PairAnswers) -> list[float]:
    """Number of right answers by threshold."""
    return [answers.count(point) for point in grid]


def best_threshold(
    grid: Sequence[float], right: Sequence[float], elsewhere: Sequence[float] | None = None
) -> float:
    """The threshold with most right answers.

    Of equals it is the one with most right answers elsewhere, and of equals again the loosest,
    which asks the server least.

    Args:
        grid: at least one threshold, ascending.
        right: of each (`right_answers`). elsewhere: the same on other samples; None for none.
    """
    return max(zip(right, elsewhere or [0.0] * len(grid), grid, strict=True))[2]


def chosen_thresholds(
    grid: Sequence[float],
    held_out: Mapping[str, Sequence[float]],
    tested: Mapping[str, Sequence[float]],
) -> dict[Choice, dict[str, float]]:
    """Each client's threshold by each choice, in the order of CHOICES.

    A client without held-out samples takes the fleet's threshold. Without any in the whole fleet
    the oracle alone is left.

    Args:
        grid: thresholds to choose from, ascending.
        held_out: right answers of a client to its held-out samples (`right_answers`), of the
            clients that have any.
        tested: the same on the test samples of the figure, of all clients.
    """
    oracle = {name: best_threshold(grid, right) for name, right in tested.items()}
    if not held_out:
        return {"oracle": oracle}
    of_all = [math.fsum(counts) for counts in zip(*held_out.values(), strict=True)]
    fleet = best_threshold(grid, of_all)
    own = {
        name: best_threshold(grid, held_out[name], of_all) if name in held_out else fleet
        for name in tested
    }
    return {"held_out": own, "fleet": dict.fromkeys(tested, fleet), "oracle": oracle}
