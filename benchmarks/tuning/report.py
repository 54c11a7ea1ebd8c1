"""The report of a sweep: every trial, and the numbers that were chosen for each method."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import reports
from benchmarks.jobs.job import Job
from benchmarks.jobs.results import Report, Trial, read_report
from benchmarks.tuning.sweep import (
    SWEEP,
    WORLDS,
    WorldName,
    method_of,
    methods_of,
    nested,
    trials_of,
)
from edge_sdk.durable import locked_folder, make_folder


def report_path(results: Path, world: WorldName) -> Path:
    """Place of the report, without the ending of the file."""
    return results / f"tuning-{world}"


def add_trial(results: Path, world: WorldName, job: Job, trial: Trial) -> None:
    """Write the report again, with one more trial.

    Raises: StorageError.
    """
    path = report_path(results, world)
    make_folder(path.parent)
    with locked_folder(path.parent):  # another process may add one too
        _write(path, world, read_report(path).added(trial, job, _jobs(world)))


def chosen(report: Report, world: WorldName) -> dict[str, tuple[str, float]]:
    """The best row of each method and its figure, the first of equals.

    A method without all of its trials has none.
    """
    best: dict[str, tuple[str, float]] = {}
    for method in methods_of(world):
        jobs = trials_of(method, world)
        rows = dict.fromkeys(job.row for job in jobs)
        found = [trial for trial in report.trials if trial.row in rows]
        if len(found) == len(jobs):
            scores = {row: _mean(t for t in found if t.row == row) for row in rows}
            best[method] = max(scores.items(), key=lambda each: each[1])
    return best


def changes_of(job: Job) -> dict[str, Any]:
    """Rate, momentum and the method's own number of a trial, as a recipe has them."""
    train = job.given["train"]
    numbers = {name: train[name] for name in ("learning_rate", "momentum")}
    own = SWEEP[method_of(job.row)].own
    if own is None:
        return {"train": numbers}
    name, _ = own
    value: Any = job.given
    for part in name.split("."):
        value = value[part]
    return {"train": numbers, **nested(name, value)}


def _jobs(world: WorldName) -> dict[str, Job]:
    """A job of every row."""
    return {job.row: job for method in methods_of(world) for job in trials_of(method, world)}


def _mean(trials: Iterable[Trial]) -> float:
    """The figure of a row: the mean over its seeds."""
    return statistics.fmean(map(_score, trials))


def _score(trial: Trial) -> float:
    """The trial's figure; one that is not defined is the worst."""
    figure = trial.measures[SWEEP[method_of(trial.row)].measure]
    return figure if figure == figure else -1.0  # noqa: PLR0124 - NaN differs from itself


def _write(path: Path, name: WorldName, found: Report) -> None:
    world, jobs, best = WORLDS[name], _jobs(name), chosen(found, name)
    command = f"python -m benchmarks.tuning {name}" + ("" if name == "digits" else " --data DIR")
    report = {
        "command": command,
        "seeds": world.seeds,
        "recipe": world.recipe,
        "complete": len(best) == len(methods_of(name)),
        "chosen": {method: changes_of(jobs[row]) for method, (row, _) in best.items()},
        **found.to_dict(),
    }
    several = len(world.seeds) > 1
    seeds = f"seeds {', '.join(map(str, world.seeds))}" if several else f"seed {world.seeds[0]}"
    about = (
        f"Every method has eight trials with the same clients, rounds, samples and {seeds}, which"
        " no table has. A trial is judged on held-out samples, in %: accuracy of the last rounds;"
        " for methods with networks of the clients' own, the mean over clients, each on its own"
        " classes (`rho 0`) and, for `rho 0.4`, 0.4 times as many samples of others."
    )
    if several:
        about += " What is chosen has the best mean over the seeds."
    if len(best) < len(methods_of(name)):
        left = ", ".join(method for method in methods_of(name) if method not in best)
        about += (
            f" Trials are left of {left}. Until they are done, no table takes the numbers of this"
            " sweep."
        )
    blocks = [
        f"# The same sweep for every method: {name}",
        about,
        f"`{command}`; {found.made()}",
        _chosen_table(best),
        _trials_table(found.trials),
    ]
    reports.write(path, report, blocks)


def _chosen_table(best: Mapping[str, tuple[str, float]]) -> str:
    lines = ["| method | chosen | judged by | held-out |", "| --- | --- | --- | --- |"]
    for method, (row, figure) in best.items():
        words = row.partition(": ")[2]
        lines.append(f"| {method} | {words} | {SWEEP[method].measure} | {figure:.2f} |")
    return "\n".join(lines)


def _trials_table(trials: Sequence[Trial]) -> str:
    """Figures of each row, by seed."""
    lines = ["| trial | held-out | seconds |", "| --- | --- | --- |"]
    for row in dict.fromkeys(trial.row for trial in trials):
        own = [trial for trial in trials if trial.row == row]
        scores = ", ".join(f"{_score(trial):.2f}" for trial in own)
        seconds = statistics.median(trial.clock_seconds for trial in own)
        lines.append(f"| {row} | {scores} | {seconds:.0f} |")
    return "\n".join(lines)
