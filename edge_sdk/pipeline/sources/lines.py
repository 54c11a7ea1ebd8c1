"""Lines out of chunks of bytes, and of a file that grows, as `tail -F` follows it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from edge_sdk.pipeline.sources.feed import Feed

POLL_S: Final = 0.2
CHUNK_BYTES: Final = 65_536
LINE_BYTES_MAX: Final = 1_000_000
# so many bytes before a place tell a file from another with its inode
BEFORE_BYTES: Final = 64


class LineSplitter:
    """Chunks in, whole lines out. A line above the limit is dropped and counted.

    Args:
        limit: most bytes of a line.
    Attributes:
        too_long, dropped_bytes: lines that were dropped, and their bytes.
    """

    def __init__(self, limit: int = LINE_BYTES_MAX) -> None:
        self.too_long = self.dropped_bytes = 0
        self._limit = limit
        self._held = bytearray()
        self._dropping = False

    def push(self, chunk: bytes) -> Iterator[bytes]:
        """The lines that this chunk completes, each with its line feed."""
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            line = bytes(self._held) + chunk[start : end + 1]
            self._held.clear()
            start = end + 1
            if self._dropping or len(line) > self._limit:
                self.too_long += not self._dropping
                self.dropped_bytes += len(line)
                self._dropping = False
                continue
            yield line
        self._held += chunk[start:]
        if len(self._held) > self._limit:
            self.too_long += not self._dropping
            self.dropped_bytes += len(self._held)
            self._dropping = True
            self._held.clear()

    def counted(self, line: bytes) -> tuple[int, int]:
        """Lines and bytes of the line that was given last, with those dropped since the one before.

        The counts of what was dropped begin anew.
        """
        counts = 1 + self.too_long, len(line) + self.dropped_bytes
        self.too_long = self.dropped_bytes = 0
        return counts

    @property
    def begun(self) -> bytes:
        """The line that was begun; empty if it is above the limit."""
        return b"" if self._dropping else bytes(self._held)

    def rest(self) -> bytes:
        """Forget the line that was begun.

        Returns: it, without a line feed.
        """
        rest = self.begun
        self._held.clear()
        self._dropping = False
        return rest


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file.

    Attributes:
        text: without its end, and without a byte order mark.
        number: from 1.
        end: offset of the byte after it.
        first: whether no line of the file was given before it, or it is given again.
        again: whether the reading begins behind it, as after a restart or where the file was away:
            the first line that is neither blank nor above the limit, for its header alone.
        gap: whether lines are missing before it.
    """

    text: str
    number: int
    end: int
    first: bool = False
    again: bool = False
    gap: bool = False


