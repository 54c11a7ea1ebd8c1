"""Late answers: what the outbox holds is asked again once the server is there, oldest first."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from edge_sdk.errors import InputError, SplitedgeError, StorageError
from edge_sdk.offload.offloader import NoReply, Offloader, Outcome, Pending, Presence, Target
from edge_sdk.offload.outbox import Answer, Outbox, Waiting
from edge_sdk.prediction import LateAnswer
from edge_sdk.session import Array
from edge_sdk.wire.messages import Problem, Reply

logger = logging.getLogger(__name__)

# Few, because the queries of now come first at the server's queue and on the link.
IN_FLIGHT: Final = 8
DEADLINE_S: Final = 30.0
# A disk that took no answer makes the server compute it again: not more often than this.
STORAGE_PAUSE_S: Final = 10.0
# A server with these will answer the same query another time; with any other problem never, but
# for FAILED: what broke there may be mended, or may be this very query.
PASSING: Final = frozenset({Problem.OVERLOADED, Problem.NOT_READY, Problem.EXPIRED})
FAILED_MAX: Final = 3

Read = Callable[[Waiting, Reply], tuple[int, Array]]


def passing(outcome: Outcome) -> bool:
    """Whether the query may still be answered another time."""
    if isinstance(outcome, NoReply):
        return True
    return outcome.problem in PASSING or outcome.problem is Problem.FAILED


class LateAnswers:
    """An outbox and the thread that has it answered.

    Args:
        read: label and probabilities of a reply; raises InputError where it holds none.
        pause_s: between two looks at a server that is not there.
    """

    def __init__(self, outbox: Outbox, offloader: Offloader, read: Read, pause_s: float) -> None:
        self._outbox = outbox
        self._offloader = offloader
        self._read = read
        self._pause_s = pause_s
        self._lost = 0
        self._failing = False
        self._failures: dict[str, int] = {}  # by query, how often the server has failed at it
        self._filled = threading.Event()
        self._filled.set()  # an earlier run of the agent may have left something
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="splitedge-outbox", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Queries that could not be kept: the outbox was full, or the disk."""
        return self._lost

    def keep(self, query: Waiting) -> str:
        """Have this query answered late. One fsync; never fails.

        Returns: its id, from here on kept until acknowledged; empty if it could not be kept.
        """
        try:
            kept = self._outbox.put(query)
            why = "it is full; are answers acknowledged?"
        except StorageError as err:
            kept, why = False, str(err)
        if not kept:
            # one warning a streak: a full disk stays full for many predictions
            level = logging.DEBUG if self._failing else logging.WARNING
            logger.log(level, "outbox: a query was not kept: %s", why)
            self._lost += 1
        self._failing = not kept
        if kept:
            self._filled.set()
        return query.id if kept else ""

    def unanswered(self) -> int | None:
        """How many queries wait for the server; None if the disk does not tell."""
        try:
            return self._outbox.unanswered()
        except StorageError:
            return None

    def answers(self) -> list[LateAnswer]:
        """The answers nobody acknowledged, in the order of their queries.

        Raises: StorageError.
        """
        return self._outbox.answers()

    def acknowledge(self, identifier: str) -> bool:
        """Forget an answer; whether there was one of that id.

        Raises: StorageError.
        """
        return self._outbox.acknowledge(identifier)

    def close(self) -> None:
        """End the thread; call it once the offloader is closed, so that nothing is awaited."""
        self._closing.set()
        self._filled.set()
        self._thread.join()
        self._outbox.close()

    def _work(self) -> None:
        while not self._closing.is_set():
            self._filled.wait()
            try:
                pause_s = self._pause_s
                if self._offloader.presence is Presence.PRESENT:
                    pause_s = self._round()
            except SplitedgeError as err:
                logger.warning("late answers: %s", err)
                pause_s = STORAGE_PAUSE_S
            except Exception:  # outermost loop of this thread: one bad round must not be the last
                logger.exception("late answers failed")
                pause_s = STORAGE_PAUSE_S
            if pause_s:
                self._closing.wait(pause_s)

    def _round(self) -> float:
        """Ask for some and store what came.

        Returns: how long to wait before the next round, in seconds.
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
            # answers come to light in order: what is behind a query without one is asked again
            if isinstance(outcome, NoReply) or self._again(query, outcome):
                break
            answers.append((query.id, self._answer(query, outcome)))
        self._outbox.answer(answers)
        return 0.0 if len(answers) == len(queries) else self._pause_s

    def _again(self, query: Waiting, reply: Reply) -> bool:
        """Whether to ask once more: a server that fails at it is asked FAILED_MAX times in all."""
        if reply.problem is not Problem.FAILED:
            self._failures.pop(query.id, None)
            return passing(reply)
        self._failures[query.id] = self._failures.get(query.id, 0) + 1
        if self._failures[query.id] < FAILED_MAX:
            return True
        del self._failures[query.id]
        return False

    def _begin(self, query: Waiting) -> Pending:
        target = Target(query.manifest.model, query.manifest.version)
        return self._offloader.begin(lambda: query.tensor, target, DEADLINE_S, query.id)

    def _answer(self, query: Waiting, reply: Reply) -> Answer:
        if reply.problem is not None:
            return Answer(reason=f"server: {reply.problem}: {reply.detail}")
        try:
            label, probabilities = self._read(query, reply)
        except InputError as err:
            return Answer(reason=str(err))
        latency_ms = max(0.0, (time.time() - query.asked_at) * 1e3)
        return Answer(label, probabilities.tolist(), latency_ms)
