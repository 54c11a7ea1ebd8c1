"""A query under way, and its outcome."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Final, Self

from edge_sdk.wire.messages import Reply, new_id

CLOSED: Final = "the agent is closed"


@dataclass(frozen=True, slots=True)
class NoReply:
    """Outcome of a query without a reply in time, with the reason."""

    reason: str


Outcome = Reply | NoReply


class Pending:
    """One query under way. The first outcome counts.

    Attributes:
        sent_at: by the monotonic clock; None if nothing was sent.
        bytes_up, bytes_down: payloads of the query that was sent and of the reply that came.
    """

    __slots__ = (
        "_claim",
        "_done",
        "bytes_down",
        "bytes_up",
        "deadline",
        "id",
        "outcome",
        "sent_at",
    )

    def __init__(self, identifier: str, deadline: float) -> None:
        self.id = identifier
        self.deadline = deadline
        self.outcome: Outcome | None = None
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

    def complete(self, outcome: Outcome) -> None:
        """Set the outcome; a second call changes nothing."""
        if self._claim.acquire(blocking=False):
            self.outcome = outcome
            self._done.release()

    def wait(self) -> Outcome | None:
        """Wait for the outcome; None if the deadline passes first."""
        if self.outcome is None:
            left_s = self.deadline - time.monotonic()
            if left_s > 0:
                self._done.acquire(timeout=left_s)
        return self.outcome


@dataclass(frozen=True, slots=True)
class Target:
    """The server's model for this device's queries."""

    model: str
    version: str
