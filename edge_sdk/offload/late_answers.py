"""Late answers: queries in the outbox are sent again once the server is present, oldest first."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from edge_sdk.answers.prediction import LateAnswer
from edge_sdk.errors import InputError, SplitedgeError, StorageError
from edge_sdk.offload.availability import Presence
from edge_sdk.offload.offloader import Offloader
from edge_sdk.offload.outbox import Answer, Outbox, QueuedQuery
from edge_sdk.offload.pending import NoReply, Outcome, Pending, Target
from edge_sdk.session import Array
from edge_sdk.wire.messages import Problem, Reply

logger = logging.getLogger(__name__)

# Few, because new queries come first in the server's queue and on the link.
IN_FLIGHT: Final = 8
DEADLINE_S: Final = 30.0
# After a disk error the server must compute the answers again: not more often than this.
STORAGE_PAUSE_S: Final = 10.0
# Problems that end without a change of the query. FAILED is retried too, FAILED_MAX times in all:
# the fault may be the server's and pass, or lie in this query.
RETRYABLE: Final = frozenset({Problem.OVERLOADED, Problem.NOT_READY, Problem.EXPIRED})
FAILED_MAX: Final = 3

Read = Callable[[QueuedQuery, Reply], tuple[int, Array]]


def is_retryable(outcome: Outcome) -> bool:
    """Whether the same query may get an answer later."""
    if isinstance(outcome, NoReply):
        return True
    return outcome.problem in RETRYABLE or outcome.problem is Problem.FAILED


class LateAnswers:
    """An outbox, and the thread that sends its queries again.

    Args:
        read: label and probabilities of a reply; raises InputError if it holds none.
        pause_s: time between two attempts.
        may_ask: whether the user lets the device ask now; until then the queries wait.
    """

    def __init__(
        self,
        outbox: Outbox,
        offloader: Offloader,
        read: Read,
        pause_s: float,
        *,
        may_ask: Callable[[], bool] = lambda: True,
    ) -> None:
        self._outbox = outbox
        self._offloader = offloader
        self._read = read
        self._pause_s = pause_s
        self._may_ask = may_ask
        self._lost = 0
        self._failing = False
        self._failures: dict[str, int] = {}  # replies FAILED, by query
        self._filled = threading.Event()
        self._filled.set()  # an earlier run of the agent may have left something
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="splitedge-outbox", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Number of queries that could not be saved, because the outbox or the disk was full."""
        return self._lost

    def keep(self, query: QueuedQuery) -> str:
        """Save a query for a late answer. Takes one fsync; never raises.

        Returns: its id, kept from now on until acknowledged; empty if it could not be saved.
        """
        try:
            kept = self._outbox.put(query)
            why = "the outbox is full; acknowledge its answers"
        except StorageError as err:
            kept, why = False, str(err)
        if not kept:
            # one warning in a row: a full disk stays full for many predictions
            level = logging.DEBUG if self._failing else logging.WARNING
            logger.log(level, "outbox: a query was not saved: %s", why)
            self._lost += 1
        self._failing = not kept
        if kept:
            self._filled.set()
        return query.id if kept else ""

    def unanswered(self) -> int | None:
        """Number of queries without an answer; None if the disk cannot be read."""
        try:
            return self._outbox.unanswered()
        except StorageError:
            return None

    def answers(self) -> list[LateAnswer]:
        """The answers that are not acknowledged yet, in the order of their queries.

        Raises: StorageError.
        """
        return self._outbox.answers()

    def acknowledge(self, identifier: str) -> bool:
        """Delete the answer with that id.

        Returns: whether there was one.
        Raises: StorageError.
        """
        return self._outbox.acknowledge(identifier)

    def close(self) -> None:
        """End the thread. Close the offloader first, so that the thread waits for no reply."""
        self._closing.set()
        self._filled.set()
        self._thread.join()
        self._outbox.close()

    def _work(self) -> None:
        while not self._closing.is_set():
            self._filled.wait()
            try:
                pause_s = self._pause_s
                if self._offloader.presence is Presence.PRESENT and self._may_ask():
                    pause_s = self._round()
            except SplitedgeError as err:
                logger.warning("late answers: %s", err)
                pause_s = STORAGE_PAUSE_S
            except Exception:  # outermost loop of this thread: one bad round must not end it
                logger.exception("late answers failed")
                pause_s = STORAGE_PAUSE_S
            if pause_s:
                self._closing.wait(pause_s)

    def _round(self) -> float:
        """Send the oldest queries again and store their answers.

        Returns: seconds to wait before the next round.
        """
        self._filled.clear()
        queries = self._outbox.waiting(IN_FLIGHT)
        if not queries:
            return 0.0
        self._filled.set()
        begun = [(query, self._begin(query)) for query in queries]
        outcomes = [(query, self._offloader.finish(pending)) for query, pending in begun]
        answers = []
        for query, outcome in outcomes:
            # answers are given in order: queries behind one without an answer are sent again
            if isinstance(outcome, NoReply) or self._retry(query, outcome):
                break
            answers.append((query.id, self._answer(query, outcome)))
        self._outbox.answer(answers)
        return 0.0 if len(answers) == len(queries) else self._pause_s

    def _retry(self, query: QueuedQuery, reply: Reply) -> bool:
        """Whether to send the query again, at most FAILED_MAX times if the server fails at it."""
        if reply.problem is not Problem.FAILED:
            self._failures.pop(query.id, None)
            return is_retryable(reply)
        self._failures[query.id] = self._failures.get(query.id, 0) + 1
        if self._failures[query.id] < FAILED_MAX:
            return True
        del self._failures[query.id]
        return False

    def _begin(self, query: QueuedQuery) -> Pending:
        target = Target(query.manifest.model, query.manifest.version)
        return self._offloader.begin(lambda: query.tensor, target, DEADLINE_S, query.id)

    def _answer(self, query: QueuedQuery, reply: Reply) -> Answer:
        if reply.problem is not None:
            return Answer(reason=f"server: {reply.problem}: {reply.detail}")
        try:
            label, probabilities = self._read(query, reply)
        except InputError as err:
            return Answer(reason=str(err))
        latency_ms = max(0.0, (time.time() - query.asked_at) * 1e3)
        return Answer(label, probabilities.tolist(), latency_ms)
