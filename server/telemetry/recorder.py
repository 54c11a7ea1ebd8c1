"""The writing end of the devices' history: takes heartbeats, and writes points in batches.

A reading that could not be written waits, at most one for each device: its counts go on from the
agent's start, so a newer one takes its place and nothing but resolution is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from server.registry.telemetry.history import (
    POINTS_MOST,
    RAW_S,
    LastReading,
    Recorded,
    TelemetryHistory,
)
from server.registry.telemetry.reading import Reading

PRUNE_S: Final = 600.0
# of a device that was silent for longer, the time of its last point is forgotten
REMEMBERED_S: Final = 3600.0


class TelemetryRecorder:
    """Writes the history of a running server; one thread uses it.

    Args:
        points_most: bound of all points.
        step_s: least time between two points of a device.
        recorded: called with the points that were written.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        history: TelemetryHistory,
        *,
        points_most: int = POINTS_MOST,
        step_s: float = RAW_S,
        recorded: Callable[[list[Recorded]], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._history = history
        self._points_most = points_most
        self._step_s = step_s
        self._recorded = recorded
        self._clock = clock
        self._waiting: dict[str, LastReading] = {}
        self._written: dict[str, float] = {}  # monotonic time of each device's last point
        self._next_prune = 0.0

    def note(
        self,
        heartbeats: Mapping[str, tuple[float, Mapping[str, Any]]],
        gone: Iterable[str] = (),
    ) -> None:
        """Take the newest heartbeat of each device: the time that it came, and its content.

        Args:
            gone: devices of which no other heartbeat follows, so that the last one is due at once.
        """
        for device, (at, content) in heartbeats.items():
            self._waiting[device] = LastReading(at, Reading.from_heartbeat(content))
        for device in gone:
            self._written.pop(device, None)

    def write(self, *, last: bool = False) -> None:
        """Write the points that are due.

        Args:
            last: whether no other call follows, so that all are due.
        Raises: RegistryError; nothing is lost then, within the bounds.
        """
        now = self._clock()
        due = {
            device: reading
            for device, reading in self._waiting.items()
            if last or now - self._written.get(device, -REMEMBERED_S) >= self._step_s
        }
        if not due:
            return
        points = self._history.record(due)
        for device in due:
            del self._waiting[device]
            self._written[device] = now
        self._recorded(points)

    def keep_bounds(self, *, by_age: bool = True) -> None:
        """Thin what is old enough, and drop what is above the bounds.

        Args:
            by_age: whether the clock is right, so that it is known what is old. By a wrong one only
                the bound by number holds.
        Raises: RegistryError.
        """
        now = self._clock()
        self._written = {
            device: at for device, at in self._written.items() if now - at < REMEMBERED_S
        }
        if by_age:
            self._history.thin()
        if now >= self._next_prune:
            self._history.prune(self._points_most, by_age=by_age)
            self._next_prune = now + PRUNE_S
