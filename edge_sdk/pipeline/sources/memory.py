"""Memory of a source across restarts: the files it has read, or the place in a file.

Both lie in the folder `stream` of the device's state. They are written without a sync at each
answer, to spare the card: after a power cut the newest inputs may be read a second time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import orjson

from edge_sdk.durable import make_folder, write_atomic
from edge_sdk.errors import StorageError

logger = logging.getLogger(__name__)

FOLDER: Final = "stream"
# A place in a file is saved at most this often.
SAVE_EVERY_S: Final = 10.0
# Names of files that are gone are forgotten once they are this many, and more than the others.
GONE_MAX: Final = 1000

Stamp = tuple[int, int]  # size in bytes, time of the last change in ns


def memory_file(state: Path | None, kind: str, path: Path) -> Path | None:
    """The file that remembers for the source of that kind and path; None without a state folder."""
    if state is None:
        return None
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return state / FOLDER / f"{kind}-{name}.json"


class SeenFiles:
    """Files of one folder that were read, by name, size and time of their last change.

    Args:
        file: lines of `[name, size, time]`; None remembers in this process alone.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._stamps: dict[str, Stamp] = {}
        self._failed = False
        self._lines = 0  # of the file
        if file is not None:
            self._load(file)

    def __len__(self) -> int:
        return len(self._stamps)

    def has(self, name: str, stamp: Stamp) -> bool:
        """Whether that file, as it is, was read."""
        return self._stamps.get(name) == stamp

    def add(self, name: str, stamp: Stamp) -> None:
        """Remember that the file was read. A disk that is full forgets it at the next start."""
        with self._lock:
            self._stamps[name] = stamp
            if self._file is None:
                return
            if self._lines > 2 * len(self._stamps) + GONE_MAX:  # a file that changes all the time
                self._write(self._file)
                return
            try:
                make_folder(self._file.parent, mode=0o700)
                with self._file.open("ab") as lines:
                    lines.write(orjson.dumps([name, *stamp]) + b"\n")
                self._lines += 1
            except (OSError, StorageError) as err:
                self._say(err)

    def keep_only(self, present: Collection[str]) -> None:
        """Forget files that are gone, once they are many."""
        with self._lock:
            gone = [name for name in self._stamps if name not in present]
            if len(gone) <= max(GONE_MAX, len(present)):
                return
            for name in gone:
                del self._stamps[name]
            if self._file is not None:
                self._write(self._file)

    def _write(self, file: Path) -> None:
        """Replace the file by one line for each that is remembered."""
        lines = [orjson.dumps([name, *stamp]) for name, stamp in self._stamps.items()]
        try:
            write_atomic(file, b"".join(line + b"\n" for line in lines), mode=0o600)
            self._lines = len(lines)
        except StorageError as err:
            self._say(err)

    def _load(self, file: Path) -> None:
        with suppress(FileNotFoundError):
            for line in file.read_bytes().splitlines():
                self._lines += 1
                try:
                    name, size, changed = orjson.loads(line)
                except ValueError:  # the last line before a power cut
                    continue
                self._stamps[name] = (size, changed)

    def _say(self, err: Exception) -> None:
        if not self._failed:
            self._failed = True
            logger.warning("files that were read are forgotten at the next start: %s", err)


class SavedPlace:
    """The place in a file at which the next start goes on.

    Args:
        file: JSON of the place; None remembers in this process alone.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._place: Mapping[str, Any] = {}
        self._saved: Mapping[str, Any] = {}
        self._saved_at = time.monotonic()
        if file is not None:
            with suppress(FileNotFoundError, ValueError):
                read = orjson.loads(file.read_bytes())
                self._place = self._saved = read if isinstance(read, dict) else {}

    @property
    def place(self) -> Mapping[str, Any]:
        """The place; empty if there is none."""
        return self._place

    def move(self, place: Mapping[str, Any]) -> None:
        """Remember a place; it is saved now and then."""
        self._place = place
        if time.monotonic() - self._saved_at >= SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Write the place to the disk. A disk that is full goes on from an older place."""
        self._saved_at = time.monotonic()
        if self._file is None or self._place == self._saved:
            return
        try:
            make_folder(self._file.parent, mode=0o700)
            write_atomic(self._file, orjson.dumps(self._place), mode=0o600)
            self._saved = self._place
        except StorageError as err:
            logger.warning("the place in the source was not saved: %s", err)
