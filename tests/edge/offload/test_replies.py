"""Replies that come late, twice and in any order: each query is answered once, with its own answer.

No thread and no network: the messages are a bag, the clock is a number, the outbox is on a disk.
"""

from __future__ import annotations

import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from edge_sdk.manifest import BundleManifest
from edge_sdk.offload.availability import TIMED_OUT
from edge_sdk.offload.outbox import Answer, Outbox, QueuedQuery
from edge_sdk.offload.pending import NoReply, OpenQueries, Outcome, Pending
from edge_sdk.wire.frames import Tensor
from edge_sdk.wire.messages import Reply

if TYPE_CHECKING:
    from tests.edge.digits import Digits

DEADLINE_S = 5.0
IN_FLIGHT = 8
PICK = st.integers(0, 1_000_000)


@dataclass(slots=True)
class Query:
    """A query of the application: its number is what the server computes for it."""

    number: int
    pending: Pending
    outcome: Outcome | None = None
    kept: bool = False
    answered: bool = False
    acknowledged: bool = False
    replies: list[Reply] = field(default_factory=list)

    @property
    def id(self) -> str:
        return f"{self.number:032x}"


class Replies(RuleBasedStateMachine):
    """A device, its open queries and its outbox, and a bag of replies under way.

    Attributes:
        manifest: of the bundle that asks. root: folder of the outboxes.
    """

    manifest: BundleManifest
    root: Path

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.open = OpenQueries()
        self.outbox = Outbox(Path(tempfile.mkdtemp(dir=self.root)))
        self.queries: list[Query] = []
        self.again: dict[int, Pending] = {}  # sent again out of the outbox
        self.bag: list[Reply] = []
        self.waiting: set[str] = set()  # ids of the queries that have no reply yet
        self.late = 0
        self.given: list[str] = []  # answers that the application was given, in order

    @rule()
    def ask(self) -> None:
        """The application asks, and the query reaches the server."""
        number = len(self.queries)
        query = Query(number, Pending(f"{number:032x}", self.now + DEADLINE_S))
        self.queries.append(query)
        self.open.add(query.pending)
        self.waiting.add(query.id)
        self._compute(query)

    @rule(pick=PICK, copies=st.integers(0, 2))
    @precondition(lambda self: self.bag)
    def arrive(self, pick: int, copies: int) -> None:
        """Any reply arrives, and may arrive again later."""
        reply = self.bag[pick % len(self.bag)]
        if not copies:
            self.bag.remove(reply)
        pending = self.open.take(reply.id)
        assert (pending is not None) == (reply.id in self.waiting)
        self.waiting.discard(reply.id)
        if pending is None:
            self.late += 1
        else:
            assert pending.id == reply.id
            pending.complete(reply)

    @rule(seconds=st.sampled_from((0.05, 0.1, 4.9, 5.0)))
    def pass_time(self, seconds: float) -> None:
        """Time passes, and the queries whose deadline it reaches give up."""
        self.now += seconds
        for query in self.queries:
            if query.outcome is None and query.pending.deadline <= self.now:
                self._finish(query)
        if self.again and min(p.deadline for p in self.again.values()) <= self.now:
            self._finish_round()

    @rule(pick=PICK)
    @precondition(lambda self: self.queries)
    def finish(self, pick: int) -> None:
        """The caller of a query that has its reply goes on."""
        query = self.queries[pick % len(self.queries)]
        if query.outcome is None and query.pending.done:
            self._finish(query)

    @rule()
    @precondition(lambda self: not self.again)
    def send_again(self) -> None:
        """The oldest queries of the outbox are sent again, under their ids."""
        for queued in self.outbox.waiting(IN_FLIGHT):
            number = int(queued.id, 16)
            self.again[number] = Pending(queued.id, self.now + DEADLINE_S)
            self.open.add(self.again[number])
            self.waiting.add(queued.id)
            self._compute(self.queries[number])

    @rule()
    def read(self) -> None:
        """The application reads its late answers, and acknowledges the first of them twice."""
        answers = self.outbox.answers()
        for answer in answers:
            query = self.queries[int(answer.id, 16)]
            assert query.kept
            assert not query.acknowledged
            assert answer.prediction is not None
            assert answer.prediction.label == query.number % 10
        if answers:
            first = self.queries[int(answers[0].id, 16)]
            assert self.outbox.acknowledge(first.id)
            assert not self.outbox.acknowledge(first.id)
            first.acknowledged = True
            self.given.append(first.id)
            # an answer that comes once more changes nothing
            self.outbox.answer([(first.id, self._answer(first.number))])

    @invariant()
    def each_query_has_one_outcome_and_it_is_its_own(self) -> None:
        """What was given to the caller never changes; late replies are counted."""
        for query in self.queries:
            if query.outcome is not None:
                assert query.pending.outcome is query.outcome
                if isinstance(query.outcome, Reply):
                    assert query.outcome.id == query.id
                    assert not query.kept
        assert self.open.late == self.late
        assert len(set(self.given)) == len(self.given)
        assert self.given == sorted(self.given)

    def teardown(self) -> None:
        """Nothing is left that is neither answered nor waiting."""
        unsettled = sum(query.kept and not query.answered for query in self.queries)
        assert self.outbox.unanswered() == unsettled
        self.outbox.close()

    def _compute(self, query: Query) -> None:
        self.bag.append(Reply(query.id, {"logits": np.array([query.number])}))

    def _finish(self, query: Query) -> None:
        self.open.forget(query.pending)
        self.waiting.discard(query.id)
        query.outcome = query.pending.give_up(TIMED_OUT)
        if isinstance(query.outcome, NoReply):
            query.kept = self.outbox.put(self._queued(query))
            assert self.outbox.put(self._queued(query))  # a second copy changes nothing

    def _finish_round(self) -> None:
        answers = []
        for number, pending in sorted(self.again.items()):
            self.open.forget(pending)
            outcome = pending.give_up(TIMED_OUT)
            if isinstance(outcome, NoReply):
                break
            assert int(outcome.tensors["logits"][0]) == number
            answers.append((pending.id, self._answer(number)))
            self.queries[number].answered = True
        for pending in self.again.values():
            self.open.forget(pending)
            self.waiting.discard(pending.id)
        self.outbox.answer([*answers, *answers])
        self.again = {}

    def _answer(self, number: int) -> Answer:
        return Answer(number % 10, [0.1] * 10, 1.0)

    def _queued(self, query: Query) -> QueuedQuery:
        tensor = Tensor("z2", np.full((1, 4), query.number, np.float32))
        return QueuedQuery(query.id, self.now, self.manifest, tensor, 0.5, 0.1)


def test_each_query_is_answered_once_whatever_the_network_does(
    digits: Digits, thorough: bool, tmp_path: Path
) -> None:
    """FAULTS row 9: late, repeated and reordered replies around a deadline of 5 s."""
    Replies.manifest = BundleManifest.load(digits.models / "digits" / "1" / "bundles" / "d2")
    Replies.root = tmp_path
    run_state_machine_as_test(
        Replies,
        settings=settings(
            max_examples=1000 if thorough else 25, stateful_step_count=40, deadline=None
        ),
    )


def test_the_caller_and_the_query_agree_where_reply_and_deadline_meet() -> None:
    """FAULTS row 9: whichever is first, there is one outcome for both."""
    for number in range(300):
        pending = Pending(str(number), 0.0)
        reply = Reply(str(number))
        network = threading.Thread(target=pending.complete, args=(reply,))
        network.start()
        outcome = pending.give_up(TIMED_OUT)
        network.join()
        assert pending.outcome is outcome
