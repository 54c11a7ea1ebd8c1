"""Scores of a simulation's clients on their test samples, by each choice of a threshold."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from server.training.report.metrics import ClientSummary, Score, summarise_clients
from server.training.report.thresholds import CHOICES, Choice

# The samples that each choice reads, as `threshold_chosen_on` names them.
CHOSEN_ON: Final[Mapping[Choice, str]] = {
    "held_out": "held_out",
    "fleet": "held_out",
    "oracle": "test",
}


@dataclass(frozen=True, slots=True)
class GatedScore:
    """A client's gated pair with one threshold.

    Attributes:
        threshold: in the gate's unit, nats for entropy.
        exit_rate: share of all its test samples that the exit head answers.
        inside, outside: on test samples in and out of its distribution.
    """

    threshold: float
    exit_rate: float
    inside: Score
    outside: Score

    def to_dict(self) -> dict[str, Any]:
        """The score as a report has it."""
        return {
            "threshold": self.threshold,
            "exit_rate": self.exit_rate,
            "accuracy_id": self.inside.accuracy,
            "accuracy_ood": self.outside.accuracy,
        }


@dataclass(frozen=True, slots=True)
class ClientScore:
    """One client on its test samples.

    Attributes:
        samples: number of its training samples.
        inside, outside: on test samples in and out of its distribution; with a gate, by the first
            choice there is in `gated`.
        gated: by choice of the threshold, in the order of
            server.training.report.thresholds.CHOICES; empty without a gate.
    """

    client: str
    depth: int
    samples: int
    inside: Score
    outside: Score
    gated: Mapping[Choice, GatedScore] = field(default_factory=dict)

    @property
    def accuracy(self) -> float:
        """Share of right answers on all its test samples; NaN without any."""
        return (self.inside + self.outside).accuracy

    @property
    def choice(self) -> Choice | None:
        """The choice that its own figures are by; None without a gate."""
        return next(iter(self.gated), None)

    @property
    def threshold(self) -> float | None:
        """The threshold of the client's own figures; None without a gate."""
        return None if self.choice is None else self.gated[self.choice].threshold

    @property
    def exit_rate(self) -> float | None:
        """Share of its test samples that the exit head answers; None without a gate."""
        return None if self.choice is None else self.gated[self.choice].exit_rate

    def by(self, choice: Choice) -> ClientScore:
        """The same client with that threshold alone."""
        found = self.gated[choice]
        return replace(self, inside=found.inside, outside=found.outside, gated={choice: found})

    def to_dict(self) -> dict[str, Any]:
        """The score as a report has it."""
        return {
            "client": self.client,
            "depth": self.depth,
            "samples": self.samples,
            "tested_id": self.inside.samples,
            "tested_ood": self.outside.samples,
            "accuracy_id": self.inside.accuracy,
            "accuracy_ood": self.outside.accuracy,
            "threshold": self.threshold,
            "exit_rate": self.exit_rate,
            "by_threshold": {name: found.to_dict() for name, found in self.gated.items()} or None,
        }


def gated_client(
    client: str, depth: int, samples: int, gated: Mapping[Choice, GatedScore]
) -> ClientScore:
    """The score of a client with a gate; its own figures are of the first choice."""
    first = next(iter(gated.values()))
    return ClientScore(client, depth, samples, first.inside, first.outside, gated)


def by_choice(scores: Sequence[ClientScore]) -> dict[Choice, list[ClientScore]]:
    """The clients' scores by each choice of a threshold; empty where any has no gate."""
    return {
        choice: [score.by(choice) for score in scores]
        for choice in CHOICES
        if scores and all(choice in score.gated for score in scores)
    }


def summary_of(scores: Sequence[ClientScore]) -> ClientSummary:
    """Means over the clients, and their spread."""
    return summarise_clients([s.inside for s in scores], [s.outside for s in scores])


def threshold_figures(scores: Sequence[ClientScore]) -> dict[str, Any] | None:
    """Figures of gated pairs by each choice of the threshold, as a report has them.

    Returns: None without a gate.
    """
    return {choice: _figures(choice, each) for choice, each in by_choice(scores).items()} or None


def _figures(choice: Choice, scores: Sequence[ClientScore]) -> dict[str, Any]:
    summary = summary_of(scores)
    thresholds = {score.threshold for score in scores}
    rates = [score.exit_rate for score in scores if score.exit_rate is not None]
    return {
        "chosen_on": CHOSEN_ON[choice],
        # one for all clients, or each client's own
        "threshold": thresholds.pop() if len(thresholds) == 1 else None,
        "accuracy_id": summary.accuracy_id,
        "accuracy_ood": summary.accuracy_ood,
        "accuracy_clients": summary.accuracy,
        "jain": summary.jain,
        "std": summary.std,
        "exit_rate": statistics.fmean(rates) if rates else math.nan,
    }
