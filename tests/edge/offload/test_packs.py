"""Packs: which rows leave together, and what each gets of the one reply."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.offload import packs
from edge_sdk.offload.packs import Pack, Packs, Row
from edge_sdk.offload.pending import CLOSED, NoReply, Pending, Target
from edge_sdk.wire.frames import Tensor
from edge_sdk.wire.messages import Problem, Reply, new_id
from tests.waiting import wait_until

TARGET = Target("digits", "1")
LONG_S = 60.0


class World:
    """A link that notes what leaves; the test answers."""

    def __init__(self) -> None:
        # deadlines are counted from here: a row that is begun late still fits the others
        self.began = time.monotonic()
        self.sent: list[tuple[Pending, Tensor]] = []
        self.dropped: list[Pack] = []
        self.sent_again: list[Pack] = []
        self.packs = Packs(
            lambda pending, _, tensor: self.sent.append((pending, tensor)),
            self.dropped.append,
            self.sent_again.append,
            2_000_000,
        )

    def add(self, value: float, deadline_s: float = LONG_S, depth: int = 2) -> Pending:
        """Begin an offload of one number."""
        pending = Pending(new_id(), self.began + deadline_s)
        tensor = Tensor(f"z{depth}", np.full((1, 1), value, np.float32))
        self.packs.add(Row(pending, TARGET, tensor))
        return pending

    def values(self) -> list[list[float]]:
        """The numbers of each message that left."""
        return [tensor.array[:, 0].tolist() for _, tensor in self.sent]

    def answer(self, at: int) -> None:
        """Answer a message with ten times its numbers."""
        pending, tensor = self.sent[at]
        pending.complete(Reply(pending.id, {"logits": 10 * tensor.array}))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Rows leave by replies alone, not by time."""
    monkeypatch.setattr(packs, "HOLD_S", LONG_S)
    world = World()
    yield world
    world.packs.close()


def logits(pending: Pending) -> float:
    outcome = pending.outcome
    assert isinstance(outcome, Reply)
    assert outcome.id == pending.id
    assert outcome.tensors["logits"].shape == (1, 1)
    return float(outcome.tensors["logits"][0, 0])


def test_rows_gather_while_packs_are_under_way_and_leave_with_a_reply(world: World) -> None:
    rows = [world.add(value) for value in range(5)]
    alone = [[float(value)] for value in range(packs.UNDER_WAY_MOST)]
    assert world.values() == alone
    world.answer(0)
    assert world.values() == [*alone, [float(v) for v in range(packs.UNDER_WAY_MOST, 5)]]
    for at in range(1, len(world.sent)):
        world.answer(at)
    assert [logits(row) for row in rows] == [0.0, 10.0, 20.0, 30.0, 40.0]


def test_a_full_pack_waits_for_no_reply(world: World) -> None:
    for value in range(packs.UNDER_WAY_MOST + packs.ROWS_MOST + 1):
        world.add(value)
    sizes = [len(values) for values in world.values()]
    assert sizes == [*[1] * packs.UNDER_WAY_MOST, packs.ROWS_MOST]


def test_rows_that_gathered_leave_when_nothing_more_is_ready(world: World) -> None:
    for value in range(packs.UNDER_WAY_MOST + 2):
        world.add(value)
    world.packs.flush()
    assert [len(values) for values in world.values()][-1] == 2
    world.packs.flush()
    assert len(world.sent) == packs.UNDER_WAY_MOST + 1


def test_rows_leave_after_a_time_although_no_reply_comes() -> None:
    world = World()
    try:
        for value in range(packs.UNDER_WAY_MOST + 3):
            world.add(value)
        wait_until(lambda: sum(map(len, world.values())) == packs.UNDER_WAY_MOST + 3, "all rows")
    finally:
        world.packs.close()


def test_rows_that_do_not_fit_leave_in_messages_of_their_own(world: World) -> None:
    for _ in range(packs.UNDER_WAY_MOST):
        world.add(0.0)
    world.add(1.0)
    world.add(2.0, depth=3)
    world.add(3.0, depth=3, deadline_s=1.0)
    world.packs.flush()
    assert world.values()[packs.UNDER_WAY_MOST :] == [[1.0], [2.0], [3.0]]


def test_a_message_of_many_rows_is_no_longer_than_the_room(world: World) -> None:
    world.packs.room_bytes = 12  # three numbers
    for value in range(packs.UNDER_WAY_MOST + 7):
        world.add(value)
    world.packs.flush()
    assert [len(values) for values in world.values()][packs.UNDER_WAY_MOST :] == [3, 3, 1]
    assert world.packs.takes(Tensor("z2", np.zeros((1, 1), np.float32)))
    assert not world.packs.takes(Tensor("z2", np.zeros((1, 2), np.float32)))
    assert not world.packs.takes(Tensor("z2", np.zeros((2, 1), np.int8)))


@pytest.mark.parametrize("problem", sorted(packs.OF_CONTENT))
def test_rows_of_a_pack_that_was_refused_are_sent_alone(world: World, problem: Problem) -> None:
    for value in range(packs.UNDER_WAY_MOST):
        world.add(value)
    rows = [world.add(value) for value in (7.0, 8.0)]
    world.packs.flush()
    pack, _ = world.sent[-1]
    pack.complete(Reply(pack.id, problem=problem, detail="why"))
    assert world.values()[-2:] == [[7.0], [8.0]]
    assert [pending for pending, _ in world.sent[-2:]] == rows
    assert not any(row.done for row in rows)
    # a server of before packs would refuse the next one too
    assert not world.packs.takes(Tensor("z2", np.zeros((1, 1), np.float32)))


