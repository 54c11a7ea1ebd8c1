"""The record of a run on disk: after each round a checkpoint and a line of the log.

FOLDER/checkpoints/    the last two rounds (server.training.run.checkpoint)
FOLDER/log.jsonl       one line a round
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import orjson

from edge_sdk.durable import write_atomic
from server.training.run.checkpoint import save_checkpoint
from server.training.run.run import Row, Run

LOG: Final = "log.jsonl"

OnRound = Callable[[Row], None]


def record_rounds(
    folder: Path,
    run: Run,
    rows: list[Row],
    rounds: Iterable[Row],
    on_round: OnRound,
    *,
    on_saved: Callable[[], None] | None = None,
) -> None:
    """Run the rounds that are left; save and log each before the next begins.

    Args:
        rows: the report's rounds so far; `rounds` appends to them.
        rounds: runs one round at each iteration and yields its row.
        on_round: called with each row, those of `rows` first.
        on_saved: called as soon as a round's checkpoint is written, before anything else that may
            fail: a file whose content the checkpoint now holds can go.
    Raises: StorageError.
    """
    log = folder / LOG
    # checkpoints decide which rounds count: a round that was logged and not saved is logged again
    write_atomic(log, b"".join(map(line_of, rows)))
    for row in rows:
        on_round(row)
    for row in rounds:
        with run.loop.paused():
            save_checkpoint(folder, run, rows)
        if on_saved is not None:
            on_saved()
        with log.open("ab") as file:
            file.write(line_of(row))
        on_round(row)


def line_of(row: Row) -> bytes:
    """A row as the log has it."""
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
