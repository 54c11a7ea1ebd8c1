"""Choices of a sweep: every combination of the values that `--set` names, and its runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_sdk.errors import ConfigurationError
from server.training.comparison.values import combinations, with_values
from server.training.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Choice:
    """One combination of values.

    Attributes:
        values: by dotted name. recipe: with these.
    """

    values: Mapping[str, Any]
    recipe: Recipe

    @property
    def name(self) -> str:
        """The values in words: `train.learning_rate=0.1, method_numbers.mu=0.01`."""
        return ", ".join(f"{name}={value}" for name, value in self.values.items())

    @property
    def folder(self) -> str:
        """Name of the folders of its runs, without the seed."""
        short = (f"{name.rpartition('.')[2]}={value}" for name, value in self.values.items())
        return re.sub(r"[^A-Za-z0-9.=,_+-]+", "-", ",".join(short))


@dataclass(frozen=True, slots=True)
class Task:
    """One choice with one seed: a run of its own, in a folder of its own."""

    choice: Choice
    seed: int
    folder: Path

    @property
    def recipe(self) -> Recipe:
        """The choice's recipe with this seed."""
        return replace(self.choice.recipe, seed=self.seed)

    @property
    def name(self) -> str:
        """The task in a message."""
        return f"{self.choice.name}, seed {self.seed}"


def choices_of(recipe: Recipe, grid: Mapping[str, Sequence[Any]]) -> list[Choice]:
    """Every combination of the grid's values, the last name's values first.

    Args:
        grid: the values to try, by dotted name.
    Raises: ConfigurationError naming what a recipe does not have, and what it has.
    """
    if not grid:
        raise ConfigurationError(
            "sweep: expected values to try, as in --set train.learning_rate=0.05,0.1"
        )
    if "seed" in grid:
        raise ConfigurationError(
            "--set seed: expected --seeds N, which trains by the seeds 0 to N - 1"
        )
    if recipe.data.held_out == 0:
        raise ConfigurationError(
            "sweep: a choice is judged by held-out samples, and the recipe holds none out"
            " (data.held_out = 0); give it a share, such as 0.1"
        )
    try:
        found = [Choice(values, with_values(recipe, values)) for values in combinations(grid)]
    except ConfigurationError as err:
        raise ConfigurationError(f"--set: {err}") from err
    if any(choice.recipe.data.held_out == 0 for choice in found):
        raise ConfigurationError(
            "sweep: a choice is judged by held-out samples, and the recipe holds none out"
            " (data.held_out = 0); give it a share, such as 0.1"
        )
    names = [choice.folder for choice in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"--set: expected values that differ, got {twice} twice")
    return found


def tasks_of(choices: Sequence[Choice], seeds: int, out: Path) -> list[Task]:
    """The runs of all choices, seed by seed: what is done first says something of every choice."""
    return [
        Task(choice, seed, out / f"{choice.folder}-{seed}")
        for seed in range(seeds)
        for choice in choices
    ]
