"""Sinks of JSON lines: `-` for standard output, `jsonl:FILE` for a file that is rotated."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

import orjson

from edge_sdk.pipeline.answer import Row
from edge_sdk.pipeline.sinks.sink import SinkGoneError

SIZE_MAX_MB: Final = 100


class StreamWriter:
    """Writes JSON lines to a stream, such as standard output.

    A line of which a disk took a part counts as written: its rest goes out before the next line.

    Args:
        stream: with a file descriptor, as lines go past its buffer: that keeps what a full disk did
            not take, and writes it later whatever became of the rows.
    """

    def __init__(self, stream: BinaryIO) -> None:
        stream.flush()
        self._descriptor = stream.fileno()
        self._rest = b""

    def write(self, rows: Sequence[Row]) -> int:
        """Write the rows.

        Raises: OSError if the disk is full; SinkGoneError if the reader of the pipe has closed it.
        """
        written = 0
        lines = [_line(row) for row in rows]
        self._rest, fault = _send(self._descriptor, self._rest)
        for line in lines:
            if fault is not None:
                break
            left, fault = _send(self._descriptor, line)
            if len(left) < len(line):
                self._rest = left
                written += 1
        if isinstance(fault, BrokenPipeError):
            raise SinkGoneError from fault
        if fault is not None and not written:
            raise fault
        return written

    def close(self, timeout_s: float) -> int:  # noqa: ARG002 - a stream needs no time
        """Write the rest of the last line, if it can be; the stream is not ours to close."""
        self._rest, _ = _send(self._descriptor, self._rest)
        return 1 if self._rest else 0


class FileWriter:
    """Appends JSON lines to a file. At the largest size it becomes FILE.1, and FILE begins anew.

    A file that another program moved or removed begins anew too. After a write that failed in the
    middle, the file ends with its last whole line.

    Args:
        path: in a folder that may come and go.
        size_max: in bytes, of the file and of the one before it.
    """

    def __init__(self, path: Path, size_max: int = SIZE_MAX_MB * 1_000_000) -> None:
        self._path = path
        self._size_max = size_max
        self._file: BinaryIO | None = None
        self._identity = (0, 0)

    def write(self, rows: Sequence[Row]) -> int:
        """Append the rows.

        Raises: OSError if the disk is full or the folder is away; then none of them is in the file.
        """
        try:
            file = self._current()
            size = file.seek(0, os.SEEK_END)
            if size and size >= self._size_max:
                self._rotate()
                file, size = self._current(), 0
        except OSError:
            self.close(0.0)
            raise
        try:
            _write_all(file, b"".join(map(_line, rows)))
        except OSError:
            file.truncate(size)
            self.close(0.0)
            raise
        return len(rows)

    def close(self, timeout_s: float) -> int:  # noqa: ARG002 - a file needs no time
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
        return 0

    def _current(self) -> BinaryIO:
        """The open file of that name."""
        if self._file is not None:
            try:
                now = self._path.stat()
            except FileNotFoundError:
                now = None
            if now is None or (now.st_dev, now.st_ino) != self._identity:
                self.close(0.0)
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
            status = os.fstat(self._file.fileno())
            self._identity = (status.st_dev, status.st_ino)
        return self._file

    def _rotate(self) -> None:
        self.close(0.0)
        self._path.replace(self._path.with_name(f"{self._path.name}.1"))


def _write_all(file: BinaryIO, data: bytes) -> None:
    """Write past short writes, which a disk that is nearly full makes before it fails."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _send(descriptor: int, data: bytes) -> tuple[bytes, OSError | None]:
    """The data that the descriptor did not take, and why."""
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError as err:
        return bytes(left), err
    return b"", None


def _line(row: Row) -> bytes:
    return orjson.dumps(row) + b"\n"
