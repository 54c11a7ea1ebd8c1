"""The record of a run on disk: after each round a checkpoint and a line of the log.

FOLDER/checkpoints/    the last two rounds (server.training.run.checkpoint)
FOLDER/log.jsonl       one line a round
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import orjson

from edge_sdk.durable import write_atomic
from edge_sdk.errors import ConfigurationError
from server.training.recipe.recipe import Recipe
from server.training.rounds.reply_checks import Fault
from server.training.run.checkpoint import save_checkpoint
from server.training.run.run import Row, Run

LOG: Final = "log.jsonl"
# fewer clients may be broken, or mean harm: then so many rounds in a row must say the same
CLIENTS_LEAST: Final = 3
ROUNDS_LEAST: Final = 3


class DivergedError(ConfigurationError):
    """A round ended in weights that are past use; the text says what to change."""


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
    Raises: StorageError; DivergedError after a round that diverged, which is neither saved nor
        logged.
    """
    log = folder / LOG
    # checkpoints decide which rounds count: a round that was logged and not saved is logged again
    write_atomic(log, b"".join(map(line_of, rows)))
    for row in rows:
        on_round(row)
    in_a_row = 0
    for row in rounds:
        in_a_row = _check_learning(row, run.recipe, in_a_row)
        with run.loop.paused():
            save_checkpoint(folder, run, rows)
        if on_saved is not None:
            on_saved()
        with log.open("ab") as file:
            file.write(line_of(row))
        on_round(row)


def _check_learning(row: Row, recipe: Recipe, before: int) -> int:
    """Check that a round learnt: further ones would start from weights that are past use.

    It did not if the loss is not finite, or if it merged nothing because most clients sent numbers
    that are not finite. Where something was merged, the bad clients are a minority. A round of one
    or two such clients says little, for they may be broken: ROUNDS_LEAST in a row do.

    Args:
        before: rounds in a row before this one that merged nothing for that reason.
    Returns: the same with this one.
    Raises: DivergedError saying what to change.
    """
    refused = [name for name, fault in row["faults"].items() if fault == Fault.NOT_FINITE]
    answered = len(row["participants"]) + len(row["refused"])
    most = not row["merged"] and 2 * len(refused) > answered
    in_a_row = before + 1 if most else 0
    diverged = most and (len(refused) >= CLIENTS_LEAST or in_a_row >= ROUNDS_LEAST)
    lost = row["loss"] is not None and not math.isfinite(row["loss"])
    if diverged or lost:
        what = f"{len(refused)} of {answered} clients" if diverged else "the loss"
        rate = recipe.train.training.learning_rate
        noisy = recipe.privacy.noise() is not None
        noise = ", lower the noise of [privacy], which may be too strong," if noisy else ","
        raise DivergedError(
            f"round {row['round']} diverged: {what} reached infinity or NaN, with [train]"
            f" learning_rate = {rate:g}; try a tenth of it{noise} and look at the scale of the"
            " data; nothing of this round was saved"
        )
    return in_a_row


def line_of(row: Row) -> bytes:
    """A row as the log has it."""
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
