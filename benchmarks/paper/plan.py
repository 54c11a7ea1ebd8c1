"""The order in which a runner takes the rows of the tables, and what is left of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.jobs.job import Job
from benchmarks.paper.recipes import job_of
from benchmarks.paper.tables.catalog import TABLES
from benchmarks.paper.tables.table import Scale

# At `smoke` and `cpu` each table is done alone, the most important first, so that a stop leaves
# whole tables. Tables that are not named follow.
OF_PAPERS: Final[Sequence[str]] = (
    "default",
    "besplit",
    "besplit-iid",
    "splitlpf-udd",
    "harmony",
    "scala",
    "splitlpf-uds",
    "splitlpf-udds",
    "splitlpf-alpha",
    "supersfl-fusion",
    "supersfl",
    "scala-cut",
)
# Tables of the full scale that are done together, one seed of all their rows before the next seed:
# figures that are compared were then made in the same hours.
FULL: Final[Sequence[Sequence[str]]] = (
    ("splitlpf-uds", "splitlpf-udd", "splitlpf-udds"),
    ("supersfl-fusion-cnn6", "supersfl-availability-cnn6"),
    ("harmony-cnn6", "besplit-cnn6"),
    ("scala-60",),
    ("splitlpf-alpha",),
    ("harmony", "besplit"),
    ("scala", "scala-cut"),
    ("supersfl", "supersfl-fusion"),
    ("default",),
)
# Their networks take days a row on a CPU.
FOR_GPU: Final = frozenset(
    ("besplit", "default", "harmony", "scala", "scala-cut", "supersfl", "supersfl-fusion")
)


def groups_of(names: Sequence[str], scale: Scale) -> Iterator[Sequence[str]]:
    """Tables that are done together, the most important first; only those of `names`."""
    groups = FULL if scale == "full" else [(name,) for name in dict.fromkeys([*OF_PAPERS, *TABLES])]
    for group in groups:
        chosen = [name for name in group if name in names and scale in TABLES[name].scales]
        if chosen:
            yield chosen


def jobs_of(
    groups: Sequence[Sequence[str]],
    scale: Scale,
    seeds: int,
    rows: Sequence[str] = (),
    data: Path | None = None,
) -> list[Job]:
    """All trainings of these tables at a scale, in the order of their groups, seed by seed.

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
    return scale == "full" and device == "cpu" and name in FOR_GPU


def by_table(jobs: Sequence[Job]) -> Mapping[str, Mapping[str, Sequence[Job]]]:
    """Jobs by table and row."""
    found: dict[str, dict[str, list[Job]]] = {}
    for job in jobs:
        found.setdefault(job.table, {}).setdefault(job.row, []).append(job)
    return found
