"""The papers' tables, trained at a stated scale, with the papers' figures next to ours.

    python -m benchmarks.paper harmony --scale cpu --data DIR --seeds 3
    python -m benchmarks.paper --all --scale full --data DIR --hours 8 --resume
    python -m benchmarks.paper --all --scale full --data DIR --plan

Writes reports (JSON and markdown) and a page of what is done and left into
benchmarks/results/paper/. Ctrl-C, SIGTERM and a kill lose at most a round and some seconds: with
`--resume` the next call goes on. Several calls at a time share the rows among them. A GPU is held
against the CPU first (benchmarks.paper.devices).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated, Final

import torch
import typer

from benchmarks.jobs.clock import Clock
from benchmarks.jobs.job import Job
from benchmarks.jobs.lines import duration
from benchmarks.jobs.queue import Outcome
from benchmarks.paper.devices import check_agreement
from benchmarks.paper.plan import by_table, groups_of, jobs_of, needs_gpu
from benchmarks.paper.progress import page_path
from benchmarks.paper.report import RESULTS, report_path
from benchmarks.paper.runner import Runner
from benchmarks.paper.tables.catalog import TABLES
from benchmarks.paper.tables.table import Scale
from benchmarks.reports import ROOT, Data, Hours, PaperResults, Seeds, Work
from edge_sdk.cli.times import plural
from edge_sdk.errors import SplitedgeError

# git ignores it
WORK: Final = ROOT / "splitedge-runs" / "paper"

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: python -m benchmarks.paper --all --scale cpu --data DIR --resume")
def paper(  # noqa: PLR0917 - a command's options
    tables: Annotated[
        list[str] | None,
        typer.Argument(help=f"`all`, or some of {', '.join(TABLES)}.", show_default=False),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All tables that this device can train in days.")
    ] = False,
    scale: Annotated[Scale, typer.Option(help="Amount of training.")] = "smoke",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seeds: Seeds = 3,
    data: Data = None,
    rows: Annotated[
        list[str] | None, typer.Option("--row", help="Only this row; may be repeated.")
    ] = None,
    hours: Hours = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep earlier results; go on with unfinished rows.")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Train nothing: measure how long each row will take.")
    ] = False,
    results: PaperResults = RESULTS,
    work: Work = WORK,
) -> None:
    """Train the tables of the five papers and write our figures next to theirs."""
    names = _names(tables or [], rows or [], scale, every=every)
    # a table that is named is trained wherever the user wants it
    waiting = [name for name in names if every and needs_gpu(name, scale, device)]
    runner = Runner(
        scale=scale,
        device=device,
        seeds=seeds,
        results=results,
        work=work,
        resume=resume,
        clock=Clock(hours),
        command=_command(tables or [], rows or [], scale, device, seeds, hours, resume=resume),
    )
    try:
        groups = list(groups_of([name for name in names if name not in waiting], scale))
        jobs = jobs_of(groups, scale, seeds, rows or [], data)
        if plan:
            _tell_plan(runner, jobs)
            return
        if device != "cpu":
            check_agreement([n for n in names if "smoke" in TABLES[n].scales], device)
        with runner.clock.ended_by_signals():
            outcome = runner.run(jobs)
    except SplitedgeError as err:
        typer.echo(f"error: {err}", err=True)
        raise typer.Exit(1) from None
    _tell(runner, jobs, outcome)
    for name in waiting:
        typer.echo(f"{name}: left over, it needs a GPU (--device cuda)")
    if outcome.failed:
        raise typer.Exit(1)


def _names(tables: Sequence[str], rows: Sequence[str], scale: Scale, *, every: bool) -> list[str]:
    """Names of the tables asked for, in the order of `TABLES`."""
    unknown = sorted(set(tables) - {"all", *TABLES})
    if unknown or not (tables or every):
        got = ", ".join(unknown) or "none"
        raise typer.BadParameter(f"expected all or some of {', '.join(TABLES)}, got {got}")
    for name in tables:
        scales = TABLES[name].scales if name in TABLES else (scale,)
        if scale not in scales:
            raise typer.BadParameter(
                f"--scale: {name}: expected {' or '.join(scales)}, got {scale}"
            )
    asked = [name for name in TABLES if every or "all" in tables or name in tables]
    known = [row.name for name in asked for row in TABLES[name].rows]
    lacking = sorted(set(rows) - set(known))
    if lacking:
        raise typer.BadParameter(
            f"--row: expected some of {', '.join(known)}, got {', '.join(lacking)}"
        )
    return asked


def _command(  # noqa: PLR0917 - the command's options
    tables: Sequence[str],
    rows: Sequence[str],
    scale: Scale,
    device: str,
    seeds: int,
    hours: float | None,
    *,
    resume: bool,
) -> str:
    """The command as reports name it: without places of this machine."""
    words = [*(tables or ["--all"]), "--scale", scale, "--seeds", str(seeds), "--device", device]
    for row in rows:
        words += ["--row", row]
    if hours is not None:
        words += ["--hours", f"{hours:g}"]
    if resume:
        words.append("--resume")
    return f"python -m benchmarks.paper {shlex.join(words)}"


def _tell(runner: Runner, jobs: Sequence[Job], outcome: Outcome) -> None:
    """Print the tables that this call trained rows of, and what is left."""
    for name in by_table(jobs):
        report = report_path(runner.results, name, runner.scale).with_suffix(".md")
        if report.is_file():
            typer.echo(f"\n{report.read_text()}")
    for message in outcome.failed:
        typer.echo(f"error: {message}", err=True)
    left = [job for job in jobs if runner.trial_of(job) is None]
    for job in left:
        if job in outcome.elsewhere:
            typer.echo(f"{job}: another process is at work on it")
    page = page_path(runner.results, runner.scale)
    typer.echo(f"{plural(outcome.done, 'row')} done, {len(left)} left; see {page}")
    if outcome.stopped and left:
        typer.echo("stopped in time; the same command with --resume goes on")


def _tell_plan(runner: Runner, jobs: Sequence[Job]) -> None:
    """Print the rows in their order with the time that each will take."""
    left = [job for job in jobs if runner.trial_of(job) is None]
    seconds = runner.estimate(left)
    lines = ["| table | row | seeds left | a seed |", "| --- | --- | --- | --- |"]
    total = 0.0
    for name, rows in by_table(left).items():
        for row, each in rows.items():
            known = seconds.get(each[0].digest)
            total += (known or 0.0) * len(each)
            text = "not measured" if known is None else duration(known)
            lines.append(f"| {name} | {row} | {len(each)} | {text} |")
    typer.echo("\n".join(lines))
    typer.echo(f"{plural(len(left), 'training')} left, about {duration(total)} on one core")
    runner.write_progress()


if __name__ == "__main__":
    torch.set_num_threads(1)
    app()
