"""A limit of failures by address, or of other events by their source, kept in memory."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

from server.errors import OverloadedError
from server.listening.source import source_network

MAX_SOURCES: Final = 10_000


class RateLimit:
    """At most `most` events from one source within `window_s` seconds; safe from any thread.

    A source is an IPv4 address, an IPv6 /64, which is the least that one customer is given, or a
    device. Beyond 10,000 sources the one with the oldest event is dropped, so that memory is
    bounded.

    Args:
        what: is counted, as errors say it.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        most: int = 20,
        window_s: float = 60.0,
        *,
        what: str = "failures",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._window_s = window_s
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        self._times: OrderedDict[str, deque[float]] = OrderedDict()

    def check(self, source: str) -> None:
        """Refuse a source that has too many.

        Raises: OverloadedError saying when it may try again.
        """
        with self._lock:
            times = self._times.get(source_network(source))
            if times is None or len(times) < self._most:
                return
            wait_s = times[0] + self._window_s - self._clock()
        if wait_s > 0:
            raise OverloadedError(
                f"{self._most} {self._what} within {self._window_s:.0f} s; wait {wait_s:.0f} s",
                retry_after_s=wait_s,
            )

    def count(self, source: str) -> None:
        """Count one event."""
        source = source_network(source)
        with self._lock:
            # only the last `most` count: the oldest of them says when the next attempt is allowed
            times = self._times.setdefault(source, deque(maxlen=self._most))
            times.append(self._clock())
            self._times.move_to_end(source)
            if len(self._times) > MAX_SOURCES:
                self._times.popitem(last=False)
