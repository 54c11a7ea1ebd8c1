"""Queries of the last seconds by their ids, so that one that comes twice is computed once.

A device sends a live query again when half of its time is gone and no reply has come. The query may
be under way here, or its reply may have been lost: then the reply is sent again. A query that was
refused is not kept, so that its second message has a second chance.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

# a live query is sent again after half of its time, which is 0.5 s by default
KEPT_S: Final = 10.0
KEPT_MOST: Final = 16_384
KEPT_BYTES: Final = 8_000_000
# a longer reply is not kept: few of them would put out all others
REPLY_BYTES: Final = KEPT_BYTES // 8
# An id of a device is 16 random bytes as hex. A shorter one, a counter say, may come again with
# another query.
ID_CHARACTERS: Final = 32
# of an entry without its reply
ENTRY_BYTES: Final = 400
# The second message of a query has the time that is left in it. A deadline that is later by more
# belongs to a late answer, which a device asks for by the same id after it gave the query up.
LATER_S: Final = 1.0


@dataclass(slots=True, eq=False)
class Served:
    """A query that came.

    Attributes:
        came_at, deadline: monotonic seconds; a query without a deadline has none.
        reply: the message that answered it; None while it is under way.
    """

    key: tuple[str, str]
    came_at: float
    deadline: float | None
    reply: bytes | None = None

    @property
    def size_bytes(self) -> int:
        """The memory that it is counted with."""
        return ENTRY_BYTES + len(self.reply or b"")


class RecentQueries:
    """The queries of the last KEPT_S, within KEPT_MOST and KEPT_BYTES; safe from any thread.

    Attributes:
        duplicates: messages that repeated a query.
    """

    def __init__(self) -> None:
        self.duplicates = 0
        self._lock = threading.Lock()
        self._served: OrderedDict[tuple[str, str], Served] = OrderedDict()  # oldest first
        self._bytes = 0

    def find(self, device: str, identifier: str) -> Served | None:
        """The query with that id that this device sent before."""
        with self._lock:
            return self._served.get((device, identifier))

    def come(
        self, device: str, identifier: str, deadline_ms: float | None, now: float
    ) -> tuple[Served, bool]:
        """Note a query that came.

        Args:
            deadline_ms: the time that it says is left; None for no deadline.
        Returns: the query, and whether it is to be served: False for one that is under way, or
            that has its reply.
        """
        key = (device, identifier)
        deadline = None if deadline_ms is None else now + deadline_ms / 1e3
        with self._lock:
            known = self._served.get(key)
            if known is not None and _is_duplicate(known, deadline, now):
                self.duplicates += 1
                return known, False
            if known is not None:
                self._remove(known)
            new = Served(key, now, deadline)
            if len(identifier) >= ID_CHARACTERS:
                self._served[key] = new
                self._bytes += new.size_bytes
                self._forget_oldest(now)
            return new, True

    def replied(self, served: Served, reply: bytes) -> None:
        """Keep the reply of a query."""
        with self._lock:
            if self._served.get(served.key) is not served:
                return
            if len(reply) > REPLY_BYTES:
                self._remove(served)
                return
            self._bytes += len(reply)
            served.reply = reply
            self._forget_oldest(served.came_at)

    def drop(self, served: Served) -> None:
        """Forget a query that got no answer: its next message is served."""
        with self._lock:
            if self._served.get(served.key) is served:
                self._remove(served)

    def _remove(self, served: Served) -> None:
        del self._served[served.key]
        self._bytes -= served.size_bytes

    def _forget_oldest(self, now: float) -> None:
        while self._served:
            oldest = next(iter(self._served.values()))
            too_many = len(self._served) > KEPT_MOST or self._bytes > KEPT_BYTES
            if not too_many and now - oldest.came_at <= KEPT_S:
                return
            self._remove(oldest)


def _is_duplicate(known: Served, deadline: float | None, now: float) -> bool:
    if now - known.came_at > KEPT_S:
        return False
    if known.reply is not None or known.deadline is None:
        return True
    return deadline is not None and deadline <= known.deadline + LATER_S
