"""The report of a paper's table: its trials as JSON, and our figures next to the paper's.

Trials are added one by one, by any number of processes. A trial of a recipe that the table no
longer has is dropped as the next one is added.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from benchmarks import reports
from benchmarks.intervals import mean_interval
from benchmarks.jobs.job import Job
from benchmarks.paper.measures import shown
from benchmarks.paper.recipes import job_of
from benchmarks.paper.tables import Row, Scale, Table
from edge_sdk.durable import locked_folder, make_folder

RESULTS: Final = reports.RESULTS / "paper"


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
    """The trials of one table at one scale.

    Attributes:
        recipes: content of the jobs (benchmarks.jobs.job.Job.content), by digest.
    """

    trials: Sequence[Trial] = ()
    recipes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def trial_of(self, job: Job, measures: Iterable[str]) -> Trial | None:
        """The job's trial by the recipe as it is now, with all those measures; None for none."""
        for trial in self.trials:
            if (
                (trial.row, trial.seed) == (job.row, job.seed)
                and set(measures) <= trial.measures.keys()
                and job.is_of(self.recipes[trial.digest])
            ):
                return trial
        return None


def report_path(results: Path, name: str, scale: Scale) -> Path:
    """Place of a table's report, without the ending of the file."""
    return results / "full" / name if scale == "full" else results / f"{name}-{scale}"


def read_report(path: Path) -> Report:
    """The trials at that place. A report of an earlier version has none that tell their recipe."""
    try:
        found = orjson.loads(path.with_suffix(".json").read_bytes())
    except FileNotFoundError:
        return Report()
    recipes = found.get("recipes", {})
    runs = [run for run in found["runs"] if run.get("digest") in recipes]
    return Report([_trial(run) for run in runs], recipes)


def add_trial(results: Path, table: Table, scale: Scale, job: Job, trial: Trial) -> None:
    """Write the table's report again, with one more trial; it replaces one of its row and seed.

    Raises: StorageError.
    """
    path = report_path(results, job.table, scale)
    make_folder(path.parent)
    with locked_folder(path.parent):  # another process may add a trial of this table
        before = read_report(path)
        jobs = {row.name: job_of(job.table, table, row, scale) for row in table.rows}
        kept = [
            other
            for other in before.trials
            if (other.row, other.seed) != (trial.row, trial.seed)
            and other.row in jobs
            and jobs[other.row].is_of(before.recipes[other.digest])
        ]
        order = [row.name for row in table.rows]
        trials = sorted([*kept, trial], key=lambda each: (each.seed, order.index(each.row)))
        recipes = {**before.recipes, trial.digest: job.content}
        used = {each.digest for each in trials}
        now = Report(trials, {k: v for k, v in recipes.items() if k in used})
        _write(path, job.table, table, scale, now)


def _trial(run: Mapping[str, Any]) -> Trial:
    measures = {k: math.nan if v is None else v for k, v in run["measures"].items()}
    return Trial(**{**run, "measures": measures})


def _write(path: Path, name: str, table: Table, scale: Scale, found: Report) -> None:
    trials = found.trials
    rows = [row for row in table.rows if any(trial.row == row.name for trial in trials)]
    seeds = sorted({trial.seed for trial in trials})
    command = _command(name, scale, seeds, [] if len(rows) == len(table.rows) else rows)
    report = {
        "command": command,
        "title": table.title,
        "source": table.source,
        "paper_data": table.data,
        "scale": scale,
        "seeds": seeds,
        "recipe": table.scales[scale],
        "rows": [{"name": row.name, "recipe": row.recipe, "paper": row.paper} for row in rows],
        "runs": [asdict(trial) for trial in trials],
        "recipes": found.recipes,
    }
    printed = any(row.paper for row in rows)
    data = f"the paper's figures are of {table.data}" if printed else table.data
    source = (
        f"{table.source}; {data}. Ours: scale `{scale}`,"
        f" seeds {', '.join(map(str, seeds))}, mean ± half width of the 95 % interval, in %."
    )
    made = f"`{command}`; {_made(trials)}"
    blocks = [f"# {table.title}", source, made, _markdown(table, rows, list(trials))]
    reports.write(path, report, blocks)


def _command(name: str, scale: Scale, seeds: Sequence[int], rows: Sequence[Row]) -> str:
    """The command that makes the table again."""
    words = [name, "--scale", scale, "--seeds", str(max(seeds) + 1)]
    for row in rows:
        words += ["--row", row.name]
    return f"python -m benchmarks.paper {shlex.join(words)}"


def _made(trials: Sequence[Trial]) -> str:
    """Versions, machines and dates of all trials as a line."""
    made = [trial.made for trial in trials]

    def each(name: str) -> str:
        return " and ".join(sorted({str(one[name]) for one in made}))

    when = sorted(str(one["when"]) for one in made)
    dates = when[0] if len(when) == 1 else f"{when[0]} to {when[-1]}"
    return (
        f"splitedge {each('splitedge')}, torch {each('torch')}, {each('threads')} thread(s),"
        f" {each('machine')}, device {each('device')}, commit {each('commit')}, {dates}."
    )


def _cell(values: list[float]) -> str:
    """Mean ± half width of the values that are defined, and how many are where some are not."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "-"
    found = mean_interval(known)
    text = f"{found.mean:.2f}" if found.seeds == 1 else str(found)
    return text if len(known) == len(values) else f"{text} ({len(known)} of {len(values)})"


def _markdown(table: Table, rows: list[Row], trials: list[Trial]) -> str:
    printed = {name for row in rows for name in row.paper}
    heads = [h for m in table.measures for h in (shown(m), "paper")[: 1 + (m in printed)]]
    lines = [
        f"| | {' | '.join(heads)} | seconds | MB |",
        f"| --- |{' --- |' * (len(heads) + 2)}",
    ]
    for row in rows:
        own = [trial for trial in trials if trial.row == row.name]
        cells = []
        for name in table.measures:
            cells.append(_cell([trial.measures[name] for trial in own]))
            if name in printed:
                cells.append(f"{row.paper[name]:.2f}" if name in row.paper else "-")
        seconds = statistics.median(trial.seconds for trial in own)
        megabytes = statistics.median(trial.megabytes for trial in own)
        lines.append(f"| {row.name} | {' | '.join(cells)} | {seconds:.0f} | {megabytes:.0f} |")
    return "\n".join(lines)
