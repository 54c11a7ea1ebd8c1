"""Trainings of a sweep that chooses: held-out samples judge them, and the test part is not used.

WORK/NAME-SEED.json    the report of each training that is done
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from server.training.comparison.comparison import Training
from server.training.comparison.held_out import build_on_held_out
from server.training.recipe.recipe import Recipe
from server.training.report.report import report_of, write_report
from server.training.run.run import Row
from server.training.simulation.run import run_rounds


def train_on_held_out(
    recipes: Mapping[str, Recipe],
    seeds: Sequence[int],
    work: Path,
    on_training: Callable[[Training, bool], None],
) -> list[Training]:
    """Train by every recipe with every seed, or take the report of one that was done before.

    Args:
        on_training: told each training, and whether it was done before.
    """
    trainings = []
    for seed in seeds:
        for name, recipe in recipes.items():
            path, seeded = work / f"{name}-{seed}.json", replace(recipe, seed=seed)
            report = _done(path, seeded)
            before = report is not None
            trainings.append(Training(name, seed, report or _trained(path, seeded)))
            on_training(trainings[-1], before)
    return trainings


def _trained(path: Path, recipe: Recipe) -> Mapping[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(build_on_held_out(recipe, "cpu", Path(folder))) as simulation,
    ):
        rows: list[Row] = []
        for _ in run_rounds(simulation, rows):
            pass
        write_report(path, report_of(simulation, rows))
    return _read(path)


def _done(path: Path, recipe: Recipe) -> Mapping[str, Any] | None:
    """The report of a training by this very recipe; None where there is none."""
    if not path.is_file():
        return None
    report = _read(path)
    return report if report["recipe"] == orjson.loads(orjson.dumps(recipe.to_dict())) else None


def _read(path: Path) -> Mapping[str, Any]:
    report: Mapping[str, Any] = orjson.loads(path.read_bytes())
    return report
