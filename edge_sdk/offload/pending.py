"""A query under way, and its outcome."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Final, Self

from edge_sdk.wire.messages import Query, Reply, new_id

CLOSED: Final = "the agent is closed"


@dataclass(frozen=True, slots=True)
class NoReply:
    """Outcome of a query without a reply in time, with the reason."""

    reason: str


Outcome = Reply | NoReply


@dataclass(frozen=True, slots=True)
class Again:
    """A query that is sent once more, at a time of the monotonic clock, unless its reply came."""

    query: Query
    at: float


class Pending:
    """One query under way. The first outcome counts.

    Attributes:
        again: what to send once more, and when; None for nothing.
        short: whether the caller gave it less time than the agent's own deadline.
        sent_at: by the monotonic clock; None if nothing was sent.
        bytes_up, bytes_down: payloads of what was sent and of the reply that came.
    """

    __slots__ = (
        "_claim",
        "_done",
        "again",
        "bytes_down",
        "bytes_up",
        "deadline",
        "id",
        "outcome",
        "sent_at",
        "short",
    )

    def __init__(self, identifier: str, deadline: float, *, short: bool = False) -> None:
        self.id = identifier
        self.deadline = deadline
        self.short = short
        self.outcome: Outcome | None = None
        self.again: Again | None = None
        self.sent_at: float | None = None
        self.bytes_up = 0
        self.bytes_down = 0
        # a lock that is held until completion costs half as much as an Event
        self._done = threading.Lock()
        self._done.acquire()
        self._claim = threading.Lock()

    @classmethod
    def refused(cls, reason: str) -> Self:
        """A query that was never sent, with its outcome."""
        pending = cls(new_id(), time.monotonic())
        pending.complete(NoReply(reason))
        return pending

    @property
    def done(self) -> bool:
        """Whether there is an outcome."""
        return self.outcome is not None

    def complete(self, outcome: Outcome) -> bool:
        """Set the outcome; a second call changes nothing.

        Returns: whether this is the first outcome.
        """
        first = self._claim.acquire(blocking=False)
        if first:
            self.outcome = outcome
            self.again = None  # it holds the tensor
            self._done.release()
        return first

    def count_sent(self, size_bytes: int) -> None:
        """Count a message that is sent now, before its reply can come."""
        if self.sent_at is None:
            self.sent_at = time.monotonic()
        self.bytes_up += size_bytes

    def count_unsent(self, size_bytes: int) -> None:
        """Take back the count of a message: the link did not take it."""
        self.bytes_up -= size_bytes
        if not self.bytes_up:
            self.sent_at = None

    def count_received(self, size_bytes: int) -> None:
        """Count the message of a reply."""
        self.bytes_down += size_bytes

    def give_up(self, reason: str) -> Outcome:
        """The outcome, which is NoReply where none came; a reply that comes now may be first."""
        self.complete(NoReply(reason))
        while self.outcome is None:  # another thread has claimed it, and is about to set it
            time.sleep(0)
        return self.outcome

    def wait(self, until: float | None = None) -> Outcome | None:
        """Wait for the outcome; None if the deadline passes first, or the time `until`."""
        if self.outcome is None:
            left_s = (self.deadline if until is None else until) - time.monotonic()
            if left_s > 0 and self._done.acquire(timeout=left_s):
                self._done.release()  # another wait must not wait
        return self.outcome

    def take_again(self, now: float) -> Query | None:
        """The query to send once more now, with the time that is left; None for nothing."""
        again, self.again = self.again, None
        left_s = self.deadline - now
        if again is None or self.done or left_s <= 0:
            return None
        return replace(again.query, deadline_ms=1e3 * left_s)


class OpenQueries:
    """The queries that wait for a reply, by id. May be used by several threads.

    Attributes:
        late: replies to queries that did not wait any more, or had their reply.
    """

    def __init__(self) -> None:
        self._open: dict[str, Pending] = {}
        self.late = 0

    def __len__(self) -> int:
        """Number of queries that wait."""
        return len(self._open)

    def add(self, pending: Pending) -> None:
        """Wait for a reply to a query."""
        self._open[pending.id] = pending

    def take(self, identifier: str) -> Pending | None:
        """The query that a reply answers; None, and counted as late, if none waits for it."""
        pending = self._open.pop(identifier, None)
        if pending is None:
            self.late += 1
        return pending

    def forget(self, pending: Pending) -> None:
        """Ignore any reply to a query from now on."""
        # the same query may be under way again
        if self._open.get(pending.id) is pending:
            self._open.pop(pending.id, None)

    def fail_all(self, reason: str) -> None:
        """Give all queries the outcome that there will be no reply."""
        for pending in list(self._open.values()):
            pending.complete(NoReply(reason))


@dataclass(frozen=True, slots=True)
class Target:
    """The server's model for this device's queries."""

    model: str
    version: str