def test_a_problem_that_is_not_of_the_content_is_that_of_every_row(world: World) -> None:
    rows = [world.add(value) for value in range(packs.UNDER_WAY_MOST + 2)]
    world.packs.flush()
    pack, _ = world.sent[-1]
    pack.complete(Reply(pack.id, problem=Problem.OVERLOADED, retry_after_s=0.5))
    for row in rows[-2:]:
        assert row.outcome == Reply(row.id, problem=Problem.OVERLOADED, retry_after_s=0.5)
    assert len(world.sent) == packs.UNDER_WAY_MOST + 1


def test_a_lost_link_is_the_outcome_of_every_row(world: World) -> None:
    rows = [world.add(value) for value in range(packs.UNDER_WAY_MOST + 2)]
    world.packs.flush()
    for pending, _ in world.sent:
        pending.complete(NoReply("lost"))
    assert [row.outcome for row in rows] == [NoReply("lost")] * len(rows)


def test_bytes_of_a_message_are_shared_among_its_rows(world: World) -> None:
    rows = [world.add(value) for value in range(packs.UNDER_WAY_MOST + 3)][-3:]
    world.packs.flush()
    pack, _ = world.sent[-1]
    pack.count_sent(100)
    pack.count_received(50)
    assert [row.bytes_up for row in rows] == [34, 33, 33]
    assert [row.bytes_down for row in rows] == [17, 17, 16]
    pack.count_unsent(100)
    assert [(row.bytes_up, row.sent_at) for row in rows] == [(0, None)] * 3


def test_a_pack_of_which_no_row_waits_is_dropped_and_makes_room(world: World) -> None:
    rows = [world.add(value) for value in range(packs.UNDER_WAY_MOST + 2)]
    world.packs.forget(rows[-1])  # not sent yet: it never is
    world.packs.forget(rows[0])
    assert [pack.id for pack in world.dropped] == [rows[0].id]
    assert world.values()[packs.UNDER_WAY_MOST :] == [[float(packs.UNDER_WAY_MOST)]]
    world.packs.forget(Pending(new_id(), 0.0))  # of no pack


def test_a_pack_has_an_id_of_its_own_and_a_row_alone_keeps_its_id(world: World) -> None:
    rows = [world.add(value) for value in range(packs.UNDER_WAY_MOST + 2)]
    world.packs.flush()
    assert world.sent[0][0].id == rows[0].id
    assert world.sent[-1][0].id not in {row.id for row in rows}


def test_a_late_answer_with_the_id_of_a_row_is_not_that_row(world: World) -> None:
    row = world.add(1.0)
    world.packs.forget(Pending(row.id, row.deadline))
    assert world.dropped == []
    world.packs.forget(row)
    assert [pack.id for pack in world.dropped] == [row.id]


def test_only_the_first_outcome_of_a_pack_counts(world: World) -> None:
    rows = [world.add(value) for value in range(packs.UNDER_WAY_MOST + 2)]
    world.packs.flush()
    pack, tensor = world.sent[-1]
    assert pack.complete(Reply(pack.id, problem=Problem.BAD_REQUEST, detail="why"))
    left = len(world.sent)
    assert not pack.complete(Reply(pack.id, problem=Problem.BAD_REQUEST, detail="why"))
    assert not pack.complete(Reply(pack.id, {"logits": 10 * tensor.array}))
    assert len(world.sent) == left
    assert not any(row.done for row in rows[-2:])


@given(
    st.lists(st.sampled_from(["add", "add", "add", "reply", "flush", "forget"]), max_size=60),
    st.randoms(),
)
def test_every_row_that_waits_is_sent_once_and_gets_its_own_reply(
    steps: list[str], chance: random.Random
) -> None:
    """Whatever the order of events, no row is lost, sent twice, or answered with another's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packs, "HOLD_S", LONG_S)
        world = World()
        rows: list[Pending] = []
        given_up: set[Pending] = set()
        unanswered: list[int] = []
        try:
            for step in [*steps, "flush"]:
                before = len(world.sent)
                if step == "add":
                    rows.append(world.add(float(len(rows))))
                elif step == "flush":
                    world.packs.flush()
                elif step == "reply" and unanswered:
                    world.answer(unanswered.pop(chance.randrange(len(unanswered))))
                elif step == "forget" and rows:
                    given_up.add(chance.choice(rows))
                    world.packs.forget(max(given_up, key=rows.index))
                unanswered += range(before, len(world.sent))
            while unanswered:
                before = len(world.sent)
                world.answer(unanswered.pop())
                unanswered += range(before, len(world.sent))
        finally:
            world.packs.close()
    sent = [value for values in world.values() for value in values]
    assert len(set(sent)) == len(sent)
    assert max(map(len, world.values()), default=0) <= packs.ROWS_MOST
    assert {float(at) for at, row in enumerate(rows) if row not in given_up} <= set(sent)
    for at, row in enumerate(rows):
        if row not in given_up:
            assert logits(row) == 10.0 * at


def test_rows_that_gathered_end_with_the_agent(world: World) -> None:
    rows = [world.add(value) for value in range(packs.UNDER_WAY_MOST + 2)]
    world.packs.close()
    assert [row.outcome for row in rows[-2:]] == [NoReply(CLOSED)] * 2
    assert world.add(9.0).outcome == NoReply(CLOSED)
    assert len(world.sent) == packs.UNDER_WAY_MOST
