"""Facts of the training page: the rounds of each training, read out of its log as it grows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final

import orjson

from edge_sdk.state import is_held

LOG: Final = "log.jsonl"
REPORT: Final = "report.json"
ROUNDS_MOST: Final = 2_000
LINE_BYTES: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class RoundFacts:
    """One round.

    Attributes:
        accuracy: None where it was not measured after this round.
        missing: devices that sent no update, and why, as far as it is known.
    """

    round: int
    accuracy: float | None
    loss: float | None
    bytes_up: int
    bytes_down: int
    seconds: float
    participants: list[str]
    missing: dict[str, str]
    refused: dict[str, str]


@dataclass(frozen=True, slots=True)
class LogFacts:
    """The rounds of a training that have ended.

    Attributes:
        rounds: the newest 2,000, oldest first.
        ended: the number of all rounds. bytes_up, bytes_down: the traffic of all.
    """

    rounds: list[RoundFacts]
    ended: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """One training with devices.

    Attributes:
        state: `running` while a trainer has it; `finished` once its report is written.
        changed_at: time of the last round, UTC seconds since 1970.
        log: its rounds; empty for the trainings that are not shown.
        rounds_wanted: of the recipe; known of a finished training only.
    """

    name: str
    state: str
    changed_at: float
    log: LogFacts
    rounds_wanted: int | None = None
    method: str | None = None
    dataset: str | None = None


def training_facts(folder: Path, shown: str | None = None) -> list[TrainingFacts]:
    """Every training under a server's `training` folder, the one that changed last first.

    Args:
        shown: the one whose rounds are read; the first where there is none of that name.
    """
    found = [_training(each) for each in folder.glob("*/") if not each.name.startswith(".")]
    found.sort(key=lambda one: -one.changed_at)
    nth = next((nth for nth, one in enumerate(found) if one.name == shown), 0)
    for one in found[nth : nth + 1]:
        found[nth] = replace(one, log=_log_of(folder / one.name / LOG))
    return found


def _training(folder: Path) -> TrainingFacts:
    log = folder / LOG
    running = is_held(folder, "training")
    report = _report_of(folder / REPORT)
    try:
        changed_at = (log if log.exists() else folder).stat().st_mtime
    except OSError:  # removed meanwhile
        changed_at = 0.0
    ended = "stopped" if report is None else "finished"
    made = TrainingFacts(folder.name, "running" if running else ended, changed_at, LogFacts([]))
    if report is None:
        return made
    return replace(
        made,
        rounds_wanted=report.rounds_wanted,
        method=report.method,
        dataset=report.dataset,
    )


def _log_of(log: Path) -> LogFacts:
    """The rounds in a log, which is read again only when it has changed."""
    try:
        state = log.stat()
    except OSError:  # no round has ended yet
        return LogFacts([])
    return _read_once(log, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=4)
def _read_once(log: Path, _mtime_ns: int, _size_bytes: int) -> LogFacts:
    return read_log(log)


def read_log(log: Path) -> LogFacts:
    """The rounds in a training's log; a line that is being written is left out."""
    newest: deque[RoundFacts] = deque(maxlen=ROUNDS_MOST)
    ended = bytes_up = bytes_down = 0
    try:
        with log.open("rb") as file:
            for line in file:
                found = _round(line) if len(line) <= LINE_BYTES else None
                if found is not None:
                    newest.append(found)
                    ended += 1
                    bytes_up += found.bytes_up
                    bytes_down += found.bytes_down
    except OSError:  # no round has ended yet
        return LogFacts([])
    return LogFacts(list(newest), ended, bytes_up, bytes_down)


def _round(line: bytes) -> RoundFacts | None:
    """The round of a line; None for a line that is not whole, or of a release that wrote others."""
    try:
        row = orjson.loads(line)
        why = row.get("missing_why", {})
        return RoundFacts(
            round=row["round"],
            accuracy=row["accuracy"],
            loss=row["loss"],
            bytes_up=row["bytes_up"],
            bytes_down=row["bytes_down"],
            seconds=row["seconds"],
            participants=row["participants"],
            missing={str(name): why.get(name, "no reply in time") for name in row["missing"]},
            refused={name: str(reason) for name, reason in row.get("refused", {}).items()},
        )
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class _Report:
    """Fields of the report of a finished training, as far as they are shown."""

    rounds_wanted: int | None
    method: str | None
    dataset: str | None


def _report_of(path: Path) -> _Report | None:
    """The report of a training; None before its end."""
    try:
        state = path.stat()
    except OSError:
        return None
    return _report_once(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=256)
def _report_once(path: Path, _mtime_ns: int, _size_bytes: int) -> _Report | None:
    try:
        report = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    rounds = _member(_member(_member(report, "recipe"), "train"), "rounds")
    method, dataset = _member(report, "method"), _member(report, "dataset")
    return _Report(
        rounds if isinstance(rounds, int) else None,
        method if isinstance(method, str) else None,
        dataset if isinstance(dataset, str) else None,
    )


def _member(data: object, name: str) -> object:
    return data.get(name) if isinstance(data, dict) else None
