"""Windows of rows: against numpy's own sliding windows, and worked out by hand at holes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view

from edge_sdk.errors import ConfigurationError, InputError
from edge_sdk.pipeline.windows import Columns, WindowCutter, WindowForm
from edge_sdk.pipeline.words import read_word


@given(
    rows=st.integers(0, 40),
    channels=st.integers(1, 3),
    window=st.integers(1, 9),
    step=st.integers(1, 12),
)
def test_windows_are_those_of_numpy(rows: int, channels: int, window: int, step: int) -> None:
    values = np.random.default_rng(rows).normal(size=(rows, channels)).astype(np.float32)
    cutter = WindowCutter(channels, WindowForm(window, step))
    found = [cut for row in values.tolist() if (cut := cutter.push(row)) is not None]
    expected = list(sliding_window_view(values, window, axis=0)[::step]) if rows >= window else []
    assert len(found) == len(expected)
    for cut, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(cut, other)


def test_a_window_keeps_its_values_when_more_rows_come() -> None:
    cutter = WindowCutter(1, WindowForm(2, 1))
    windows = [cut for value in range(5) if (cut := cutter.push([value])) is not None]
    assert [cut[0].tolist() for cut in windows] == [[0, 1], [1, 2], [2, 3], [3, 4]]


def test_step_is_half_a_window_by_default() -> None:
    assert [WindowForm(window).stride for window in (128, 5, 1)] == [64, 2, 1]


def test_no_window_spans_a_hole_and_the_lost_ones_are_counted() -> None:
    cutter = WindowCutter(1, WindowForm(4, 2))
    first = [cutter.push([value]) is not None for value in range(5)]
    assert first == [False, False, False, True, False]
    # rows 2, 3 and 4 are held: windows began at row 2 and at row 4
    assert cutter.break_off() == 2
    after = [cutter.push([value]) for value in range(6, 10)]
    assert [cut is None for cut in after] == [True, True, True, False]
    assert after[-1] is not None
    assert after[-1][0].tolist() == [6, 7, 8, 9]
    assert cutter.break_off() == 1
    assert cutter.break_off() == 0


@pytest.mark.parametrize(("window", "step"), [(0, None), (3, 0)])
def test_form_is_checked(window: int, step: int | None) -> None:
    with pytest.raises(ConfigurationError, match="expected a whole number of at least 1"):
        WindowForm(window, step)


def test_columns_by_name_and_by_number() -> None:
    named = Columns(["time", "ax", "ay", "what"], ("ay", "ax"), ("what",))
    assert named.header
    assert named.names == ("ay", "ax")
    assert named.row(["0", "1.5", "-2", "walk"]) == [-2.0, 1.5]
    assert named.text(["0", "1.5", "-2", " walk "], "what") == "walk"
    bare = Columns(["1.5", "-2", "walk"], (), ("3",))
    assert not bare.header
    assert bare.names == ("1", "2")
    assert bare.row(["1.5", "-2", "walk"]) == [1.5, -2.0]


@pytest.mark.parametrize("cells", [["1", ""], ["1"], ["1", "n/a"], ["1", "nan"], ["1", "1e300"]])
def test_a_hole_names_its_column(cells: list[str]) -> None:
    with pytest.raises(InputError, match="column ay: expected a finite number, got"):
        Columns(["ax", "ay"]).row(cells)


def test_a_column_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ConfigurationError, match="column az: expected one of ax, ay, or a number"):
        Columns(["ax", "ay"], ("az",))
    with pytest.raises(ConfigurationError, match="expected sensor columns among ax, apart from ax"):
        Columns(["ax"], (), ("ax",))


def test_word_in_its_parts() -> None:
    word = read_word("csv:a/b.csv?columns=ax,ay&window=8", ("columns", "window", "step"))
    assert (word.kind, word.rest) == ("csv", "a/b.csv")
    assert word.names("columns") == ("ax", "ay")
    assert (word.whole("window"), word.whole("step", 4)) == (8, 4)
    assert read_word("digits", ()).kind == "digits"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("csv:a?window", "expected key=value"),
        ("csv:a?window=", "expected key=value"),
        ("csv:a?windows=3", "expected options window, step, got windows"),
        ("csv:a?window=3&window=4", "window is given twice"),
    ],
)
def test_word_that_is_not_sound(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_word(text, ("window", "step"))


def test_options_that_are_not_sound() -> None:
    word = read_word("csv:a?window=x&columns=a,,b", ("window", "columns"))
    with pytest.raises(ConfigurationError, match=r"window: expected a whole number .* got x"):
        word.whole("window")
    with pytest.raises(ConfigurationError, match=r"step: expected a whole number .* got none"):
        word.whole("step")
    with pytest.raises(ConfigurationError, match="columns: expected different names"):
        word.names("columns")
