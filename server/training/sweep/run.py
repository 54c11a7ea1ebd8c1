"""One run of a sweep, in a process of its own: trained like `splitedge simulate`, and judged.

FOLDER/                 the run (server.training.simulation.run)
FOLDER/held-out.json    its score on held-out samples, or why it has none

A run that is done is kept, and one that was stopped goes on from its last round.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
import torch

from edge_sdk.durable import make_folder, write_atomic
from edge_sdk.errors import FrameError, SplitedgeError
from server.training.comparison.comparison import Training, finished, train
from server.training.comparison.held_out import Measure, build_on_held_out, held_out_score
from server.training.recipe.recipe import Recipe, read_recipe
from server.training.report.report import REPORT
from server.training.run.checkpoint import discard, latest_checkpoint
from server.training.run.record import DivergedError
from server.training.sweep.grid import Task

SCORE: Final = "held-out.json"


@dataclass(frozen=True, slots=True)
class Result:
    """A run that is over.

    Attributes:
        score: the measure on held-out samples, 0 to 1; NaN of a training that diverged.
        training: None for one that diverged. diverged: why, or empty.
    """

    task: Task
    score: float
    training: Training | None
    diverged: str = ""


def run_task(recipe: Mapping[str, Any], folder: str, measure: Measure, place: str) -> str | None:
    """Train and judge what is not yet trained and judged.

    Args:
        recipe: from `Recipe.to_dict`.
        place: current folder of the sweep, from which the recipe names files.
    Returns: None, or the message of an error that is the recipe's.
    """
    torch.set_num_threads(1)
    if Path(place).is_dir():
        os.chdir(place)
    try:
        _train_and_judge(read_recipe(recipe), Path(folder), measure)
    except SplitedgeError as err:
        return str(err)
    return None


def result_of(task: Task, measure: Measure) -> Result | None:
    """The result that a run has left; None while it is not over."""
    found = _read(task.folder / SCORE)
    if found is None or found["recipe"] != _plain(task.recipe) or found["measure"] != measure:
        return None
    if found["diverged"]:
        return Result(task, math.nan, None, found["diverged"])
    report = finished(task.recipe, task.folder)
    if report is None:
        return None
    score = math.nan if found["score"] is None else float(found["score"])
    return Result(task, score, Training(task.choice.name, task.seed, report))


def forget(folder: Path) -> None:
    """Remove what a run has left, so that it begins again."""
    for name in (SCORE, REPORT):
        (folder / name).unlink(missing_ok=True)
    discard(folder)


def _train_and_judge(recipe: Recipe, folder: Path, measure: Measure) -> None:
    known: dict[str, Any] = {"recipe": _plain(recipe), "measure": measure}
    try:
        if finished(recipe, folder) is None:
            train(recipe, folder)
    except DivergedError as err:
        _write(folder, {**known, "score": None, "diverged": str(err)})
        return
    _write(folder, {**known, "score": _score(recipe, folder, measure), "diverged": ""})


def _score(recipe: Recipe, folder: Path, measure: Measure) -> float:
    """The measure of the run's last checkpoint on held-out samples.

    Raises: FrameError if there is none.
    """
    checkpoint = latest_checkpoint(folder)
    if checkpoint is None:
        raise FrameError(f"{folder}: expected the checkpoint of a finished run, found none")
    simulation = build_on_held_out(recipe, "cpu", folder, checkpoint.memory_format)
    with closing(simulation):
        checkpoint.restore(simulation)
        return held_out_score(simulation, checkpoint.rows, measure)


def _write(folder: Path, found: Mapping[str, Any]) -> None:
    make_folder(folder)
    write_atomic(folder / SCORE, orjson.dumps(found, option=orjson.OPT_INDENT_2))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = orjson.loads(path.read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        return None  # not judged yet; or a damaged file, whose run is judged again
    return found


def _plain(recipe: Recipe) -> Any:
    """The recipe as JSON has it."""
    return orjson.loads(orjson.dumps(recipe.to_dict()))
