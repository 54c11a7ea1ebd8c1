"""Trainings of this server, as far as an alert asks: which run, and when their last round ended.

A trainer is a process of its own. It holds a lock in the folder of its training, and adds a line to
the log there after each round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from edge_sdk.state import is_held

LOG: Final = "log.jsonl"
LOCK: Final = "training"
TAIL_BYTES: Final = 262_144
ROUNDS: Final = 10


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """A training that runs.

    Attributes:
        moved_at: end of its last round, or its start where none has ended; UTC seconds since 1970.
        rounds_s: seconds of the last rounds, at most ROUNDS.
    """

    name: str
    moved_at: float
    rounds_s: tuple[float, ...] = ()


def running_trainings(folder: Path) -> list[TrainingFacts]:
    """The trainings under a server's `training` folder that a trainer has now, by name."""
    return list(_running(folder))


def _running(folder: Path) -> Iterator[TrainingFacts]:
    for each in sorted(folder.glob("*/")):
        if each.name.startswith(".") or not is_held(each, LOCK):
            continue
        times = [_changed_at(each / name) for name in (f"{LOCK}.lock", LOG)]
        yield TrainingFacts(each.name, max(times), _last_rounds(each / LOG))


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # no round has ended yet
        return 0.0


def _last_rounds(log: Path) -> tuple[float, ...]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).splitlines()
    except OSError:
        return ()
    found = (_seconds(line) for line in lines[-ROUNDS:])
    return tuple(seconds for seconds in found if seconds is not None)


def _seconds(line: bytes) -> float | None:
    """Seconds of the round in a line; None for a line that is not whole."""
    try:
        return float(orjson.loads(line)["seconds"])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return None
