"""Whether a value read from TOML is what an annotation says, before anything is done with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from edge_sdk.errors import ConfigurationError


def check_kinds(values: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """See that each value is of the kind annotated under its name.

    Lists are taken for tuples and words for paths, as TOML writes them. Of what lies inside a table
    nothing is checked, nor what has no annotation.

    Args:
        kinds: as `typing.get_type_hints` gives them.
    Raises: ConfigurationError naming the value and what was expected.
    """
    for name, value in values.items():
        if name in kinds and not _is_of(value, kinds[name]):
            raise ConfigurationError(f"{name}: expected {_in_words(kinds[name])}, got {value!r}")


def _is_of(value: object, kind: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_is_of(value, each) for each in inner)
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if origin is tuple:
        return isinstance(value, list | tuple) and _is_list_of(value, inner)
    if isinstance(value, bool):  # a number to Python, and to nobody who writes a recipe
        return kind in (bool, Any)
    taken: dict[Any, Any] = {float: (int, float), Path: (str, Path), Any: object}
    return isinstance(value, taken.get(kind, origin or kind))


def _is_list_of(values: Sequence[object], inner: tuple[Any, ...]) -> bool:
    each = inner[:1] * len(values) if inner[-1] is ... else inner
    return len(values) == len(each) and all(map(_is_of, values, each))


def _in_words(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):  # None is what leaving it out means, and TOML has no word for
        return " or ".join(_in_words(each) for each in inner if each is not NoneType)
    if origin is Literal:
        return f"one of {', '.join(inner)}"
    if origin is tuple:
        counted = "a list" if inner[-1] is ... else f"a list of {len(inner)}"
        return f"{counted}, each {_in_words(inner[0])}"
    words = {bool: "true or false", int: "a whole number", float: "a number"}
    return words.get(kind, "a table" if origin is Mapping else "text")
