"""The writing end of the audit log: takes events from anywhere, and writes them in batches.

Repeated events of one minute are one row with a count. Threads that note an event never wait for
the database: the server's housekeeping writes.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from server.errors import RegistryError
from server.registry.trail.events import DROPPED, Event, Tally
from server.registry.trail.trail import AGE_MOST_S, ROWS_MOST, AuditTrail

MINUTE_S: Final = 60.0
# a row that is repeated is written again this often, so that a flood costs little
REPEAT_S: Final = 10.0
ROWS_PER_MINUTE: Final = 4_096
# use of a credential over HTTP is a login once a day for each address
LOGIN_S: Final = 86_400.0
LOGINS_REMEMBERED: Final = 10_000


class AuditLog:
    """The audit log of a running server.

    Args:
        rows, age_s: bounds of the changes, and of the events.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        trail: AuditTrail,
        *,
        rows: int = ROWS_MOST,
        age_s: float = AGE_MOST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trail = trail
        self._rows, self._age_s = rows, age_s
        self._clock = clock
        self._tally = Tally()
        self._minute = clock()
        self._repeated_at = clock()
        self._written: dict[tuple[str, ...], int] = {}  # ids of this minute's rows
        self._again: dict[int, tuple[int, float]] = {}  # of a row: how often more, when last
        self._logins: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, event: Event) -> None:
        """Take an event; from any thread, without waiting for the database."""
        self._tally.note(event)

    def note_use(self, who: str, source: str) -> None:
        """Take a login over HTTP: each request carries a credential, and the first counts."""
        key, now = (who, source), self._clock()
        with self._lock:
            last = self._logins.get(key)
            if last is not None and now - last < LOGIN_S:
                return
            self._logins[key] = now
            self._logins.move_to_end(key)
            if len(self._logins) > LOGINS_REMEMBERED:
                self._logins.popitem(last=False)
        self.note(Event("http.login", "done", who, source))

    def write(self, *, last: bool = False) -> None:
        """Write what has come since the last call; one thread calls it.

        Args:
            last: whether no other call follows, so that counts are written too.
        Raises: RegistryError; nothing is lost then, within the bounds.
        """
        now = self._clock()
        new_minute = now - self._minute >= MINUTE_S
        if new_minute:
            self._minute = now
            self._written.clear()
        new = [each for each in map(self._placed, self._tally.take()) if each is not None]
        repeats = last or new_minute or now - self._repeated_at >= REPEAT_S
        again = self._again if repeats else {}
        if new or again:
            try:
                ids = self._trail.add(new, again)
            except RegistryError:
                for event in new:
                    self._tally.note(event)
                raise
            self._written.update((event.key, id_) for event, id_ in zip(new, ids, strict=True))
        if repeats:
            self._again.clear()
            self._repeated_at = now

    def prune(self, *, by_age: bool = True) -> None:
        """Drop what is above the bounds.

        Args:
            by_age: whether the clock is right, so that what is old is dropped too.
        Raises: RegistryError.
        """
        self._trail.prune(self._rows, self._age_s if by_age else math.inf)

    def _placed(self, event: Event) -> Event | None:
        """The event if it needs a row; None if it is counted in one of this minute's."""
        key = event.key
        if key not in self._written:
            if len(self._written) < ROWS_PER_MINUTE or event.what == DROPPED:
                return event
            # as one row, which the next call may make
            text = "more different events in a minute than are kept"
            self._tally.note(Event(DROPPED, "refused", "", "", text, count=event.count))
            return None
        more, _ = self._again.get(row := self._written[key], (0, 0.0))
        self._again[row] = more + event.count, event.until
        return None
