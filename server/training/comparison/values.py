"""Values of recipes under dotted names, as `train.learning_rate`: set, listed and compared."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edge_sdk.errors import ConfigurationError
from server.training.recipe.recipe import Recipe, read_recipe


def with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The recipe with other values, each under its dotted name.

    Raises: ConfigurationError naming what is wrong, as for a recipe's file.
    """
    table = recipe.to_dict()
    for name, value in values.items():
        inner = table
        *tables, last = name.split(".")
        for word in tables:
            inner = inner.setdefault(word, {})
            if not isinstance(inner, dict):
                raise ConfigurationError(f"{name}: a recipe has no table {word}")
        inner[last] = value
    return read_recipe(table)


def read_values(option: str, text: str) -> tuple[str, list[Any]]:
    """Read `NAME=VALUE` or `NAME=VALUE,VALUE`: the values as TOML has them, words without quotes.

    Args:
        option: the option of the command line, for the message.
    Raises: ConfigurationError.
    """
    name, equals, values = text.partition("=")
    if not name or not equals or not values:
        raise ConfigurationError(
            f"{option} {text}: expected NAME=VALUE, as in train.learning_rate=0.1"
        )
    try:
        return name, _toml(f"[{values}]")
    except tomllib.TOMLDecodeError:
        return name, [_value(each) for each in values.split(",")]


def differing(recipes: Mapping[str, Recipe]) -> dict[str, dict[str, Any]]:
    """Values that recipes do not share, beside their methods: by dotted name, each recipe's.

    Differences of this kind may explain those of the figures. Seeds are left out, and the folders
    of modules.
    """
    flat = {name: dict(_flat(recipe)) for name, recipe in recipes.items()}
    keys = {key: None for values in flat.values() for key in values}
    found = {key: {name: values.get(key) for name, values in flat.items()} for key in keys}
    return {
        key: values
        for key, values in found.items()
        if any(value != next(iter(values.values())) for value in values.values())
    }


def _flat(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    for table, values in recipe.to_dict().items():
        if table in {"data", "train", "round", "evaluate", "privacy"}:
            for key, value in values.items():
                if not key.endswith("_folder"):
                    yield f"{table}.{key}", value


def _toml(text: str) -> Any:
    return tomllib.loads(f"value = {text}")["value"]


def _value(text: str) -> Any:
    try:
        return _toml(text)
    except tomllib.TOMLDecodeError:
        return text


def combinations(grid: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every choice of one value for each name, the last name's values first."""
    if not grid:
        yield {}
        return
    *names, last = grid
    for others in combinations({name: grid[name] for name in names}):
        for value in grid[last]:
            yield {**others, last: value}
