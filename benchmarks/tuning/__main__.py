"""The same small sweep for every method and baseline, judged on held-out samples.

    python -m benchmarks.tuning digits
    python -m benchmarks.tuning fashion-mnist --data DIR --hours 1

Writes tuning-WORLD.json and tuning-WORLD.md into benchmarks/results/. Trials that are done are
kept: the next call, or one beside this one, does the others.
"""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated, Final, get_args

import torch
import typer

from benchmarks.jobs.clock import Clock
from benchmarks.jobs.job import Job
from benchmarks.jobs.lines import RoundTeller, duration, figures, say
from benchmarks.jobs.queue import run_queue
from benchmarks.jobs.results import read_report, trial_of
from benchmarks.jobs.training import train_resumable
from benchmarks.paper.measures import measured
from benchmarks.paper.tables.table import over
from benchmarks.reports import RESULTS, ROOT, Data, Hours, Results, Work
from benchmarks.tuning.report import add_trial, report_path
from benchmarks.tuning.sweep import SWEEP, WorldName, method_of, methods_of, trials_of
from edge_sdk.cli.times import plural
from edge_sdk.errors import SplitedgeError
from server.training.comparison.held_out import build_on_held_out

WORK: Final = ROOT / "splitedge-runs" / "tuning"

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: python -m benchmarks.tuning digits --method harmony")
def tuning(  # noqa: PLR0917 - a command's options
    name: Annotated[
        WorldName,
        typer.Argument(
            metavar="WORLD", help="Clients of the sweep: " + ", ".join(get_args(WorldName)) + "."
        ),
    ],
    methods: Annotated[
        list[str] | None,
        typer.Option("--method", help=f"Only this one; may be repeated: {', '.join(SWEEP)}."),
    ] = None,
    data: Data = None,
    hours: Hours = None,
    results: Results = RESULTS,
    work: Work = WORK,
) -> None:
    """Give every method the same sweep, and choose its numbers on held-out samples."""
    swept = methods_of(name)
    unknown = sorted(set(methods or []) - set(swept))
    if unknown:
        raise typer.BadParameter(
            f"--method: expected some of {', '.join(swept)}, got {', '.join(unknown)}"
        )
    asked = [method for method in swept if not methods or method in methods]
    jobs = [_placed(job, data) for method in asked for job in trials_of(method, name)]
    clock = Clock(hours)
    command = f"python -m benchmarks.tuning {shlex.join([name])}"
    path = report_path(results, name)

    def is_finished(job: Job) -> bool:
        measure = SWEEP[method_of(job.row)].measure
        return read_report(path).trial_of(job, [measure]) is not None

    def finish(job: Job, folder: Path) -> None:
        trained = train_resumable(
            job.recipe,
            folder,
            "cpu",
            clock,
            digest=job.digest,
            on_round=RoundTeller(job),
            build=build_on_held_out,
        )
        began = time.monotonic()
        found = measured(trained.simulation, trained.rows, [SWEEP[method_of(job.row)].measure])
        trial = trial_of(job, trained, found, command, time.monotonic() - began)
        add_trial(results, name, job, trial)
        say(f"{job.row}: {figures(found)} in {duration(trial.clock_seconds)}")

    try:
        with clock.ended_by_signals():
            outcome = run_queue(jobs, work, is_finished=is_finished, finish=finish, clock=clock)
    except SplitedgeError as err:
        typer.echo(f"error: {err}", err=True)
        raise typer.Exit(1) from None
    for message in outcome.failed:
        typer.echo(f"error: {message}", err=True)
    left = len(jobs) - sum(map(is_finished, jobs))
    page = path.with_suffix(".md")
    place = f"; see {page}" if page.exists() else ""
    typer.echo(f"{plural(outcome.done, 'trial')} done, {left} left{place}")
    if outcome.failed:
        raise typer.Exit(1)


def _placed(job: Job, data: Path | None) -> Job:
    """The trial with the folder of the data set's files."""
    if data is None or job.given["data"]["name"] == "digits":
        return job
    return Job(job.table, job.row, over(job.given, {"data": {"folder": str(data)}}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    app()
