"""Reports of benchmarks: where they are written, and how their figures were made."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import orjson
import typer

from edge_sdk import __version__
from edge_sdk.durable import make_folder, write_atomic

ROOT: Final = Path(__file__).parents[1]
RECIPES: Final = ROOT / "examples" / "recipes"
RESULTS: Final = Path(__file__).parent / "results"

# Options that benchmarks share.
Data = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the data set's files.")]
Seeds = Annotated[int, typer.Option(min=1, help="Number of seeds: 0, 1, ...")]
Hours = Annotated[
    float | None,
    typer.Option(min=0, help="Stop after so many hours.", show_default="no end"),
]
Work = Annotated[
    Path,
    typer.Option(
        metavar="DIR",
        show_default="a folder in splitedge-runs",
        help="Folder of trainings that are under way.",
    ),
]
Results = Annotated[
    Path,
    typer.Option(metavar="DIR", show_default="benchmarks/results", help="Folder of the reports."),
]
PaperResults = Annotated[
    Path,
    typer.Option(
        metavar="DIR", show_default="benchmarks/results/paper", help="Folder of the reports."
    ),
]


def child_environment() -> dict[str, str]:
    """Environment of a child process that imports `benchmarks`, which is not installed."""
    before = os.environ.get("PYTHONPATH")
    path = str(ROOT) if before is None else os.pathsep.join([str(ROOT), before])
    return os.environ | {"PYTHONPATH": path}


def provenance() -> dict[str, Any]:
    """When, by what and on which machine the figures of a report were made."""
    import torch  # noqa: PLC0415 - a benchmark of start-up times imports it on its own time

    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "splitedge": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": f"{_processor()}, {platform.system()}, {os.cpu_count()} cores",
        "commit": commit(),
    }


@functools.cache
def commit() -> str:
    """Short commit of this checkout; `-dirty` where code differs from it, `unknown` without git."""
    command = ["git", "-C", str(ROOT)]
    try:
        found = subprocess.run(
            [*command, "rev-parse", "--short=9", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
        code = [":(top)", ":(top,exclude)benchmarks/results", ":(top,exclude)docs"]
        same = subprocess.run([*command, "diff", "--quiet", "HEAD", "--", *code], check=False)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip() + ("-dirty" if same.returncode else "")


def _processor() -> str:
    """Architecture and model of the processor, as far as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return ", ".join([platform.machine(), *sorted(models)])


def made_by(about: Mapping[str, Any]) -> str:
    """The provenance as a line of a report's text."""
    return (
        f"`{about['command']}`; splitedge {about['splitedge']}, torch {about['torch']},"
        f" {about['threads']} thread(s), {about['machine']}, commit {about['commit']},"
        f" {about['when']}."
    )


def write(
    path: Path, report: Mapping[str, Any], blocks: Iterable[str], *, indent: bool = True
) -> None:
    """Write PATH.json, and PATH.md with these blocks of markdown.

    Raises: StorageError.
    """
    make_folder(path.parent)
    options = orjson.OPT_APPEND_NEWLINE | (orjson.OPT_INDENT_2 if indent else 0)
    write_atomic(path.with_suffix(".json"), orjson.dumps(report, option=options))
    write_atomic(path.with_suffix(".md"), ("\n\n".join(blocks) + "\n").encode())
