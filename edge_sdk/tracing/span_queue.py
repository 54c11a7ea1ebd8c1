"""The spans that wait for a collector: a bounded queue, and the one thread that empties it.

Who adds a span never waits. Spans that do not fit, or that the collector does not take, are dropped
and counted; that is said once, and again after spans have arrived meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from edge_sdk.tracing.spans import Span

logger = logging.getLogger(__name__)

# about 1 kB each in memory
QUEUE_MAX: Final = 2048
BATCH_MAX: Final = 512
# The first span of a batch waits so long for others.
COLLECT_S: Final = 0.25
# `close` waits so long for the last spans to arrive.
CLOSE_S: Final = 2.0


class Exporter(Protocol):
    """Sends spans: see edge_sdk.tracing.otlp."""

    def send(self, spans: Sequence[Span]) -> str:
        """Send spans, and return why they did not arrive; empty if they did."""

    def stop(self) -> None:
        """Give up what is being sent."""


class SpanQueue:
    """The queue and its thread, which starts with the first span.

    Attributes:
        sent: spans that the collector has taken. dropped: spans that it never gets.
    """

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._waiting: deque[Span] = deque()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._failing = False
        self.sent = 0
        self.dropped = 0

    def add(self, *spans: Span) -> None:
        """Take spans that have ended; never waits for the collector."""
        with self._changed:
            if self._closing.is_set():
                self.dropped += len(spans)
                return
            before = len(self._waiting)
            kept = spans[: QUEUE_MAX - before]
            self._waiting.extend(kept)
            self._start()
            if not before or len(self._waiting) >= BATCH_MAX:  # else it waits for more anyway
                self._changed.notify()
        if len(kept) < len(spans):
            self._drop(len(spans) - len(kept), "they come faster than the collector takes them")

    def report(self) -> dict[str, int]:
        """The counts, by name."""
        return {"sent": self.sent, "dropped": self.dropped}

    def close(self) -> None:
        """Send what waits, for CLOSE_S at most, and end the thread."""
        with self._changed:
            self._closing.set()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        self._exporter.stop()  # ends a thread that still tries

    def _start(self) -> None:
        if self._thread is None:
            # a daemon: a collector that is silent keeps no program from ending
            thread = threading.Thread(target=self._work, name="splitedge-traces", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no memory or too many threads: later spans try again
                logger.debug("the thread that sends spans cannot start", exc_info=True)
                return
            self._thread = thread

    def _work(self) -> None:
        while spans := self._take():
            try:
                failure = self._exporter.send(spans)
            except Exception as err:  # outermost loop of this thread: spans go on being dropped
                logger.debug("spans were not sent", exc_info=True)
                failure = f"{type(err).__name__}: {err}"
            if failure:
                self._drop(len(spans), failure)
            else:
                self._arrived(len(spans))

    def _take(self) -> list[Span]:
        """The next batch; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing.is_set())
            self._changed.wait_for(self._full_or_closing, COLLECT_S)
            count = min(len(self._waiting), BATCH_MAX)
            return [self._waiting.popleft() for _ in range(count)]

    def _full_or_closing(self) -> bool:
        return len(self._waiting) >= BATCH_MAX or self._closing.is_set()

    def _drop(self, count: int, why: str) -> None:
        with self._changed:
            self.dropped += count
            said, self._failing = self._failing, True
        if not said:
            logger.warning("traces: spans are dropped: %s; all else goes on without them", why)

    def _arrived(self, count: int) -> None:
        with self._changed:
            self.sent += count
            failed, self._failing = self._failing, False
        if failed:
            logger.info("traces: spans arrive again; %d were dropped so far", self.dropped)
