"""Output of commands: JSON on stdout, reports in files, and a hint after Ctrl-C."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson
import typer

from edge_sdk.errors import ConfigurationError

if TYPE_CHECKING:  # rich takes 60 ms to import, and a script's commands draw nothing
    from rich.console import Console
    from rich.status import Status
    from rich.table import Table

WIDE: Final = 1000  # columns


def print_json(value: object) -> None:
    """Print `value` for a script to read."""
    typer.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


def print_table(table: Table) -> None:
    """Print a table of which nothing is cut off.

    On a terminal that is too narrow, long names go on in the next line; in a file or a pipe the
    table is as wide as its content. Its text is printed as it is: a peer's words may hold what
    looks like markup.
    """
    from rich.console import Console

    for column in table.columns:
        column.overflow, column.no_wrap = "fold", False
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(width=WIDE, markup=False, emoji=False)
    console.print(table)


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells as a table; the first row is the heading."""
    from rich.table import Table

    head, *others = rows
    table = Table(*head)
    for cells in others:
        table.add_row(*cells)
    print_table(table)


def check_target(option: str, path: Path, *, folder: bool) -> None:
    """Check that a file or folder can be made at a path, before the minutes of work that it needs.

    Args:
        folder: whether a folder is to be there. Missing folders above it are made later.
    Raises: ConfigurationError.
    """
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    wanted = "a folder" if folder or there != path else "a file"
    if there.is_dir() != (wanted == "a folder"):
        got = "a folder" if there.is_dir() else "a file"
        raise ConfigurationError(f"{option} {path}: expected {wanted} at {there}, got {got}")
    if not os.access(there, os.W_OK):
        raise ConfigurationError(f"{option} {path}: this user cannot write at {there}")


def check_report(path: Path | None) -> None:
    """Check that the file of `--report` can be made; missing folders above it are made later.

    Raises: ConfigurationError.
    """
    if path is not None:
        check_target("--report", path, folder=False)


@contextmanager
def waiting(for_what: str) -> Iterator[None]:
    """Show on a terminal's stderr, while the block runs, what is waited for."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(for_what):
        yield


class Progress:
    """Progress of long work, on stderr: a spinner with the step under way, and a line a result."""

    def __init__(self, console: Console, status: Status) -> None:
        self._console = console
        self._status = status

    def step(self, text: str) -> None:
        """Show what is under way from now on."""
        self._status.update(text)

    def __call__(self, line: str) -> None:
        """Print a line that stays."""
        self._status.update(line)
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress(first: str) -> Iterator[Progress]:
    """Show progress while the block runs.

    Args:
        first: the first step.
    """
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(first) as status:
        yield Progress(console, status)


@contextmanager
def resumable(how: str = "continue with --resume") -> Iterator[None]:
    """Print on Ctrl-C and SIGTERM how to resume: for a block that saves each round it completes."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        typer.echo(f"stopped; completed rounds are saved: {how}", err=True)
        raise
