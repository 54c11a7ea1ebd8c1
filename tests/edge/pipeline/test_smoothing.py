"""Smoothing of answers, against sequences worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from edge_sdk.answers.prediction import Prediction
from edge_sdk.errors import ConfigurationError
from edge_sdk.pipeline.smoothing import Smoother, Smoothing, majority, mean_label

NAMES = ("cat", "dog", "owl")


def answer(label: int, probabilities: tuple[float, ...] = (0, 0, 0)) -> Prediction:
    return Prediction(label, NAMES[label], np.array(probabilities), 0.0, 0.0, "device", 1.0)


def labels(settings: Smoothing, raw: list[int]) -> list[int]:
    smoother = Smoother(settings)
    return [smoother.next(answer(label), NAMES).label for label in raw]


def test_majority_is_the_most_frequent_label() -> None:
    assert majority([0, 1, 1]) == 1
    assert majority([2]) == 2


def test_a_tie_goes_to_the_label_that_came_last() -> None:
    assert majority([0, 1]) == 1
    assert majority([1, 0, 0, 1, 2]) == 1  # 0 and 1 twice; 1 is newer


def test_majority_over_a_window() -> None:
    # windows: 0 | 01 | 011 | 111 | 110 | 100 | 001 (newest last)
    raw = [0, 1, 1, 1, 0, 0, 1]
    assert labels(Smoothing("majority", 3), raw) == [0, 1, 1, 1, 1, 0, 0]


def test_a_window_of_one_changes_nothing() -> None:
    raw = [2, 0, 1, 1, 2]
    assert labels(Smoothing("majority", 1), raw) == raw


def test_a_held_label_changes_after_as_many_wins_in_a_row() -> None:
    # a rival must win twice in a row; 2 interrupts 1 at the fourth answer
    raw = [0, 1, 0, 1, 2, 1, 1, 0]
    assert labels(Smoothing("majority", 1, hold=2), raw) == [0, 0, 0, 0, 0, 0, 1, 1]


def test_mean_of_probabilities_takes_a_label_that_no_answer_had() -> None:
    # sums: 0.5 + 0.0, 0.0 + 0.6, 0.5 + 0.4 -> the third class wins with a mean of 0.45
    rows = [np.array([0.5, 0.0, 0.5]), np.array([0.0, 0.6, 0.4])]
    assert mean_label(rows) == 2
    smoother = Smoother(Smoothing("mean", 2))
    smoother.next(answer(0, (0.5, 0.0, 0.5)), NAMES)
    last = smoother.next(answer(1, (0.0, 0.6, 0.4)), NAMES)
    assert (last.label, last.class_name) == (2, "owl")


def test_an_answer_whose_probabilities_are_nan_is_left_out_of_the_mean() -> None:
    smoother = Smoother(Smoothing("mean", 3))
    nan = (float("nan"),) * 3
    assert smoother.next(answer(1, nan), NAMES).label == 1  # there is nothing to take a mean of
    sure = [smoother.next(answer(2, (0, 0, 1)), NAMES).label for _ in range(2)]
    torn = smoother.next(answer(0, nan), NAMES).label
    after = [smoother.next(answer(2, (0, 0, 1)), NAMES).label for _ in range(3)]
    assert [*sure, torn, *after] == [2] * 6


def test_equal_means_go_to_the_smallest_label() -> None:
    assert mean_label([np.array([0.2, 0.4, 0.4])]) == 1


def test_other_classes_begin_a_new_window() -> None:
    smoother = Smoother(Smoothing("majority", 5))
    for _ in range(3):
        smoother.next(answer(0), NAMES)
    off = Prediction(1, "off", np.array([0.0, 1.0]), 0.0, 0.0, "device", 1.0)
    fresh = smoother.next(off, ("on", "off"))
    assert (fresh.label, fresh.class_name) == (1, "off")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("majority:5", Smoothing("majority", 5)),
        ("mean:3?hold=2", Smoothing("mean", 3, 2)),
    ],
)
def test_words_of_a_smoothing(text: str, expected: Smoothing) -> None:
    assert Smoothing.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("median:5", "expected majority:N or mean:N"),
        ("majority", "as in majority:5, got majority"),
        ("majority:x", "got majority:x"),
        ("majority:0", "window: expected a whole number from 1 to 10000, got 0"),
        ("mean:5?hold=0", "hold: expected a whole number of at least 1, got 0"),
        ("mean:5?keep=2", "expected options hold, got keep"),
    ],
)
def test_a_wrong_smoothing_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Smoothing.parse(text)
    assert message in str(refused.value)


def test_an_answer_from_before_an_update_of_the_classes_is_not_smoothed() -> None:
    smoother = Smoother(Smoothing("mean", 5))
    smoother.next(answer(0, (0.9, 0.1)), NAMES[:2])
    late = smoother.next(answer(2, (0.0, 0.1, 0.9)), NAMES[:2])  # of a model with three classes
    assert (late.label, late.class_name) == (2, "owl")
    assert smoother.next(answer(0, (0.6, 0.4)), NAMES[:2]).label == 0
