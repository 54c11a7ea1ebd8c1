"""Changes that last: a value is reported again once it has stayed elsewhere for a while."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

# medians of fewer values say little
VALUES_LEAST: Final = 4
VALUES_MOST: Final = 512


class LastingChange:
    """Watches one quantity of a device, such as free memory in bytes or a latency in ms.

    A change lasts if the medians of both halves of the last `lasts_s` seconds are beyond `share` of
    the value that was reported, on the same side. A peak shorter than half of that time moves no
    median, and a value that swings around the reported one has medians on both sides of it.

    Args:
        share: of the reported value, for example 0.25.
        lasts_s: seconds.
    Attributes:
        reported: what the server knows; None before the first report.
    """

    def __init__(self, share: float, lasts_s: float) -> None:
        self.reported: float | None = None
        self._share = share
        self._lasts_s = lasts_s
        self._began: float | None = None
        self._values: deque[tuple[float, float]] = deque(maxlen=VALUES_MOST)

    def add(self, now: float, value: float) -> None:
        """Take a value at `now`, in seconds of a monotonic clock."""
        if self._began is None:
            self._began = now
        self._values.append((now, value))
        while self._values[0][0] <= now - self._lasts_s:
            self._values.popleft()

    @property
    def value(self) -> float | None:
        """Median of the last `lasts_s` seconds; the reported value without any."""
        if not self._values:
            return self.reported
        return statistics.median(value for _, value in self._values)

    def has_changed(self, now: float) -> bool:
        """Whether the value is another one now than was reported, and has been for `lasts_s`."""
        if self._began is None or now - self._began < self._lasts_s:
            return False
        half = now - self._lasts_s / 2
        older = [value for at, value in self._values if at <= half]
        newer = [value for at, value in self._values if at > half]
        if min(len(older), len(newer)) < VALUES_LEAST // 2:
            return False
        if self.reported is None:
            return True
        allowed = self._share * self.reported
        # of two middle values the one nearer to what was reported
        lowest = min(map(statistics.median_low, (older, newer)))
        highest = max(map(statistics.median_high, (older, newer)))
        return lowest > self.reported + allowed or highest < self.reported - allowed

    def forget(self) -> None:
        """Begin anew, as for another bundle: nothing was seen and nothing reported."""
        self.reported = self._began = None
        self._values.clear()