class GrowingFile:
    """Lines of a file as they are written, by its name: a file that is rotated is followed.

    A last line without a line feed waits until it has one, or until another file has its name.

    Args:
        path: it may come and go.
        place: where an earlier run stopped: `file` (device and inode), `offset`, `line`, and
            `before`: number and digest of bytes before the offset, as a new file may get the inode
            of an old one. A place of an older release lacks it.
        from_end: begin with the lines that are written from now on.
    """

    def __init__(
        self, path: Path, place: Mapping[str, Any] | None = None, *, from_end: bool = False
    ) -> None:
        self._path = path
        self._place: Mapping[str, Any] = place or {}
        self._from_end = from_end
        self._splitter = LineSplitter()
        self._file: BinaryIO | None = None
        self._identity: list[int] = []
        self._number = 0  # of the last line that was given
        self._end = 0  # offset after it
        self._before = b""  # the last bytes before that offset
        self._gap = False

    def lines(self, feed: Feed) -> Iterator[Line]:
        """The lines, until the feed stops."""
        away = False
        while not feed.stopped:
            try:
                if self._file is None:
                    yield from self._open(self._path.open("rb"), gap=away)
                    away = False
                feed.back()
                yield from self._read(feed)
            except OSError as err:
                away = True
                if isinstance(err, FileNotFoundError):
                    self._from_end = False  # a file that comes later is new as a whole
                self._leave()
                feed.away(err.strerror or str(err))

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def place(self, line: Line) -> dict[str, Any]:
        """The place after the line that was given last, for the next run."""
        return self._place_after(line.number, line.end)

    def _place_after(self, number: int, end: int) -> dict[str, Any]:
        before = [len(self._before), _digest(self._before)]
        return {"file": self._identity, "offset": end, "line": number, "before": before}

    def _leave(self) -> None:
        """Close the file; the same one may come back, and goes on there."""
        if self._identity:
            self._place = self._place_after(self._number, self._end)
        self.close()

    def _open(self, file: BinaryIO, *, gap: bool) -> Iterator[Line]:
        """Begin with a file, after the last line of another one before it.

        Args:
            gap: whether the file was away.
        """
        self._file = file
        status = os.fstat(file.fileno())
        place, identity = self._place, [status.st_dev, status.st_ino]
        known = place.get("file") == identity and _was_read(file, place, status.st_size)
        begun = self._splitter.begun
        if known and begun:
            file.seek(int(place["offset"]) + self._splitter.dropped_bytes)
            known = file.read(len(begun)) == begun
        header = _header(file) if known or self._from_end else None
        number = end = 0
        if known:
            number, end = int(place["line"]), int(place["offset"])
        elif header is not None:
            number, end = header.number, _last_line_end(file, status.st_size)
        before = _bytes_before(file, end, BEFORE_BYTES)
        # from here on nothing is read that could fail, and lose the place
        if begun and not known:  # a known file gives it again, with the rest of its line
            yield self._line(begun)
        self._place, self._from_end = {}, False
        self._splitter = LineSplitter()
        self._identity, self._number, self._end, self._before = identity, number, end, before
        self._gap = self._gap or gap
        if header is not None and header.end <= end:  # else it is still to come
            yield header

    def _read(self, feed: Feed) -> Iterator[Line]:
        """Read to the end of the file, and look whether another file has its name now."""
        yield from self._chunks(feed)
        if self._file is None or feed.stopped:
            return
        try:
            now = self._path.stat()
            moved = [now.st_dev, now.st_ino] != self._identity
        except FileNotFoundError:
            moved = True
        if moved:
            feed.wait(POLL_S)  # the writer may end its last line in the old file
            yield from self._chunks(feed)
            self._leave()
        elif now.st_size < self._file.tell():  # cut short: its lines begin anew
            self._splitter = LineSplitter()
            self._file.seek(0)
            self._number = self._end = 0
            self._before = b""
        else:
            feed.wait(POLL_S)

    def _chunks(self, feed: Feed) -> Iterator[Line]:
        while not feed.stopped and self._file is not None:
            chunk = self._file.read(CHUNK_BYTES)
            if not chunk:
                return
            for raw in self._splitter.push(chunk):
                yield self._line(raw)

    def _line(self, raw: bytes) -> Line:
        first = not self._end
        lines, size = self._splitter.counted(raw)
        dropped = lines > 1
        self._before = (raw if dropped else self._before + raw)[-BEFORE_BYTES:]
        self._number += lines
        self._end += size
        gap, self._gap = self._gap or dropped, False
        return Line(_text(raw), self._number, self._end, first=first, gap=gap)


def _header(file: BinaryIO) -> Line | None:
    """The first line that is neither blank nor above the limit; None while there is none."""
    file.seek(0)
    splitter = LineSplitter()
    number = end = 0
    while chunk := file.read(CHUNK_BYTES):
        for raw in splitter.push(chunk):
            lines, size = splitter.counted(raw)
            number, end = number + lines, end + size
            text = _text(raw)
            if text.strip():
                return Line(text, number, end, first=True, again=True)
    return None


def _text(raw: bytes) -> str:
    return raw.decode("utf-8-sig", "replace").rstrip("\r\n")


def _was_read(file: BinaryIO, place: Mapping[str, Any], size: int) -> bool:
    """Whether the file, of that size, is the one that was read up to the place; it is rewound."""
    end = int(place.get("offset", 0))
    if end > size:
        return False
    if "before" not in place:
        return True
    length, digest = place["before"]
    same: bool = _digest(_bytes_before(file, end, length)) == digest
    file.seek(0)
    return same


def _bytes_before(file: BinaryIO, end: int, length: int) -> bytes:
    """At most `length` bytes before that offset, to which the file is moved."""
    start = max(0, end - length)
    file.seek(start)
    return file.read(end - start)


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]


def _last_line_end(file: BinaryIO, size: int) -> int:
    """Offset after the last line feed within the last chunk of a file."""
    start = max(0, size - LINE_BYTES_MAX)
    file.seek(start)
    last = file.read(size - start).rfind(b"\n")
    return size if last < 0 else start + last + 1
