"""The source `-`: one JSON value a line on standard input."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from edge_sdk.errors import InputError
from edge_sdk.pipeline.samples import read_samples, samples_of
from edge_sdk.pipeline.sources.feed import Array, Feed, Item
from edge_sdk.pipeline.sources.lines import CHUNK_BYTES, LineSplitter

LINE_BYTES_MAX: Final = 64_000_000
WAIT_S: Final = 0.2
EXPECTED: Final = 'expected [numbers], {"x": [numbers], "name": "..."} or {"file": "picture.png"}'


class JsonLinesSource:
    """Samples, or names of files with samples, from a file descriptor. It ends with its input.

    Args:
        descriptor: 0 is standard input.
    """

    newest = False
    patient = True

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor

    def items(self, feed: Feed) -> Iterator[Item]:
        """The samples of each line."""
        splitter = LineSplitter(LINE_BYTES_MAX)
        number = 0
        while not feed.stopped:
            if not select.select([self._descriptor], [], [], WAIT_S)[0]:
                continue
            chunk = os.read(self._descriptor, CHUNK_BYTES)
            lines = list(splitter.push(chunk)) if chunk else [splitter.rest()]
            for line in lines:
                number += 1
                if line.strip():
                    yield from _items(line, f"line {number}", feed)
            while splitter.too_long:
                splitter.too_long -= 1
                number += 1
                feed.refuse(f"a line before line {number + 1}: above {LINE_BYTES_MAX} bytes")
            if not chunk:
                return

    def answered(self, mark: object) -> None:
        """Nothing to remember."""

    def close(self) -> None:
        """Standard input stays open."""


def _items(line: bytes, where: str, feed: Feed) -> Iterator[Item]:
    try:
        samples = list(_samples(line, where, feed))
    except InputError as err:
        feed.refuse(str(err))
        return
    for name, sample in samples:
        yield Item(name, sample)


def _samples(line: bytes, where: str, feed: Feed) -> Iterator[tuple[str, Array]]:
    try:
        value: Any = orjson.loads(line)
    except orjson.JSONDecodeError as err:
        raise InputError(f"{where}: not JSON ({err}); {EXPECTED}") from err
    match value:
        case {"file": str(file)}:
            yield from read_samples(Path(file), feed.spec())
            return
        case {"x": list(numbers), **rest}:
            name = rest.get("name", where)
        case list(numbers):
            name = where
        case _:
            raise InputError(f"{where}: {EXPECTED}")
    if not isinstance(name, str):
        raise InputError(f"{where}: name: expected text")
    try:
        array = np.array(numbers)
    except ValueError as err:  # rows of unequal length
        raise InputError(f"{where}: expected rows of one length ({err})") from err
    yield from samples_of(name, array, feed.spec())
