"""The training of a job, which goes on from its last checkpoint after a stop or a kill.

FOLDER/checkpoints/     as of every run (server.training.run.checkpoint)
FOLDER/progress.json    seconds and commits so far, and the digest of the recipe
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import orjson

from benchmarks.jobs.clock import Clock, OutOfTimeError
from benchmarks.reports import commit
from edge_sdk.durable import make_folder, write_atomic
from edge_sdk.errors import ConfigurationError, FrameError, StorageError
from edge_sdk.nets.memory_format import ChosenFormat
from server.training.recipe.recipe import Recipe
from server.training.run.checkpoint import (
    Checkpoint,
    check_same_recipe,
    continue_run,
    discard,
    latest_checkpoint,
    save_checkpoint,
)
from server.training.run.run import Row, Simulation
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds

# A kill costs at most so many seconds and one round; a checkpoint after each round of a small
# network would take longer than the round.
SAVE_EVERY_S: Final = 20.0

Build = Callable[[Recipe, str, Path, ChosenFormat | None], Simulation]

_PROGRESS: Final = "progress.json"


@dataclass(slots=True)
class Progress:
    """Time and code of a job over all calls that worked on it.

    Attributes:
        seconds: of the clock, with evaluation. commits: of the code, in the order of use.
        digest: of the recipe with all defaults (benchmarks.jobs.job.Job.digest).
    """

    seconds: float = 0.0
    commits: list[str] = field(default_factory=list)
    digest: str | None = None

    @classmethod
    def read(cls, folder: Path) -> Progress:
        """The progress in a job's folder; none where there is no file."""
        try:
            found = orjson.loads((folder / _PROGRESS).read_bytes())
        except FileNotFoundError:
            return cls()
        return cls(found["seconds"], found["commits"], found.get("digest"))

    def write(self, folder: Path) -> None:
        """Write it into a job's folder.

        Raises: StorageError.
        """
        raw = {"seconds": self.seconds, "commits": self.commits, "digest": self.digest}
        write_atomic(folder / _PROGRESS, orjson.dumps(raw))


@dataclass(frozen=True, slots=True)
class Trained:
    """A finished training: `progress.seconds` were spent on it so far."""

    simulation: Simulation
    rows: list[Row]
    progress: Progress


def train_resumable(
    recipe: Recipe,
    folder: Path,
    device: str,
    clock: Clock,
    *,
    digest: str | None = None,
    on_round: Callable[[Row], None] = lambda _: None,
    build: Build = build_simulation,
) -> Trained:
    """Train by a recipe to its last round, from the last checkpoint in `folder` if there is one.

    The weights are, bit for bit, those of a training that was never stopped, on the same machine.

    Args:
        digest: of the recipe with all defaults; rounds that were trained by another are discarded.
            None for a recipe whose defaults do not change.
        on_round: called with each round of this call.
        build: the simulation of a recipe on a device, with a folder for its files and the memory
            format of earlier rounds.
    Raises: OutOfTimeError once the time is over, behind a checkpoint; ConfigurationError.
    """
    make_folder(folder)
    began = time.monotonic()
    progress = Progress.read(folder)
    if digest != progress.digest is not None:
        discard(folder)
    checkpoint = _checkpoint(folder, recipe)
    before = None if checkpoint is None else checkpoint.memory_format
    simulation = build(recipe, device, folder, before)
    if checkpoint is None:
        progress = Progress()
    progress.digest = digest
    if commit() not in progress.commits:
        progress.commits.append(commit())
    spent = progress.seconds
    rows = continue_run(folder, simulation, checkpoint)
    progress.write(folder)
    saved = last = time.monotonic()
    for row in run_rounds(simulation, rows):
        on_round(row)
        now = time.monotonic()
        over = row["round"] < recipe.train.rounds and clock.is_over(now - last)
        last = now
        # what follows the last round may take as long as the training
        last_of_many = row["round"] == recipe.train.rounds and now - began >= SAVE_EVERY_S
        if over or last_of_many or now - saved >= SAVE_EVERY_S:
            progress.seconds = spent + now - began
            with simulation.loop.paused():
                save_checkpoint(folder, simulation, rows)
            progress.write(folder)
            saved = now
        if over:
            raise OutOfTimeError
    progress.seconds = spent + time.monotonic() - began
    return Trained(simulation, rows, progress)


def rounds_done(folder: Path) -> int:
    """Rounds up to the newest checkpoint in a job's folder, by its name alone."""
    names = (path.stem for path in (folder / "checkpoints").glob("round-*.safetensors"))
    return max((int(name.removeprefix("round-")) for name in names), default=0)


def _checkpoint(folder: Path, recipe: Recipe) -> Checkpoint | None:
    """The checkpoint to go on from; those that are damaged or of another recipe are discarded."""
    try:
        found = latest_checkpoint(folder)
        if found is not None:
            check_same_recipe(found, recipe)
    except (ConfigurationError, FrameError, StorageError):
        discard(folder)
        return None
    return found
