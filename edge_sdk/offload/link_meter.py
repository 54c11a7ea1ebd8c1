"""Round trip and bandwidth of the link, from the messages that cross it anyway.

A probe is a small message, which the server answers without computing: it tells the round trip. An
offload tells the bandwidth if it is long enough that most of its time is transfer.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

# sent and never answered: forgotten
UNDER_WAY_MOST: Final = 256
KEPT_MOST: Final = 64
# a shorter offload takes as long as its round trip and the server's computation
LARGE_BYTES: Final = 16_384


@dataclass(frozen=True, slots=True)
class LinkSample:
    """The link as seen since the sample before; None for what was not seen.

    Attributes:
        round_trip_ms: median over the probes.
        bandwidth_mbps: 10**6 bits a second, by the median offload: a lower bound, because the
            server's computation counts as transfer.
    """

    round_trip_ms: float | None = None
    bandwidth_mbps: float | None = None


class LinkMeter:
    """Times queries and probes between sending and answer; safe from any thread.

    Args:
        clock: monotonic seconds.
    Attributes:
        round_trip_ms: of the last probe; None before the first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._under_way: OrderedDict[str, tuple[float, int, bool]] = OrderedDict()
        self._probes_s: list[float] = []
        self._offloads: list[tuple[float, int]] = []
        self._round_trip_s: float | None = None
        self._lock = threading.Lock()
        self.round_trip_ms: float | None = None

    def sent(self, identifier: str, size_bytes: int, *, probe: bool = False) -> None:
        """Note that a message leaves now."""
        with self._lock:
            self._under_way[identifier] = self._clock(), size_bytes, probe
            if len(self._under_way) > UNDER_WAY_MOST:
                self._under_way.popitem(last=False)

    def forget(self, identifier: str) -> None:
        """Do not time a message: it was sent twice."""
        with self._lock:
            self._under_way.pop(identifier, None)

    def answered(self, identifier: str, size_bytes: int) -> None:
        """Note that the answer to a message is there now."""
        with self._lock:
            found = self._under_way.pop(identifier, None)
            if found is None:
                return
            began, sent_bytes, probe = found
            seconds = self._clock() - began
            if probe:
                self.round_trip_ms = 1e3 * seconds
                self._probes_s = [*self._probes_s, seconds][-KEPT_MOST:]
            elif sent_bytes + size_bytes >= LARGE_BYTES:
                self._offloads = [*self._offloads, (seconds, sent_bytes + size_bytes)][-KEPT_MOST:]

    def take(self) -> LinkSample:
        """The link since the last call."""
        with self._lock:
            probes, self._probes_s = self._probes_s, []
            offloads, self._offloads = self._offloads, []
            if probes:
                self._round_trip_s = statistics.median(probes)
            round_trip_ms = 1e3 * statistics.median(probes) if probes else None
            return LinkSample(round_trip_ms, _bandwidth_mbps(offloads, self._round_trip_s))


def _bandwidth_mbps(offloads: list[tuple[float, int]], round_trip_s: float | None) -> float | None:
    """The median bandwidth of offloads of which at least half the time is transfer."""
    if round_trip_s is None:
        return None
    found = [
        8 * size_bytes / (seconds - round_trip_s) / 1e6
        for seconds, size_bytes in offloads
        if seconds - round_trip_s >= seconds / 2
    ]
    return statistics.median(found) if found else None
