"""The report of a paper's table: its trials as JSON, and our figures next to the paper's.

A trial of a recipe that the table no longer has is dropped as the next one is added.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from benchmarks import reports
from benchmarks.jobs.job import Job
from benchmarks.jobs.results import Report, Trial, read_report
from benchmarks.paper.measures import by_threshold, is_accuracy_of_clients, of_clients, shown
from benchmarks.paper.recipes import job_of
from benchmarks.paper.tables.table import Row, Scale, Table
from edge_sdk.durable import locked_folder, make_folder
from server.training.comparison.intervals import mean_interval
from server.training.report.thresholds import CHOICES

RESULTS: Final = reports.RESULTS / "paper"
NO_GATE: Final = "no gate"
_ABOUT_THRESHOLDS: Final = (
    "Gated rows by the choice of the threshold: `held-out`, each client's own, chosen on held-out"
    " samples of its own classes; `fleet`, one for all clients, chosen on the same samples;"
    " `oracle`, each client's best for its test samples, an upper bound and the papers' choice. No"
    " row trains on the held-out samples. Rows without a gate have one figure."
)


def report_path(results: Path, name: str, scale: Scale) -> Path:
    """Place of a table's report, without the ending of the file."""
    return results / "full" / name if scale == "full" else results / f"{name}-{scale}"


def add_trial(results: Path, table: Table, scale: Scale, job: Job, trial: Trial) -> None:
    """Write the table's report again, with one more trial; it replaces one of its row and seed.

    Raises: StorageError.
    """
    path = report_path(results, job.table, scale)
    make_folder(path.parent)
    with locked_folder(path.parent):  # another process may add a trial of this table
        rows = {row.name: job_of(job.table, table, row, scale) for row in table.rows}
        found = read_report(path).added(trial, job, rows)
        _write(path, job.table, table, scale, found)


def _write(path: Path, name: str, table: Table, scale: Scale, found: Report) -> None:
    trials = found.trials
    rows = [row for row in table.rows if any(trial.row == row.name for trial in trials)]
    seeds = sorted({trial.seed for trial in trials})
    data = table.scales[scale]["data"]["name"]
    command = _command(name, scale, data, seeds, [] if len(rows) == len(table.rows) else rows)
    report = {
        "command": command,
        "title": table.title,
        "source": table.source,
        "paper_data": table.data,
        "scale": scale,
        "seeds": seeds,
        "recipe": table.scales[scale],
        "rows": [{"name": row.name, "recipe": row.recipe, "paper": row.paper} for row in rows],
        **found.to_dict(),
    }
    printed = any(row.paper for row in rows)
    whose = f"the paper's figures are of {table.data}" if printed else table.data
    source = (
        f"{table.source}; {whose}. Ours: scale `{scale}`,"
        f" seeds {', '.join(map(str, seeds))}, mean ± half width of the 95 % interval, in %."
    )
    if table.tuned_numbers(scale):
        sweep = f"benchmarks.tuning {table.sweep}" if table.sweep else "benchmarks.tuning"
        source += f" Each method has the numbers that `{sweep}` chose on held-out samples."
    made = f"`{command}`; {found.made()}"
    blocks = [f"# {table.title}", source, made, _markdown(table, rows, list(trials))]
    blocks += _thresholds(table, rows, list(trials))
    reports.write(path, report, blocks)


def _command(name: str, scale: Scale, data: str, seeds: Sequence[int], rows: Sequence[Row]) -> str:
    """The command that makes the table again."""
    words = [name, "--scale", scale, "--seeds", str(max(seeds) + 1)]
    if data != "digits":  # which the program has
        words += ["--data", "DIR"]
    for row in rows:
        words += ["--row", row.name]
    return f"python -m benchmarks.paper {shlex.join(words)}"


def _cell(values: list[float]) -> str:
    """Mean ± half width of the values that are defined, and how many are where some are not."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "-"
    found = mean_interval(known)
    text = f"{found.mean:.2f}" if found.seeds == 1 else str(found)
    return text if len(known) == len(values) else f"{text} ({len(known)} of {len(values)})"


def _markdown(table: Table, rows: list[Row], trials: list[Trial]) -> str:
    """The table of the headline figures."""
    printed = {name for row in rows for name in row.paper}
    gated = _gated(table, trials)
    seeds = len({trial.seed for trial in trials})
    names = {name: _headline(name, trials) for name in table.measures}
    heads = [h for m in table.measures for h in (shown(names[m]), "paper")[: 1 + (m in printed)]]
    if gated:
        heads = ["gate", *heads]
    lines = [
        f"| | {' | '.join(heads)} | seconds | MB |",
        f"| --- |{' --- |' * (len(heads) + 2)}",
    ]
    for row in rows:
        own = [trial for trial in trials if trial.row == row.name]
        cells = [("gated" if row.name in gated else NO_GATE)] if gated else []
        for name in table.measures:
            cells.append(_cell([trial.measures[name] for trial in own]))
            if name in printed:
                cells.append(f"{row.paper[name]:.2f}" if name in row.paper else "-")
        seconds = statistics.median(trial.seconds for trial in own)
        megabytes = statistics.median(trial.megabytes for trial in own)
        name = row.name if len(own) == seeds else f"{row.name} ({len(own)} of {seeds} seeds)"
        lines.append(f"| {name} | {' | '.join(cells)} | {seconds:.0f} | {megabytes:.0f} |")
    return "\n".join(lines)


def _thresholds(table: Table, rows: list[Row], trials: list[Trial]) -> list[str]:
    """The table of gated rows by each choice of the threshold; nothing without a gated row.

    It has the first and the last of the clients' accuracies; the report's JSON has all measures.
    """
    gated = _gated(table, trials)
    if not gated:
        return []
    accuracies = [name for name in table.measures if is_accuracy_of_clients(name)]
    names = list(dict.fromkeys([*accuracies[:1], *accuracies[-1:]]))
    heads = [shown(by_threshold(name, choice)) for name in names for choice in CHOICES]
    lines = [f"| | {' | '.join(heads)} |", f"| --- |{' --- |' * len(heads)}"]
    for row in rows:
        own = [trial for trial in trials if trial.row == row.name]
        cells = []
        for name in names:
            if row.name not in gated:
                cells += [_cell([trial.measures[name] for trial in own]), NO_GATE, NO_GATE]
                continue
            for choice in CHOICES:
                key = by_threshold(name, choice)
                cells.append(_cell([trial.measures.get(key, math.nan) for trial in own]))
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return [_ABOUT_THRESHOLDS, "\n".join(lines)]


def _gated(table: Table, trials: Iterable[Trial]) -> set[str]:
    """Rows whose clients are answered by gated pairs."""
    return {
        trial.row
        for trial in trials
        for name in table.measures
        if of_clients(name) and by_threshold(name, "oracle") in trial.measures
    }


def _headline(name: str, trials: Iterable[Trial]) -> str:
    """Name of a measure's column: with the choice of thresholds where any row has gated pairs."""
    for choice in CHOICES:
        if any(by_threshold(name, choice) in trial.measures for trial in trials):
            return by_threshold(name, choice)
    return name
