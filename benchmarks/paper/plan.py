"""The order in which a runner takes the rows of the tables, and what is left of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.jobs.job import Job
from benchmarks.paper.recipes import job_of
from benchmarks.paper.tables import TABLES, Scale

# Tables that are done together, one seed of all their rows before the next seed: then the figures
# that are compared were made in the same hours. At `smoke` and `cpu` each table is done alone.
FULL: Final[Sequence[Sequence[str]]] = (tuple(TABLES),)


def groups_of(names: Sequence[str], scale: Scale) -> Iterator[Sequence[str]]:
    """Tables that are done together, the most important first; only those of `names`."""
    groups = FULL if scale == "full" else [(name,) for name in TABLES]
    for group in groups:
        chosen = [name for name in group if name in names]
        if chosen:
            yield chosen


def jobs_of(
    groups: Sequence[Sequence[str]],
    scale: Scale,
    seeds: int,
    rows: Sequence[str] = (),
    data: Path | None = None,
) -> list[Job]:
    """All trainings of these tables, in the order of their groups, seed by seed.

    Args:
        rows: names of the rows asked for; empty for all.
        data: folder of the data sets' files.
    """
    return [
        job_of(name, TABLES[name], row, scale, seed, data)
        for group in groups
        for seed in range(seeds)
        for name in group
        for row in TABLES[name].rows
        if not rows or row.name in rows
    ]


def needs_gpu(name: str, scale: Scale, device: str) -> bool:
    """Whether the table waits for a machine with a GPU: its full scale takes days on a CPU."""
    return scale == "full" and device == "cpu" and TABLES[name].gpu


def by_table(jobs: Sequence[Job]) -> Mapping[str, Mapping[str, Sequence[Job]]]:
    """Jobs by table and row."""
    found: dict[str, dict[str, list[Job]]] = {}
    for job in jobs:
        found.setdefault(job.table, {}).setdefault(job.row, []).append(job)
    return found
