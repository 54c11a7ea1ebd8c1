"""The page of a scale: which rows of the tables are done, under way and left."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.jobs.job import Job
from benchmarks.jobs.lines import duration
from benchmarks.jobs.queue import folder_of
from benchmarks.jobs.results import Trial, read_report
from benchmarks.jobs.training import rounds_done
from benchmarks.paper.plan import by_table, groups_of, jobs_of, needs_gpu
from benchmarks.paper.report import report_path
from benchmarks.paper.tables.catalog import TABLES
from benchmarks.paper.tables.table import Scale
from edge_sdk.durable import locked_folder, make_folder, write_atomic


def page_path(results: Path, scale: Scale) -> Path:
    """Place of the page, next to the reports of its scale."""
    return report_path(results, "progress", scale).with_suffix(".md")


def write_progress(
    results: Path, scale: Scale, seeds: int, work: Path, estimates: Mapping[str, float]
) -> None:
    """Write the page of a scale.

    Args:
        seeds: as many are asked of every row.
        work: holds the unfinished jobs.
        estimates: seconds by a recipe's digest.
    Raises: StorageError.
    """
    path = page_path(results, scale)
    make_folder(path.parent)
    lines, totals = [], [0, 0]
    seconds = 0.0
    for name, rows in by_table(jobs_of(list(groups_of(list(TABLES), scale)), scale, seeds)).items():
        report = read_report(report_path(results, name, scale))
        lines.append(f"| {name} | {TABLES[name].title} |" + " |" * seeds)
        for row, jobs in rows.items():
            found = [report.trial_of(job, TABLES[name].measures) for job in jobs]
            left = _seconds_each(job=jobs[0], found=found, estimates=estimates)
            gpu = needs_gpu(name, scale, "cpu")
            cells = [
                _cell(job, trial, work, left, gpu=gpu)
                for job, trial in zip(jobs, found, strict=True)
            ]
            lines.append(f"| | {row} | {' | '.join(cells)} |")
            totals[0] += sum(trial is not None for trial in found)
            totals[1] += len(found)
            if left is not None and not gpu:
                seconds += left * found.count(None)
    heads = " | ".join(f"seed {seed}" for seed in range(seeds))
    about = (
        f"{totals[0]} of {totals[1]} trainings are done. Those that are left, can run without a"
        f" GPU and have a time below take about {duration(seconds)} on one core; `--plan` measures"
        " the time of the others. Written by"
    )
    command = f"    python -m benchmarks.paper --all --scale {scale} --data DIR --resume"
    table = [f"| table | row | {heads} |", f"| --- | --- |{' --- |' * seeds}", *lines]
    text = "\n".join([f"# What is done at scale `{scale}`", "", about, "", command, "", *table])
    with locked_folder(path.parent):  # another process may write it too
        write_atomic(path, f"{text}\n".encode())


def _seconds_each(
    *, job: Job, found: Sequence[Trial | None], estimates: Mapping[str, float]
) -> float | None:
    """Seconds of one more seed: those of the seeds that are done, else the estimate."""
    known = [trial.clock_seconds for trial in found if trial is not None]
    return statistics.median(known) if known else estimates.get(job.digest)


def _cell(job: Job, trial: Trial | None, work: Path, seconds: float | None, *, gpu: bool) -> str:
    if trial is not None:
        return f"done, {duration(trial.clock_seconds)}"
    if rounds := rounds_done(folder_of(job, work)):
        return f"round {rounds} of {job.recipe.train.rounds}"
    if gpu:
        return "left over: no GPU"
    return "left" if seconds is None else f"left, about {duration(seconds)}"
