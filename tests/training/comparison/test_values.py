"""Values under dotted names: set, read from options, compared."""

from __future__ import annotations

from typing import Any

import pytest

from edge_sdk.errors import ConfigurationError
from server.training.comparison.values import combinations, differing, read_values, with_values
from server.training.recipe.recipe import Recipe, read_recipe


def recipe_of(method: str = "fedavg", **train: Any) -> Recipe:
    return read_recipe(
        {
            "method": method,
            "data": {"name": "digits", "clients": 2},
            "train": {"backbone": "tiny", "rounds": 2, "learning_rate": 0.1, "batch": 16, **train},
        }
    )


def test_a_value_is_set_and_checked_as_in_a_file() -> None:
    recipe = recipe_of()
    assert with_values(recipe, {}) == recipe
    found = with_values(recipe, {"train.rounds": 5, "data.numbers.concentration": 0.3, "seed": 7})
    assert (found.train.rounds, found.data.numbers, found.seed) == (5, {"concentration": 0.3}, 7)
    assert recipe.train.rounds == 2
    with pytest.raises(ConfigurationError, match=r"rounds: expected"):
        with_values(recipe, {"train.rounds": 0})
    with pytest.raises(ConfigurationError, match="speed"):
        with_values(recipe, {"train.speed": 1})
    with pytest.raises(ConfigurationError, match=r"method\.mu: a recipe has no table method"):
        with_values(recipe, {"method.mu": 0.1})
    with pytest.raises(ConfigurationError, match="fedavg takes none; got mu"):
        with_values(recipe, {"method_numbers.mu": 0.1})


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("train.learning_rate=0.05,0.1", "train.learning_rate", [0.05, 0.1]),
        ("train.rounds=3", "train.rounds", [3]),
        ("train.norm=batch,group", "train.norm", ["batch", "group"]),
        ('train.norm="batch"', "train.norm", ["batch"]),
        ("evaluate.local=true", "evaluate.local", [True]),
        ("train.depths=[1, 2],[2, 2]", "train.depths", [[1, 2], [2, 2]]),
        ("data.name=csv:a.csv?label=b", "data.name", ["csv:a.csv?label=b"]),
    ],
)
def test_values_are_read_as_toml_has_them(text: str, name: str, values: list[Any]) -> None:
    assert read_values("--tune", text) == (name, values)


@pytest.mark.parametrize("text", ["train.rounds", "=3", "train.rounds="])
def test_a_value_without_a_name_or_a_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--set .*: expected NAME=VALUE"):
        read_values("--set", text)


def test_every_combination_is_tried_once() -> None:
    found = list(combinations({"a": [1, 2], "b": [3, 4]}))
    assert found == [{"a": 1, "b": 3}, {"a": 1, "b": 4}, {"a": 2, "b": 3}, {"a": 2, "b": 4}]


def test_what_recipes_do_not_share_is_named_but_for_their_methods() -> None:
    one, other = recipe_of("fedavg"), recipe_of("fedprox", learning_rate=0.2)
    assert differing({"one": one, "other": other}) == {
        "train.learning_rate": {"one": 0.1, "other": 0.2}
    }
    assert differing({"one": one, "again": with_values(one, {"seed": 9})}) == {}
