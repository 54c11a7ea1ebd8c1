"""A limit of failures by address, kept in memory, against guessing."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

from server.errors import OverloadedError

MAX_SOURCES: Final = 10_000


class FailureLimit:
    """At most `most` failures from one source within `window_s` seconds; safe from any thread.

    A source is an IPv4 address or an IPv6 /64, the least that one customer is given. Beyond 10,000
    sources the one with the oldest failure is dropped, so that memory is bounded.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self,
        most: int = 20,
        window_s: float = 60.0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._window_s = window_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def check(self, address: str) -> None:
        """Refuse a source that has too many failures.

        Raises: OverloadedError saying when it may try again.
        """
        with self._lock:
            times = self._failures.get(_source(address))
            if times is None or len(times) < self._most:
                return
            wait_s = times[0] + self._window_s - self._clock()
        if wait_s > 0:
            raise OverloadedError(
                f"{self._most} failures within {self._window_s:.0f} s; wait {wait_s:.0f} s",
                retry_after_s=wait_s,
            )

    def failed(self, address: str) -> None:
        """Count one failure."""
        source = _source(address)
        with self._lock:
            # only the last `most` count: the oldest of them says when the next attempt is allowed
            times = self._failures.setdefault(source, deque(maxlen=self._most))
            times.append(self._clock())
            self._failures.move_to_end(source)
            if len(self._failures) > MAX_SOURCES:
                self._failures.popitem(last=False)


def _source(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address[:100]  # a socket without an address
    if parsed.version == 4:
        return str(parsed)
    mapped = parsed.ipv4_mapped
    return str(mapped or ipaddress.ip_network((int(parsed), 64), strict=False))
