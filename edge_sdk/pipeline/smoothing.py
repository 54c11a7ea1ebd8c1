"""Smoothing of a stream's answers: a majority of labels, or a mean of probabilities.

Both look at the last `window` answers. The label that they give changes only once another label has
won `hold` times in a row.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from edge_sdk.answers.prediction import Prediction
from edge_sdk.checks import check_fields
from edge_sdk.errors import ConfigurationError
from edge_sdk.pipeline.words import read_word
from profiles.checks import one_of, whole

Array = NDArray[Any]
By = Literal["majority", "mean"]

BYS: Final = ("majority", "mean")
WINDOW_MAX: Final = 10_000
EXAMPLE: Final = "majority:5"


@dataclass(frozen=True, slots=True)
class Smoothing:
    """Settings of a smoothing.

    Attributes:
        by: `majority` of the labels, or `mean` of the probabilities.
        window: answers that it looks at.
        hold: how often in a row another label must win before it is taken; 1 takes it at once.
    """

    by: By
    window: int
    hold: int = 1

    def __post_init__(self) -> None:
        check_fields(self, by=one_of(BYS), window=whole(1, WINDOW_MAX), hold=whole(1, WINDOW_MAX))

    @classmethod
    def parse(cls, text: str) -> Smoothing:
        """Read `majority:WINDOW`, `mean:WINDOW`, or either with `?hold=N`.

        Raises: ConfigurationError saying which part is wrong.
        """
        word = read_word(text, ("hold",))
        if word.kind not in BYS or not (word.rest.isascii() and word.rest.isdecimal()):
            raise ConfigurationError(
                f"smooth: expected majority:N or mean:N for the last N answers, as in {EXAMPLE},"
                f" got {text}"
            )
        return cls(cast("By", word.kind), int(word.rest), word.whole("hold", 1))


@dataclass(frozen=True, slots=True)
class Smoothed:
    """Label of a stream after an answer."""

    label: int
    class_name: str


class Smoother:
    """Labels of one stream, smoothed. It begins anew when the classes change."""

    def __init__(self, settings: Smoothing) -> None:
        self._settings = settings
        self._answers: deque[Prediction] = deque(maxlen=settings.window)
        self._classes: Sequence[str] = ()
        self._label: int | None = None
        self._rival: int | None = None
        self._wins = 0

    def next(self, answer: Prediction, class_names: Sequence[str]) -> Smoothed:
        """The stream's label after this answer of a model with these classes."""
        if class_names != self._classes:
            self._answers.clear()
            self._classes, self._label, self._rival = class_names, None, None
        if not _is_of(answer, class_names):  # asked before an update changed the classes
            return Smoothed(answer.label, answer.class_name)
        self._answers.append(answer)
        if self._settings.by == "majority":
            winner = majority([each.label for each in self._answers])
        else:
            known = [each.probabilities for each in self._answers if _has_numbers(each)]
            winner = mean_label(known) if known else answer.label
        label = self._label = self._held_against(winner)
        return Smoothed(label, class_names[label])

    def _held_against(self, winner: int) -> int:
        """The label that holds, once `winner` has won this time."""
        if self._label is None or winner == self._label:
            self._rival = None
            return winner
        self._wins = self._wins + 1 if winner == self._rival else 1
        self._rival = winner
        return winner if self._wins >= self._settings.hold else self._label


def _is_of(answer: Prediction, class_names: Sequence[str]) -> bool:
    """Whether a model with these classes gave the answer."""
    return (
        len(answer.probabilities) == len(class_names)
        and class_names[answer.label] == answer.class_name
    )


def _has_numbers(answer: Prediction) -> bool:
    """Whether no probability is NaN, as one of logits beyond the dtype's range is."""
    return not np.isnan(answer.probabilities).any()


def majority(labels: Sequence[int]) -> int:
    """The most frequent label; of several, the one that came last.

    Args:
        labels: at least one, the newest last.
    """
    counts = Counter(labels)
    most = max(counts.values())
    return next(label for label in reversed(labels) if counts[label] == most)


def mean_label(probabilities: Sequence[Array]) -> int:
    """The label with the largest mean probability; of several, the smallest.

    Args:
        probabilities: at least one, each (classes,), without NaN.
    """
    return int(np.mean(np.stack(probabilities), axis=0).argmax())
