"""A journal of rounds under noise, written before any device is asked for anything in them.

    FOLDER/begun.jsonl      {"round": 3, "samples": {"pi-0": 120, "pi-1": 95}}

A round that a kill interrupted is in no row of the report, and its devices sent data all the same:
the accountant (server.training.recipe.privacy) counts them from here. A simulation needs no
journal: a round that it starts again draws the same noise.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from edge_sdk.durable import storage_error, write_atomic
from edge_sdk.errors import StorageError

FILE: Final = "begun.jsonl"

Samples = Mapping[str, int]


class RoundJournal:
    """The rounds that were started in one training's folder.

    Args:
        folder: an existing one.
        resume: whether the training goes on; else the journal of an earlier one is emptied.
    Raises: StorageError if the file cannot be read: then what devices sent is not known.
    """

    def __init__(self, folder: Path, *, resume: bool) -> None:
        self._path = folder / FILE
        raw = self._path.read_bytes() if resume and self._path.is_file() else b""
        # where a line is not whole, no device was asked in its round yet
        lines = raw[: raw.rfind(b"\n") + 1].splitlines()
        try:
            entries = [orjson.loads(line) for line in lines]
            self._started = [(int(each["round"]), dict(each["samples"])) for each in entries]
        except (ValueError, KeyError, TypeError) as err:
            raise StorageError(
                f"{self._path}: expected a round a line, cannot be read ({err}); what devices sent"
                " is not known any more: remove the folder to start again"
            ) from err
        write_atomic(self._path, b"".join(line + b"\n" for line in lines))

    def begin(self, number: int, devices: Iterable[str], joined: Samples) -> None:
        """Write to the disk that this round begins.

        Args:
            devices: those that may be asked in it; one that is away now may come back meanwhile.
            joined: n_k by device, of those that joined since the trainer was started.
        Raises: StorageError.
        """
        known = {name: n for _, each in self._started for name, n in each.items()} | dict(joined)
        samples = {name: known[name] for name in devices if name in known}
        line = orjson.dumps({"round": number, "samples": samples}) + b"\n"
        try:
            with self._path.open("ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as err:
            raise storage_error(self._path, len(line), err) from err
        self._started.append((number, samples))

    def interrupted(self, rows: Sequence[Mapping[str, Any]]) -> list[Samples]:
        """n_k by device, for each round that began and is in no row.

        Args:
            rows: the report's; where a round began several times, the row is that of the last time.
        """
        left = {row["round"] for row in rows}
        found: list[Samples] = []
        for number, samples in reversed(self._started):
            if number in left:
                left.remove(number)
            else:
                found.append(samples)
        return found[::-1]
