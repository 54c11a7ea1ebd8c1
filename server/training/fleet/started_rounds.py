"""Rounds under noise on the server's disk before anybody is asked for anything in them.

    FOLDER/begun.jsonl      {"round": 3, "samples": {"pi-0": 120, "pi-1": 95}}

What devices gave in a round that a kill interrupted is in no row of the report, and given all the
same: the accountant (server.training.recipe.privacy) counts it from here. A simulation needs none
of this: a round that it begins again draws the same noise.
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
    """Those of one training's folder.

    Args:
        folder: it exists.
        resume: whether the training goes on; else what is there is of another one, and goes.
    Raises: StorageError where the file cannot be read: what was given is then not known.
    """

    def __init__(self, folder: Path, *, resume: bool) -> None:
        self._path = folder / FILE
        raw = self._path.read_bytes() if resume and self._path.is_file() else b""
        # a line that was not whole was not begun by
        lines = raw[: raw.rfind(b"\n") + 1].splitlines()
        try:
            said = [orjson.loads(line) for line in lines]
            self._begun = [(int(each["round"]), dict(each["samples"])) for each in said]
        except (ValueError, KeyError, TypeError) as err:
            raise StorageError(
                f"{self._path}: expected a round a line, cannot be read ({err}); what devices gave"
                " is not known any more: remove the folder to begin anew"
            ) from err
        write_atomic(self._path, b"".join(line + b"\n" for line in lines))

    def begin(self, number: int, devices: Iterable[str], there: Samples) -> None:
        """Have it on the disk that this round begins.

        Args:
            devices: who may be asked in it; who is away now may come back meanwhile.
            there: n_k as each said that has come since the trainer was started.
        Raises: StorageError.
        """
        known = {name: n for _, each in self._begun for name, n in each.items()} | dict(there)
        samples = {name: known[name] for name in devices if name in known}
        line = orjson.dumps({"round": number, "samples": samples}) + b"\n"
        try:
            with self._path.open("ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as err:
            raise storage_error(self._path, len(line), err) from err
        self._begun.append((number, samples))

    def interrupted(self, rows: Sequence[Mapping[str, Any]]) -> list[Samples]:
        """Of each round that began and is in no row, n_k by device.

        Args:
            rows: the report's; of a round begun several times the last one ended in its row.
        """
        left = {row["round"] for row in rows}
        found: list[Samples] = []
        for number, samples in reversed(self._begun):
            if number in left:
                left.remove(number)
            else:
                found.append(samples)
        return found[::-1]
