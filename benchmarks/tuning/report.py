"""The report of a sweep: every trial, and the numbers that were chosen for each method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import reports
from benchmarks.jobs.job import Job
from benchmarks.jobs.results import Report, Trial, read_report
from benchmarks.tuning.sweep import SEED, SWEEP, WORLDS, DataName, method_of, nested, trials_of
from edge_sdk.durable import locked_folder, make_folder


def report_path(results: Path, data: DataName) -> Path:
    """Place of the report, without the ending of the file."""
    return results / f"tuning-{data}"


def add_trial(results: Path, data: DataName, job: Job, trial: Trial) -> None:
    """Write the report again, with one more trial.

    Raises: StorageError.
    """
    path = report_path(results, data)
    make_folder(path.parent)
    with locked_folder(path.parent):  # another process may add one too
        rows = {job.row: job for method in SWEEP for job in trials_of(method, data)}
        _write(path, data, read_report(path).added(trial, job, rows))


def chosen(report: Report, data: DataName) -> dict[str, Trial]:
    """The best trial of each method, the first of equals; a method without all trials has none."""
    best: dict[str, Trial] = {}
    for method in SWEEP:
        rows = [job.row for job in trials_of(method, data)]
        found = {trial.row: trial for trial in report.trials if trial.row in rows}
        if len(found) == len(rows):
            best[method] = max((found[row] for row in rows), key=_score)
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


def _score(trial: Trial) -> float:
    """The trial's figure; one that is not defined is the worst."""
    figure = trial.measures[SWEEP[method_of(trial.row)].measure]
    return figure if figure == figure else -1.0  # noqa: PLR0124 - NaN differs from itself


def _write(path: Path, data: DataName, found: Report) -> None:
    jobs = {job.row: job for method in SWEEP for job in trials_of(method, data)}
    best = chosen(found, data)
    command = f"python -m benchmarks.tuning {data}" + ("" if data == "digits" else " --data DIR")
    report = {
        "command": command,
        "seed": SEED,
        "recipe": WORLDS[data],
        "complete": len(best) == len(SWEEP),
        "chosen": {method: changes_of(jobs[trial.row]) for method, trial in best.items()},
        **found.to_dict(),
    }
    about = (
        f"Every method has eight trials on {data} with the same clients, rounds, samples and seed"
        f" ({SEED}, which no table has). A trial is judged on held-out samples, in %: accuracy of"
        " the last rounds; for methods with networks of the clients' own, the mean over clients,"
        " each on its own classes (`rho 0`) and, for `rho 0.4`, 0.4 times as many samples of"
        " others."
    )
    if len(best) < len(SWEEP):
        left = ", ".join(method for method in SWEEP if method not in best)
        about += (
            f" Trials are left of {left}. Until they are done, no table takes the numbers of this"
            " sweep."
        )
    blocks = [
        f"# The same sweep for every method: {data}",
        about,
        f"`{command}`; {found.made()}",
        _chosen_table(jobs, best),
        _trials_table(found.trials),
    ]
    reports.write(path, report, blocks)


def _chosen_table(jobs: Mapping[str, Job], best: Mapping[str, Trial]) -> str:
    lines = ["| method | chosen | judged by | held-out |", "| --- | --- | --- | --- |"]
    for method, trial in best.items():
        words = jobs[trial.row].row.partition(": ")[2]
        lines.append(f"| {method} | {words} | {SWEEP[method].measure} | {_score(trial):.2f} |")
    return "\n".join(lines)


def _trials_table(trials: Sequence[Trial]) -> str:
    lines = ["| trial | held-out | seconds |", "| --- | --- | --- |"]
    lines += [f"| {t.row} | {_score(t):.2f} | {t.clock_seconds:.0f} |" for t in trials]
    return "\n".join(lines)
