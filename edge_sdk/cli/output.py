"""Output of commands: JSON on stdout, reports in files, and a hint after Ctrl-C."""

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
    """Check that a report can be written, before the minutes of work that it needs.

    Raises: ConfigurationError.
    """
    if path is None:
        return
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigurationError(
            f"--report {path}: cannot be written; name a file in an existing folder"
        )


@contextmanager
def resumable() -> Iterator[None]:
    """Print on Ctrl-C how to resume: for a block that saves each round it completes."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("stopped; completed rounds are saved: continue with --resume", err=True)
        raise
