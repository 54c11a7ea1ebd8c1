"""Feed: the surroundings of a source while it reads. It counts, says what was refused, and waits.

A source yields items in a thread of its own. Nothing that goes wrong with an input or with the
source ends the stream: an input that cannot be used is named and counted, and a source that went
away is waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_sdk.manifest import TensorSpec
from edge_sdk.pipeline.words import printable

logger = logging.getLogger(__name__)

Array = NDArray[Any]

# Pauses between two attempts to find a source again; each is twice as long as the one before.
PAUSE_FIRST_S: Final = 0.25
PAUSE_LAST_S: Final = 10.0
# Holes and refused inputs are named one by one up to this number, then once a minute with their
# count: a sensor or a camera may give thousands.
NAMED: Final = 5
SAY_AGAIN_S: Final = 60.0
# The sample of an item that the model has taken.
EMPTY: Final[Array] = np.empty(0)


@dataclass(frozen=True, slots=True)
class Item:
    """One input of a stream.

    Attributes:
        name: for the output: a file, a line, a frame.
        sample: the array of the model's shape and dtype, or a function that makes it. A function is
            called only for items that the model gets to see.
        mark: what the source needs to know once the item is answered; None for nothing.
        at: when it was read, seconds since 1970.
    """

    name: str
    sample: Array | Callable[[], Array]
    mark: Any = None
    at: float = field(default_factory=time.time)

    def take(self) -> Array:
        """The array.

        Raises: InputError if it cannot be made.
        """
        return self.sample() if callable(self.sample) else self.sample


@dataclass(slots=True)
class SourceCounts:
    """Inputs of a source since the start.

    Attributes:
        read: inputs that were given to the model.
        refused: inputs that could not be used: a damaged file, a wrong shape.
        holes: rows without a number in each column. windows_lost: windows that they cut short.
        skipped: frames that a newer one replaced before the model was free.
        lost: how often the source went away.
    """

    read: int = 0
    refused: int = 0
    holes: int = 0
    windows_lost: int = 0
    skipped: int = 0
    lost: int = 0


class Source(Protocol):
    """A source of inputs. `items` runs in one thread, `answered` and `close` in another.

    Attributes:
        newest: whether an item that waits is replaced by the next one.
        patient: whether it may wait for an input as long as it likes. Any other source asks
            `feed.stopped` every few seconds, and one that does not hangs.
    """

    newest: bool
    patient: bool

    def items(self, feed: Feed) -> Iterator[Item]:
        """The inputs as they come, until the source ends or `feed` is stopped."""
        ...

    def answered(self, mark: Any) -> None:
        """Take note that the item with that mark was answered."""
        ...

    def close(self) -> None:
        """Release what the source holds; `items` is not called again."""
        ...


class Feed:
    """Counts, notices and pauses of one source.

    Args:
        name: of the source, for people.
        spec: gives the model's input as it is now.
    Attributes:
        stopping: set when the stream ends.
        asked_at: when the source last asked whether the stream goes on, in monotonic seconds.
    """

    def __init__(self, name: str, spec: Callable[[], TensorSpec]) -> None:
        self.name = printable(name)
        self.spec = spec
        self.counts = SourceCounts()
        self.stopping = threading.Event()
        self.asked_at = time.monotonic()
        self._pause_s = PAUSE_FIRST_S
        self._away_since: float | None = None
        self._why = ""
        self._said_at = 0.0

    @property
    def stopped(self) -> bool:
        """Whether the stream ends: for the source, in the thread that reads it."""
        self.asked_at = time.monotonic()
        return self.stopping.is_set()

    @property
    def why_away(self) -> str:
        """Why the source is away; empty if it is there."""
        return self._why

    def stop(self) -> None:
        """End every wait."""
        self.stopping.set()

    def wait(self, seconds: float) -> bool:
        """Wait in the source, but not longer than the stream runs.

        Returns: whether the stream goes on.
        """
        goes_on = not self.stopping.wait(seconds)
        self.asked_at = time.monotonic()
        return goes_on

    def refuse(self, why: str, *, always: bool = False) -> None:
        """Count an input that cannot be used, and name it.

        Args:
            always: name it although there are many: each is a file of the user.
        """
        self.counts.refused += 1
        if always:
            logger.warning("skipped: %s", why)
        else:
            self._say(f"skipped: {why}", self.counts.refused, "inputs skipped")

    def hole(self, why: str, windows_lost: int) -> None:
        """Count a row that cannot be used, and name it."""
        self.counts.holes += 1
        self.counts.windows_lost += windows_lost
        self._say(f"hole: {why}; a new window begins after it", self.counts.holes, "holes")

    def away(self, why: str) -> bool:
        """Wait a little for a source that is not there; it is said once.

        Returns: whether the stream goes on.
        """
        if self._away_since is None:
            self._away_since = time.monotonic()
            self.counts.lost += 1
            logger.warning("%s is away: %s; waiting for it", self.name, why)
        self._why = why
        goes_on = self.wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, PAUSE_LAST_S)
        return goes_on

    def back(self) -> None:
        """Take note that the source is there."""
        if self._away_since is not None:
            gone_s = time.monotonic() - self._away_since
            logger.warning("%s is back after %.0f s", self.name, gone_s)
        self._away_since = None
        self._why = ""
        self._pause_s = PAUSE_FIRST_S

    def _say(self, what: str, count: int, counted: str) -> None:
        now = time.monotonic()
        if count > NAMED and now - self._said_at < SAY_AGAIN_S:
            return
        self._said_at = now
        many = f" ({count} {counted} so far)" if count > NAMED else ""
        logger.warning("%s%s", what, many)
