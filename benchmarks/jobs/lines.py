"""Lines that a runner prints as it works."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

import typer

from benchmarks.jobs.job import Job
from server.training.run.run import Row

# One of the rounds of a long job at most so often.
TELL_EVERY_S: Final = 60.0


class RoundTeller:
    """Tells the rounds of a long job, one in a while."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._told = time.monotonic()

    def __call__(self, row: Row) -> None:
        """Tell this round, or wait for a later one."""
        now = time.monotonic()
        if now - self._told >= TELL_EVERY_S:
            self._told = now
            accuracy = "" if row["accuracy"] is None else f", accuracy {row['accuracy']:.1%}"
            rounds = self._job.recipe.train.rounds
            say(f"{self._job}: round {row['round']} of {rounds}{accuracy}")


def say(text: str) -> None:
    """Print a line with the time of day."""
    typer.echo(f"{time.strftime('%H:%M:%S')} {text}")


def duration(seconds: float) -> str:
    """A length of time with its unit: `45 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def figures(measures: Mapping[str, float]) -> str:
    """Figures by name: `accuracy 71.20, exits 60.10`."""
    return ", ".join(f"{name} {figure:.2f}" for name, figure in measures.items())
