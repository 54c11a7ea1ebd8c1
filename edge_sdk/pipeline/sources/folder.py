"""The source `folder:DIR`: pictures and .npy files as they arrive, each read once it is whole."""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from edge_sdk.errors import InputError
from edge_sdk.pipeline.samples import SAMPLE_SUFFIXES, read_samples
from edge_sdk.pipeline.sources.feed import Feed, Item
from edge_sdk.pipeline.sources.memory import SeenFiles, Stamp
from edge_sdk.pipeline.words import printable

try:
    import fcntl
except ImportError:  # pragma: no cover - not on Windows
    fcntl = None  # type: ignore[assignment]  # Windows has none

logger = logging.getLogger(__name__)

POLL_S: Final = 0.25
# A scan takes at most this share of the time, also in a folder of many files.
SCAN_SHARE: Final = 0.1
# Where it cannot be known whether a file is open for writing, it is whole after as long unchanged.
SETTLE_S: Final = 2.0
# A file that another program keeps open without changing it is read after this time.
HELD_OPEN_S: Final = 60.0

Start = Literal["last", "start", "end"]


@dataclass(frozen=True, slots=True)
class _Found:
    path: Path
    stamp: Stamp

    @property
    def name(self) -> str:
        """The file's name, as the memory of the folder can hold it."""
        return printable(self.path.name)

    @property
    def order(self) -> tuple[int, str]:
        """The order of arrival."""
        return self.stamp[1], self.name


class FolderSource:
    """Files of a folder in the order of their last change. Sub-folders and dot files are left out.

    A file that cannot be read is named, counted and not tried again until it changes.

    Args:
        folder: it may come and go.
        seen: the files that were read before.
        start: `last` reads what was not read before, `start` all files once more, `end` those alone
            that arrive from now on.
    """

    newest = False
    patient = False

    def __init__(self, folder: Path, seen: SeenFiles, start: Start = "last") -> None:
        self._folder = folder
        self._seen = seen
        self._start = start
        self._given: dict[str, Stamp] = {}  # read in this run, and perhaps not answered yet
        self._unchanged: dict[str, tuple[Stamp, float]] = {}  # not whole yet, and since when
        self._left_out: set[str] = set()
        self._folders_said = False

    def items(self, feed: Feed) -> Iterator[Item]:
        """The samples of each file, as it arrives."""
        first = True
        while not feed.stopped:
            begun = time.monotonic()
            try:
                found = self._scan()
            except OSError as err:
                feed.away(err.strerror or str(err))
                continue
            feed.back()
            scan_s = time.monotonic() - begun
            if first and self._start == "end":
                self._given |= {each.name: each.stamp for each in found}
            first = False
            for each in found:
                if self._is_new(each) and self._is_whole(each):
                    self._given[each.name] = each.stamp
                    yield from self._read(each, feed)
            feed.wait(max(POLL_S, scan_s / SCAN_SHARE))

    def answered(self, mark: tuple[str, Stamp]) -> None:
        """Remember that a file is done."""
        self._seen.add(*mark)

    def close(self) -> None:
        """Nothing is held."""

    def _scan(self) -> list[_Found]:
        found = []
        folders = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                with suppress(FileNotFoundError):  # it left meanwhile
                    if not entry.is_file():
                        if entry.is_dir():
                            folders.append(printable(entry.name))
                        continue
                    path = self._folder / entry.name
                    if path.suffix.lower() in SAMPLE_SUFFIXES:
                        status = entry.stat()
                        found.append(_Found(path, (status.st_size, status.st_mtime_ns)))
                    else:
                        self._leave_out(path.suffix)
        if folders and not found:
            self._say_folders(folders)
        present = {each.name for each in found}
        self._seen.keep_only(present)
        for known in (self._given, self._unchanged):
            for name in [name for name in known if name not in present]:
                del known[name]
        return sorted(found, key=lambda each: each.order)

    def _say_folders(self, folders: list[str]) -> None:
        if not self._folders_said:
            self._folders_said = True
            first = min(folders)
            logger.warning(
                "%s: no files to read here yet; folders inside are not read (%d, such as %s): to"
                " read one, name it: folder:%s",
                self._folder,
                len(folders),
                first,
                self._folder / first,
            )

    def _leave_out(self, suffix: str) -> None:
        if suffix not in self._left_out and len(self._left_out) < 20:
            self._left_out.add(suffix)
            named = f"with the ending {suffix}" if suffix else "without an ending"
            logger.warning("%s: files %s are left out; expected %s", self._folder, named, _ENDINGS)

    def _is_new(self, each: _Found) -> bool:
        name = each.name
        if self._given.get(name) == each.stamp:
            return False
        return self._start == "start" or not self._seen.has(name, each.stamp)

    def _is_whole(self, each: _Found) -> bool:
        """Whether no program writes this file."""
        written = _is_written(each.path)
        if written is False and each.stamp[0]:
            self._unchanged.pop(each.name, None)
            return True
        stamp, since = self._unchanged.get(each.name, (None, 0.0))
        now = time.monotonic()
        if stamp != each.stamp:
            self._unchanged[each.name] = (each.stamp, now)
            return False
        return now - since >= (HELD_OPEN_S if written else SETTLE_S)

    def _read(self, each: _Found, feed: Feed) -> Iterator[Item]:
        mark = (each.name, each.stamp)
        try:
            samples = list(read_samples(each.path, feed.spec()))
        except InputError as err:
            if each.path.exists():  # else it left meanwhile
                feed.refuse(str(err), always=True)
                self._seen.add(*mark)
            return
        for number, (name, sample) in enumerate(samples, 1):
            yield Item(name, sample, mark if number == len(samples) else None)


def _is_written(path: Path) -> bool | None:
    """Whether a program has the file open for writing; None where the system does not tell.

    Linux grants a read lease only on files that nobody writes. It does so for the file's owner and
    on local file systems.
    """
    if not hasattr(fcntl, "F_SETLEASE"):
        return None
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # a writer that opens the file now has us told by a signal, which by default ends a process
        fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as err:
        return True if err.errno == errno.EAGAIN else None
    finally:
        os.close(handle)
    return False


_ENDINGS: Final = ", ".join(SAMPLE_SUFFIXES)
