"""Reads a source in a thread, as a stream does, and collects its items."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from edge_sdk.errors import SplitedgeError
from edge_sdk.manifest import TensorSpec
from edge_sdk.pipeline.sources.feed import Feed, Item, Source
from edge_sdk.pipeline.sources.rows import RowKeys
from tests.waiting import wait_until

# two channels, windows of three rows
SPEC: Final = TensorSpec("float32", (2, 3))
NEXT_TO_EACH_OTHER: Final = RowKeys(step=3)


class Reading:
    """A source that is being read.

    Attributes:
        items: in the order in which they came. fault: that ended the reading.
    """

    def __init__(self, source: Source, spec: TensorSpec, name: str = "source") -> None:
        self.source: Any = source  # tests look at what its kind keeps
        self.feed = Feed(name, lambda: spec)
        self.items: list[Item] = []
        self.fault: BaseException | None = None
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    @property
    def names(self) -> list[str]:
        """Names of the items, without the folders of files."""
        return [item.name.rpartition("/")[2] for item in self.items]

    def wait(self, count: int) -> list[Item]:
        """The items, once there are as many."""
        wait_until(lambda: len(self.items) >= count, lambda: (self.names, self.feed.counts))
        return self.items

    def answer_all(self) -> None:
        """Tell the source that every item was answered."""
        for item in self.items:
            if item.mark is not None:
                self.source.answered(item.mark)

    def wait_ended(self) -> None:
        """Wait until the source has ended by itself."""
        self._thread.join(10)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        """End the reading."""
        self.feed.stop()
        self.wait_ended()
        self.source.close()

    def _read(self) -> None:
        try:
            for item in self.source.items(self.feed):
                self.items.append(item)
                if self.feed.stopped:
                    break
        except (SplitedgeError, ArithmeticError) as err:
            self.fault = err


@contextmanager
def reading(source: Source, spec: TensorSpec, name: str = "source") -> Iterator[Reading]:
    """A source that is read within the block."""
    made = Reading(source, spec, name)
    try:
        yield made
    finally:
        made.stop()


def first_channel(got: Reading) -> list[list[float]]:
    """The first row of each window that was read."""
    return [np.asarray(item.sample)[0].tolist() for item in got.items]
