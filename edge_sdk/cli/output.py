"""What commands write: JSON on stdout, reports in files, and how to go on after Ctrl-C."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import typer

from edge_sdk.errors import ConfigurationError


def print_json(value: object) -> None:
    """Print `value` for a script to read."""
    typer.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


def check_report(path: Path | None) -> None:
    """Refuse a report that cannot be written before the minutes that it takes, not after.

    Raises: ConfigurationError.
    """
    if path is None:
        return
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigurationError(
            f"--report {path}: cannot be written; name a file in a folder that is there"
        )


@contextmanager
def resumable() -> Iterator[None]:
    """Around what keeps every round it has done: say on Ctrl-C that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("stopped; the rounds that are done are kept: go on with --resume", err=True)
        raise
