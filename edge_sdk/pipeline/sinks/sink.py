"""Sink: the rows of a stream on their way out, in a bounded queue and a thread of its own.

A sink that is away holds nothing up. Its rows wait; when the queue is full, the oldest are dropped
and counted; and they go on their way once the sink is back. A sink that is there and slower than
the source makes the stream wait for it, but not if it takes nothing for seconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from edge_sdk.errors import LinkError
from edge_sdk.pipeline.answer import Row

logger = logging.getLogger(__name__)

WAITING_MAX: Final = 1000
BATCH: Final = 64
PAUSE_FIRST_S: Final = 0.1
PAUSE_LAST_S: Final = 5.0
# A sink with a full queue that takes nothing for this time is stuck: nobody waits for it.
STUCK_S: Final = 5.0
# Time that a sink gets at the end to write what waits.
DRAIN_S: Final = 2.0
# Time beyond it: a broker that takes nothing is cut after a second.
CLOSE_S: Final = 1.5


class SinkGoneError(Exception):
    """The sink will never take a row again: the reader of a pipe has closed it."""


class Writer(Protocol):
    """The outside of a sink. All methods run in the sink's thread, except the building."""

    def write(self, rows: Sequence[Row]) -> int:
        """Write rows, in order.

        Returns: how many were written, from the first on; fewer where the rest must wait.
        Raises: LinkError or OSError if the sink is away, with none of the rows written;
            SinkGoneError if it is so for good.
        """
        ...

    def close(self, timeout_s: float) -> int:
        """Finish what was written within this time, and release what is held.

        Returns: rows that counted as written and did not arrive, as far as is known.
        """
        ...


@dataclass(slots=True)
class SinkCounts:
    """Rows of a sink since the start.

    Attributes:
        written: given to the sink.
        dropped: for which the queue had no room, or which did not arrive.
        waiting: in the queue now.
        away: why the sink takes none; empty if it does.
    """

    written: int = 0
    dropped: int = 0
    waiting: int = 0
    away: str = ""


class Sink:
    """The queue of one writer.

    Args:
        name: for people.
        changes: take only rows whose label is another than that of the row before.
    """

    def __init__(
        self, name: str, writer: Writer, *, changes: bool = False, waiting_max: int = WAITING_MAX
    ) -> None:
        self.name = name
        self._writer = writer
        self._changes = changes
        self._waiting_max = waiting_max
        self._last: object = None
        self._rows: deque[Row] = deque()
        self._counts = SinkCounts()
        self._moved_at = time.monotonic()
        self._state = threading.Condition()
        self._ends_at: float | None = None
        self._gone = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> SinkCounts:
        """Counts as they are now."""
        with self._state:
            counts = self._counts
            return SinkCounts(counts.written, counts.dropped, len(self._rows), counts.away)

    @property
    def gone(self) -> bool:
        """Whether the sink will never take a row again."""
        return self._gone.is_set()

    def has_room(self, coming: int) -> bool:
        """Whether one more input may be asked about, while rows of `coming` others are to come.

        A sink that is away or stuck always has room: its oldest rows are dropped.
        """
        with self._state:
            if len(self._rows) + coming < self._waiting_max or self._counts.away:
                return True
            return time.monotonic() - self._moved_at > STUCK_S

    def put(self, row: Row) -> None:
        """Queue a row. It never waits: when the queue is full, the oldest row is dropped."""
        label = row.get("smoothed_label", row.get("label"))
        if self._changes and label == self._last:
            return
        self._last = label
        with self._state:
            if not self._rows:
                self._moved_at = time.monotonic()
            self._rows.append(row)
            self._drop_oldest()
            self._state.notify()

    def close(self, timeout_s: float = DRAIN_S) -> None:
        """Write what waits, as far as it goes within the time, and end."""
        with self._state:
            self._ends_at = time.monotonic() + timeout_s
            self._state.notify()
        self._thread.join(timeout_s + CLOSE_S)
        left = len(self._rows)
        if left:
            logger.warning("%s: %d answers were not written at the end", self.name, left)

    def _run(self) -> None:
        pause_s = PAUSE_FIRST_S
        while (batch := self._next_batch()) is not None:
            try:
                written = self._writer.write(batch)
            except (LinkError, OSError) as err:
                self._put_back(batch, getattr(err, "strerror", None) or str(err))
            except SinkGoneError:
                self._gone.set()
                return
            except Exception:  # outermost loop of this thread: the rows after these may go out
                logger.exception("%s: %d answers cannot be written", self.name, len(batch))
                self._drop(batch)
                continue
            else:
                self._done(batch, written)
                if written:
                    pause_s = PAUSE_FIRST_S
                    continue
            if not self._sleep(pause_s):
                break
            pause_s = min(2 * pause_s, PAUSE_LAST_S)
        left_s = max(0.0, (self._ends_at or 0.0) - time.monotonic())
        self._lose(self._writer.close(left_s))

    def _next_batch(self) -> list[Row] | None:
        """The oldest rows, taken out of the queue; None at the end."""
        with self._state:
            while not self._rows:
                if self._ends_at is not None:
                    return None
                self._state.wait()
            return [self._rows.popleft() for _ in range(min(BATCH, len(self._rows)))]

    def _sleep(self, seconds: float) -> bool:
        """Wait between two attempts; at the end, only while there is time.

        Returns: whether to try again.
        """
        with self._state:
            if self._ends_at is None:
                self._state.wait_for(lambda: self._ends_at is not None, seconds)
                return True
            left_s = self._ends_at - time.monotonic()
            if left_s <= 0:
                return False
            self._state.wait(min(PAUSE_FIRST_S, left_s))
            return True

    def _put_back(self, batch: Sequence[Row], why: str) -> None:
        with self._state:
            self._rows.extendleft(reversed(batch))
            self._drop_oldest()
            first, self._counts.away = not self._counts.away, why
        if first:
            logger.warning("%s is away: %s; answers wait for it", self.name, why)

    def _drop(self, batch: Sequence[Row]) -> None:
        with self._state:
            self._counts.dropped += len(batch)
            self._moved_at = time.monotonic()

    def _lose(self, count: int) -> None:
        """Count rows as dropped that counted as written."""
        if not count:
            return
        with self._state:
            self._counts.written -= count
            self._counts.dropped += count
        logger.warning("%s: it did not confirm %d answers; they may be lost", self.name, count)

    def _done(self, batch: Sequence[Row], written: int) -> None:
        with self._state:
            self._rows.extendleft(reversed(batch[written:]))
            self._drop_oldest()
            self._counts.written += written
            if written:
                self._moved_at = time.monotonic()
            away, self._counts.away = self._counts.away, ""
            dropped = self._counts.dropped
        if away:
            logger.warning("%s is back; %d answers were dropped so far", self.name, dropped)

    def _drop_oldest(self) -> None:
        while len(self._rows) > self._waiting_max:
            self._rows.popleft()
            self._counts.dropped += 1
            if self._counts.dropped == 1:
                logger.warning(
                    "%s: more than %d answers wait; the oldest are dropped",
                    self.name,
                    self._waiting_max,
                )
