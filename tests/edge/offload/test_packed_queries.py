"""Queries that are ready together: few messages, and each gets its own answer."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from edge_sdk.manifest import Codec
from edge_sdk.offload.offloader import Offloader
from edge_sdk.offload.pending import NoReply, Pending
from edge_sdk.wire.codecs import decode, encode
from edge_sdk.wire.frames import Tensor
from edge_sdk.wire.messages import Problem, Query, Reply
from edge_sdk.wire.rows import parted
from tests.edge.offload.scripted import TARGET, TENSOR, Open, Scripted, answer
from tests.waiting import wait_until

pytestmark = pytest.mark.deadline


def test_a_pack_without_a_reply_is_sent_once_more(server: Scripted, offloader: Open) -> None:
    server.on_query = lambda query: server.send(answer(query)) if len(server.queries) > 1 else None
    device = offloader()
    begun = device.begin(lambda: TENSOR, TARGET, 1.0, together=True)
    wait_until(lambda: begun.done, "the reply to the second message")  # nobody waits for it yet
    assert isinstance(device.finish(begun), Reply)
    assert [query.id for query in server.queries] == [begun.id] * 2


def tensor_of(value: int, codec: Codec = "fp32") -> Tensor:
    return Tensor("z2", *encode(np.full((1, 4), value, np.float32), codec))


def begin_together(
    device: Offloader, many: int, deadline_s: float = 5.0, codec: Codec = "fp32"
) -> list[Pending]:
    """Queries of the numbers from 0, which are all ready at once."""
    begun = [
        device.begin(partial(tensor_of, value, codec), TARGET, deadline_s, together=True)
        for value in range(many)
    ]
    device.send_gathered()
    return begun


def test_queries_that_are_ready_together_cross_in_few_messages(
    server: Scripted, offloader: Open
) -> None:
    def double(query: Query) -> None:
        assert query.tensor is not None
        server.send(Reply(query.id, {"logits": 2 * query.tensor.array[:, :3]}))

    server.on_query = double
    device = offloader()
    server.reply_bytes.clear()
    begun = begin_together(device, 40)
    for value, pending in enumerate(begun):
        outcome = device.finish(pending)
        assert isinstance(outcome, Reply)
        assert outcome.tensors["logits"].tolist() == [[2.0 * value] * 3]
    assert len(server.queries) < 40
    assert sum(len(query.tensor.array) for query in server.queries if query.tensor) == 40
    assert sum(pending.bytes_up for pending in begun) == sum(server.query_bytes)
    assert sum(pending.bytes_down for pending in begun) == sum(server.reply_bytes)
    assert device.bytes_up == sum(server.query_bytes)
    assert not device._open


def test_a_server_that_takes_one_row_a_query_answers_all_the_same(
    server: Scripted, offloader: Open
) -> None:
    def one_row(query: Query) -> None:
        assert query.tensor is not None
        if len(query.tensor.array) > 1:
            server.send(Reply(query.id, problem=Problem.BAD_REQUEST, detail="expected 1 sample"))
        else:
            server.send(answer(query, float(query.tensor.array[0, 0])))

    server.on_query = one_row
    device = offloader()
    for value, pending in enumerate(begin_together(device, 40)):
        outcome = device.finish(pending)
        assert isinstance(outcome, Reply)
        assert outcome.tensors["logits"][0, 0] == value
    assert not device._open


def test_a_server_without_scales_of_rows_answers_int8_all_the_same(
    server: Scripted, offloader: Open
) -> None:
    """A server of 0.1.0 takes one tensor a query; its sentence is the one of its read_query."""

    def one_tensor(query: Query) -> None:
        assert query.tensor is not None
        if (many := len(parted(query.tensor))) > 1:
            detail = f"query: expected one tensor, got {many}"
            server.send(Reply(query.id, problem=Problem.BAD_REQUEST, detail=detail))
        else:
            value = decode(query.tensor.array, query.tensor.parameters)[0, 0]
            server.send(answer(query, float(value)))

    server.on_query = one_tensor
    device = offloader()
    for value, pending in enumerate(begin_together(device, 40, codec="int8")):
        outcome = device.finish(pending)
        assert isinstance(outcome, Reply)
        assert outcome.tensors["logits"][0, 0] == value
    packed = [query for query in server.queries if query.tensor and len(query.tensor.array) > 1]
    assert packed  # it was tried
    assert sum(len(query.tensor.array) for query in server.queries if query.tensor) > 40
    assert not device._open


def test_packs_without_a_reply_cost_one_deadline_and_leave_nothing_behind(
    server: Scripted, offloader: Open
) -> None:
    server.on_query = lambda query: None
    device = offloader()
    outcomes = [device.finish(pending) for pending in begin_together(device, 20, 2.0)]
    assert outcomes == [NoReply("no reply within the deadline")] * 20
    assert not device._open
    for query in server.queries:
        server.send(answer(query))
    wait_until(lambda: device.late_replies == len(server.queries), "the late replies")
