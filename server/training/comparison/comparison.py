"""Recipes side by side: every recipe is trained with every seed.

OUT/NAME-SEED/    the run of each training (server.training.simulation.run)

A training that is done is kept, and one that was stopped goes on, so that the same call ends what a
kill left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from edge_sdk.errors import ConfigurationError, StorageError
from server.training.comparison.cost import Reached, cost_to
from server.training.recipe.recipe import Recipe
from server.training.report.report import REPORT
from server.training.run.checkpoint import differing_key, discard, latest_checkpoint
from server.training.run.run import Row
from server.training.simulation.run import simulate


@dataclass(frozen=True, slots=True)
class Training:
    """One recipe, trained with one seed.

    Attributes:
        name: of the recipe.
        report: as `splitedge simulate` writes it; a figure that is not defined is None.
    """

    name: str
    seed: int
    report: Mapping[str, Any]

    @property
    def rows(self) -> Sequence[Row]:
        """The rounds of the report."""
        rows: Sequence[Row] = self.report["rounds"]
        return rows

    @property
    def accuracy(self) -> float:
        """On the test part after the last round; NaN where it is not defined."""
        return _number(self.report["final"]["accuracy"])

    @property
    def accuracy_clients(self) -> float:
        """Mean over the clients, each on its own test samples; NaN where it is not defined."""
        return _number(self.report["final"]["accuracy_clients"])

    @property
    def seconds(self) -> float:
        """Seconds of training, without evaluation."""
        return math.fsum(row["seconds"] for row in self.rows)

    @property
    def megabytes(self) -> float:
        """Payload of all clients in both directions, in 10^6 bytes."""
        total: int = sum(row["bytes_up"] + row["bytes_down"] for row in self.rows)
        return total / 1e6

    @property
    def energy(self) -> Mapping[str, Any] | None:
        """Energy of the training (server.training.report.cost); None where it is not known.

        Of a training that was stopped and went on, it is known for the rounds after the stop alone.
        """
        found: Mapping[str, Any] = self.report["energy"]
        whole = found["rounds"] == len(self.rows) and found["watts_per_point"] is not None
        return found if whole else None

    def figures(self) -> dict[str, Any]:
        """The training's own figures, as a report has them."""
        return {
            "seed": self.seed,
            "accuracy": self.accuracy,
            "accuracy_clients": self.accuracy_clients,
            "megabytes": self.megabytes,
            "seconds": self.seconds,
        }

    def reached(self, target: float) -> Reached | None:
        """Cost up to the first round that measured at least `target`; None where none did."""
        return cost_to(target, self.rows)


@dataclass(frozen=True, slots=True)
class Watcher:
    """Functions that are told how far a comparison is, with the values that are named here.

    Attributes:
        on_round: name, seed and row of a round, those of an earlier call included.
        on_training: a training that is done, and whether it was done before.
    """

    on_round: Callable[[str, int, Row], None] = lambda _name, _seed, _row: None
    on_training: Callable[[Training, bool], None] = lambda _training, _before: None


def compare(
    recipes: Mapping[str, Recipe],
    seeds: Sequence[int],
    out: Path,
    *,
    force: bool = False,
    device: str = "cpu",
    workers: int = 0,
    watcher: Watcher | None = None,
) -> list[Training]:
    """Train by every recipe with every seed, seed by seed: a busy spell affects all recipes.

    Args:
        recipes: by name, of which the trainings' folders in `out` have theirs.
        force: train again what is done.
        workers: processes that train the clients; 0 for this process alone.
    Raises: ConfigurationError where a recipe and its data do not go together, or where `out` holds
        a training of that name by another recipe; StorageError.
    """
    told = watcher or Watcher()
    trainings = []
    for seed in seeds:
        for name, recipe in recipes.items():
            seeded, folder = replace(recipe, seed=seed), out / f"{name}-{seed}"
            report = None if force else finished(seeded, folder)
            before = report is not None
            if report is None:
                on_round = partial(told.on_round, name, seed)
                train(seeded, folder, on_round, force=force, device=device, workers=workers)
                report = _read(folder / REPORT)
            trainings.append(Training(name, seed, report))
            told.on_training(trainings[-1], before)
    return trainings


def train(
    recipe: Recipe,
    folder: Path,
    on_round: Callable[[Row], None] = lambda _: None,
    *,
    force: bool = False,
    device: str = "cpu",
    workers: int = 0,
) -> None:
    """Train, or go on with what a stop left.

    Raises: ConfigurationError where `folder` holds a training by another recipe; DivergedError;
        StorageError.
    """
    if force:
        discard(folder)
    checkpoint = latest_checkpoint(folder)
    if checkpoint is not None:
        key = differing_key(checkpoint, recipe)
        if key is not None or checkpoint.round > recipe.train.rounds:
            raise ConfigurationError(
                f"{folder}: holds a training with another {key or 'train.rounds'}; choose another"
                " --out, or add --force to train it again"
            )
    resume = checkpoint is not None
    simulate(recipe, folder, resume=resume, device=device, workers=workers, on_round=on_round)


def finished(recipe: Recipe, folder: Path) -> Mapping[str, Any] | None:
    """The report of a training by this very recipe; None where there is none."""
    path = folder / REPORT
    if not path.is_file():
        return None
    report = _read(path)
    same = report["recipe"] == orjson.loads(orjson.dumps(recipe.to_dict()))
    return report if same and len(report["rounds"]) == recipe.train.rounds else None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        report: Mapping[str, Any] = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as err:
        raise StorageError(
            f"{path}: expected the report of a training ({err}); add --force to train it again"
        ) from err
    return report


def _number(value: float | None) -> float:
    return math.nan if value is None else value
