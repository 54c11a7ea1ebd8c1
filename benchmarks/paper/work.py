"""The work on one row of a table: its training, its measures, and how long it will take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.jobs.clock import Clock
from benchmarks.jobs.job import Job
from benchmarks.jobs.results import Trial, trial_of
from benchmarks.jobs.training import train_resumable
from benchmarks.paper.local_only import KeptAlone
from benchmarks.paper.measures import measured
from benchmarks.paper.tables.catalog import TABLES
from server.training.recipe.recipe import Recipe
from server.training.report.evaluate import Evaluator
from server.training.run.run import Row
from server.training.simulation.build import build_simulation

# Batches a round from which the time of a round is told, as a line through two points.
_FEW: Final = 1
_MORE: Final = 4


def train_row(
    job: Job,
    folder: Path,
    device: str,
    clock: Clock,
    *,
    command: str,
    on_round: Callable[[Row], None],
    alone: KeptAlone,
) -> Trial:
    """Train one row from its last checkpoint on, and measure the result.

    Args:
        folder: of the unfinished job.
        command: that the user gave, for the report.
        alone: trains the clients one by one, for measures that ask for it.
    Raises: OutOfTimeError behind a checkpoint; SplitedgeError.
    """
    trained = train_resumable(
        job.recipe, folder, device, clock, digest=job.digest, on_round=on_round
    )
    began = time.monotonic()
    names = TABLES[job.table].measures
    measures = measured(trained.simulation, trained.rows, names, alone.accuracies)
    return trial_of(job, trained, measures, command, time.monotonic() - began)


def estimate_seconds(recipe: Recipe, device: str) -> float:
    """Seconds that a training with its evaluations will take, from a few batches of each client.

    On a CPU they are those of its one thread, however busy the machine is. The measures at the end
    are not counted.

    Raises: ConfigurationError.
    """
    began = _clock(device)
    simulation = build_simulation(recipe, device)
    training = recipe.train.training
    sizes = [client.samples for client in simulation.clients.values()]
    batches = training.iterations or training.epochs * sum(
        -(-size // training.batch) for size in sizes
    ) / len(sizes)
    evaluator = Evaluator(simulation)
    built = _clock(device)
    evaluator.accuracy(supervised=True)
    evaluation = _clock(device) - built
    few, more = (_seconds_of_round(recipe, device, count) for count in (_FEW, _MORE))
    each = max(0.0, (more - few) / (_MORE - _FEW))
    rounds = recipe.train.rounds
    measurements = rounds // recipe.evaluate.every + 1
    return built - began + rounds * (few + each * (batches - _FEW)) + measurements * evaluation


def _seconds_of_round(recipe: Recipe, device: str, batches: int) -> float:
    """Seconds of a round with so many batches of each client, the second of two."""
    training = replace(recipe.train.training, iterations=batches)
    short = replace(recipe, train=replace(recipe.train, training=training))
    simulation = build_simulation(short, device)
    simulation.loop.run_round(1, recipe.seed)
    began = _clock(device)
    simulation.loop.run_round(2, recipe.seed)
    return _clock(device) - began


def _clock(device: str) -> float:
    """Seconds of the processor for a CPU, of the clock for a GPU."""
    return time.process_time() if device == "cpu" else time.monotonic()
