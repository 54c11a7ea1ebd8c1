"""Records as tables: what is written is what is read, and what cannot be is refused by its key."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from edge_sdk.checks import check_fields
from edge_sdk.errors import ConfigurationError
from edge_sdk.records import added, describe_type, inline, read_record, table_of
from profiles.checks import number, whole


@dataclass(frozen=True)
class Rates:
    first: float
    second: float = 0.5

    def __post_init__(self) -> None:
        check_fields(self, first=number(above=0))


@dataclass(frozen=True)
class Codec:
    name: Literal["fp32", "int8"] = "fp32"
    steps: int = 3


@dataclass(frozen=True)
class Run:
    rounds: int
    rates: Rates = field(metadata=inline())
    codec: Codec = field(default_factory=Codec, metadata=inline("codec_"))
    depths: tuple[int, ...] | None = None
    folder: Path | None = None
    extra: Codec | None = None

    def __post_init__(self) -> None:
        check_fields(self, rounds=whole(1))


RUN = Run(2, Rates(0.1), Codec("int8"), (1, 2), Path("data"), Codec(steps=7))
TABLE: dict[str, Any] = {
    "rounds": 2,
    "first": 0.1,
    "second": 0.5,
    "codec_name": "int8",
    "codec_steps": 3,
    "depths": (1, 2),
    "folder": Path("data"),
    "extra": {"name": "fp32", "steps": 7},
}


def test_an_inlined_record_s_fields_are_keys_of_the_outer_table() -> None:
    assert table_of(RUN) == TABLE
    assert list(table_of(RUN)) == list(TABLE)


def test_a_table_is_read_into_the_record_that_it_was_written_from() -> None:
    assert read_record(Run, TABLE, "run") == RUN
    as_json = TABLE | {"depths": [1, 2], "folder": "data"}
    assert read_record(Run, as_json, "run") == RUN


def test_a_field_that_was_added_is_in_the_table_only_when_it_says_something_new() -> None:
    @dataclass(frozen=True)
    class Older:
        rounds: int

    @dataclass(frozen=True)
    class Newer:
        rounds: int
        precision: str = field(default="fp32", metadata=added())

    same, other = Newer(2), Newer(2, "bf16")
    assert read_record(Older, table_of(same), "run") == Older(2)
    assert table_of(other) == {"rounds": 2, "precision": "bf16"}
    for record in (same, other):
        assert read_record(Newer, table_of(record), "run") == record
    with pytest.raises(ConfigurationError, match="unknown precision; update this device"):
        read_record(Older, table_of(other), "run", unknown="update this device")


def test_what_a_table_leaves_out_is_the_default() -> None:
    assert read_record(Run, {"rounds": 1, "first": 1}, "run") == Run(1, Rates(1))
    left_out = {"rounds": 1, "first": 1, "extra": None, "depths": None}
    assert read_record(Run, left_out, "run") == Run(1, Rates(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounds": 0}, "run: rounds: expected a whole number of at least 1, got 0"),
        ({"rounds": True}, "run: rounds: expected a whole number, got True"),
        ({"first": 0.0}, "run: first: expected a finite number above 0, got 0.0"),
        ({"first": "fast"}, "run: first: expected a number, got 'fast'"),
        ({"codec_name": "zip"}, "run: codec_name: expected one of fp32, int8, got 'zip'"),
        ({"depths": [1, "x"]}, "run: depths: expected a list, each a whole number"),
        ({"folder": 3}, "run: folder: expected text, got 3"),
        ({"extra": 3}, "extra: expected a table, got 3"),
        ({"extra": {"steps": "x"}}, "extra: steps: expected a whole number, got 'x'"),
        ({"extra": {"speed": 1}}, "extra: unknown speed; known are name, steps"),
        ({"speed": 1}, "run: unknown speed; known are codec_name, codec_steps"),
        ({"rates": {"first": 1}}, "run: unknown rates"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_record(Run, TABLE | change, "run")
    assert str(refused.value).startswith(message)


def test_keys_that_are_missing_are_named_and_advice_may_be_given() -> None:
    with pytest.raises(ConfigurationError, match="run: expected also rounds, first"):
        read_record(Run, {}, "run")
    with pytest.raises(ConfigurationError, match="run: expected a table, got 3"):
        read_record(Run, 3, "run")
    table = TABLE | {"extra": {"speed": 1}}
    with pytest.raises(ConfigurationError, match="extra: unknown speed; update this device"):
        read_record(Run, table, "run", unknown="update this device")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int, "a whole number"),
        (float | None, "a number"),
        (bool, "true or false"),
        (tuple[int, ...], "a list, each a whole number"),
        (tuple[float, float], "a list of 2, each a number"),
        (Literal["a", "b"], "one of a, b"),
        (Path, "text"),
    ],
)
def test_types_are_told_in_words(kind: Any, words: str) -> None:
    assert describe_type(kind) == words
