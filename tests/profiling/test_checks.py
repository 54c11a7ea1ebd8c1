"""Checks of values: the bounds, what is no number, and the words that they are told in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from profiles.checks import Check, flag, number, one_of, optional, share, text, whole


@pytest.mark.parametrize(
    ("check", "good", "bad", "words"),
    [
        (whole(1), [1, 10**400], [0, -1, 1.0, True, "1", None], "a whole number of at least 1"),
        (whole(1, 3), [1, 3], [0, 4, False], "a whole number from 1 to 3"),
        (number(), [0, -1.5, 1e308], [math.nan, math.inf, 10**400, True], "a finite number"),
        (number(above=0), [1e-9, 5], [0, -1, math.inf], "a finite number above 0"),
        (number(least=0), [0, 0.0, 7], [-1e-9, math.nan], "a finite number of at least 0"),
        (number(least=0, below=1), [0, 0.99], [1, -0.1], "of at least 0 and below 1"),
        (number(above=0, most=1), [0.1, 1], [0, 1.1], "a finite number above 0 and at most 1"),
        (number(above=0, infinite=True), [1, math.inf], [math.nan, 0], "a number above 0"),
        (number(infinite=True), [-math.inf, 3], [math.nan, True], "a number"),
        (share, [0, 1, 0.5], [-0.1, 1.1, True], "a finite number from 0 to 1"),
        (flag, [True, False], [0, 1, None, "true"], "true or false"),
        (one_of(("a", "b")), ["a", "b"], ["c", None, ["a"]], "one of a, b"),
        (text(3), ["abc", " a"], ["", "  ", "abcd", 3], "a text of 1 to 3 characters"),
        (optional(whole(1)), [None, 2], [0, 1.5], "a whole number of at least 1"),
    ],
)
def test_a_check_accepts_what_its_words_say(
    check: Check, good: list[Any], bad: list[Any], words: str
) -> None:
    assert words in check.expected
    assert [value for value in good if not check.accepts(value)] == []
    assert [value for value in bad if check.accepts(value)] == []


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), np.int64(1)])
def test_numpy_scalars_are_numbers(value: object) -> None:
    assert number(least=0, most=1).accepts(value)
    assert not number(least=2).accepts(value)


def test_numpy_scalars_are_whole_only_without_a_fraction() -> None:
    assert whole(1, 4).accepts(np.int64(2))
    assert not whole(1, 4).accepts(np.float32(2.0))
    assert not whole(0, 1).accepts(np.bool_(True))
    assert not number().accepts(np.float32("nan"))
    assert not number().accepts(np.float32("inf"))
