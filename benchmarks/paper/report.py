"""The report of a paper's table: its trials as JSON, and our figures next to the paper's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import reports
from benchmarks.intervals import mean_interval
from benchmarks.paper.measures import shown
from benchmarks.paper.tables import Row, Table

RESULTS: Final = reports.RESULTS / "paper"


@dataclass(frozen=True, slots=True)
class Trial:
    """One row, trained with one seed.

    Attributes:
        measures: in %, by name.
        seconds: of training, without evaluation. megabytes: up and down.
        curve: accuracy by round, in %.
    """

    row: str
    seed: int
    measures: Mapping[str, float]
    seconds: float
    megabytes: float
    curve: list[float | None]


def write_report(
    path: Path, table: Table, rows: list[Row], trials: list[Trial], how: dict[str, Any]
) -> str:
    """Write the report of one table.

    Args:
        how: `scale` and `command`.
    Returns: the table as markdown.
    Raises: StorageError.
    """
    seeds = sorted({trial.seed for trial in trials})
    about = (
        how
        | reports.provenance()
        | {
            "title": table.title,
            "source": table.source,
            "paper_data": table.data,
            "seeds": seeds,
            "recipe": table.scales[how["scale"]],
        }
    )
    report = about | {
        "rows": [{"name": row.name, "recipe": row.recipe, "paper": row.paper} for row in rows],
        "runs": [asdict(trial) for trial in trials],
    }
    printed = any(row.paper for row in rows)
    data = f"the paper's figures are of {table.data}" if printed else table.data
    source = (
        f"{table.source}; {data}. Ours: scale `{how['scale']}`,"
        f" seeds {', '.join(map(str, seeds))}, mean ± half width of the 95 % interval, in %."
    )
    blocks = [f"# {table.title}", source, reports.made_by(about), _markdown(table, rows, trials)]
    reports.write(path, report, blocks)
    return blocks[-1]


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
