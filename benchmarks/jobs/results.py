"""Results of jobs in a report's JSON: they are added one by one, by any number of processes.

runs       one entry a job: its figures, when and on which machine they were made
recipes    by digest, what those figures depend on (benchmarks.jobs.job.Job.content)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from benchmarks import reports
from benchmarks.jobs.job import Job
from benchmarks.jobs.training import Trained


@dataclass(frozen=True, slots=True)
class Trial:
    """One row, trained with one seed.

    Attributes:
        measures: in %, by name; NaN where one is not defined.
        seconds: of training, without evaluation. megabytes: up and down.
        curve: accuracy by round, in %.
        clock_seconds: of everything, with evaluation.
        digest: of the recipe (benchmarks.jobs.job.Job.digest).
        made: when, by which command, on which machine.
    """

    row: str
    seed: int
    measures: Mapping[str, float]
    seconds: float
    megabytes: float
    curve: list[float | None]
    clock_seconds: float
    digest: str
    made: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """The trials of one report.

    Attributes:
        recipes: content of the jobs (benchmarks.jobs.job.Job.content), by digest.
    """

    trials: Sequence[Trial] = ()
    recipes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def trial_of(self, job: Job, measures: Iterable[str]) -> Trial | None:
        """The job's trial by the recipe as it is now, with all those measures; None for none."""
        found = self.trials_of_recipe(job, measures)
        return next((trial for trial in found if trial.row == job.row), None)

    def trials_of_recipe(self, job: Job, measures: Iterable[str]) -> Iterator[Trial]:
        """Trials of any row with the job's recipe and seed, with all those measures."""
        names = set(measures)
        for trial in self.trials:
            if (
                trial.seed == job.seed
                and names <= trial.measures.keys()
                and job.is_of(self.recipes[trial.digest])
            ):
                yield trial

    def added(self, trial: Trial, job: Job, rows: Mapping[str, Job]) -> Report:
        """The report with one more trial, which replaces one of its row and seed.

        Trials of a recipe that has changed since are dropped.

        Args:
            job: that the trial is of. rows: a job of every row, in the report's order.
        """
        kept = [
            other
            for other in self.trials
            if (other.row, other.seed) != (trial.row, trial.seed)
            and other.row in rows
            and rows[other.row].is_of(self.recipes[other.digest])
        ]
        order = list(rows)
        trials = sorted([*kept, trial], key=lambda each: (each.seed, order.index(each.row)))
        used = {each.digest for each in trials}
        recipes = {**self.recipes, trial.digest: job.content}
        return Report(trials, {k: v for k, v in recipes.items() if k in used})

    def to_dict(self) -> dict[str, Any]:
        """The report's part of its JSON file."""
        return {"runs": [asdict(trial) for trial in self.trials], "recipes": self.recipes}

    def made(self) -> str:
        """Versions, machines and dates of all trials as a line."""
        made = [trial.made for trial in self.trials]

        def each(name: str) -> str:
            return " and ".join(sorted({str(one[name]) for one in made}))

        when = sorted(str(one["when"]) for one in made)
        dates = when[0] if len(when) == 1 else f"{when[0]} to {when[-1]}"
        return (
            f"splitedge {each('splitedge')}, torch {each('torch')}, {each('threads')} thread(s),"
            f" {each('machine')}, device {each('device')}, commit {each('commit')}, {dates}."
        )


def read_report(path: Path) -> Report:
    """The trials at that place. A report of an earlier version has none that tell their recipe."""
    try:
        found = orjson.loads(path.with_suffix(".json").read_bytes())
    except FileNotFoundError:
        return Report()
    recipes = found.get("recipes", {})
    runs = [run for run in found["runs"] if run.get("digest") in recipes]
    return Report([_trial(run) for run in runs], recipes)


def trial_of(
    job: Job, trained: Trained, measures: Mapping[str, float], command: str, more_seconds: float
) -> Trial:
    """The result of a job.

    Args:
        command: that the user gave.
        more_seconds: after the training, for the measures.
    """
    rows, progress = trained.rows, trained.progress
    device = trained.simulation.device.type
    made: dict[str, Any] = {"command": command, "device": device, **reports.provenance()}
    made["commit"] = ", ".join(progress.commits)
    made["memory_format"] = trained.simulation.memory_format
    return Trial(
        row=job.row,
        seed=job.seed,
        measures=measures,
        seconds=sum(row["seconds"] for row in rows),
        megabytes=sum(row["bytes_up"] + row["bytes_down"] for row in rows) / 1e6,
        curve=[None if r["accuracy"] is None else round(100 * r["accuracy"], 2) for r in rows],
        clock_seconds=progress.seconds + more_seconds,
        digest=job.digest,
        made=made,
    )


def _trial(run: Mapping[str, Any]) -> Trial:
    measures = {k: math.nan if v is None else v for k, v in run["measures"].items()}
    return Trial(**{**run, "measures": measures})
