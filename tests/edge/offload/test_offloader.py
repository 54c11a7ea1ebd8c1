"""The offloader and a scripted server: a real broker, real links, and any reply at any time."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edge_sdk.offload.offloader import AGAIN_SHARE, AT_ONCE
from edge_sdk.offload.pending import NoReply
from edge_sdk.wire.messages import Query, Reply, pack_reply
from tests.edge.offload.scripted import (
    SECRET,
    TARGET,
    TENSOR,
    Open,
    Scripted,
    answer,
    ask,
    wait_until_present,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.deadline


def test_a_query_says_whom_it_asks_and_how_long_it_has(server: Scripted, offloader: Open) -> None:
    outcome = ask(offloader())
    (query,) = server.queries
    assert isinstance(outcome, Reply)
    assert outcome.id == query.id
    assert (query.model, query.version, query.depth) == ("digits", "1", 2)
    assert query.deadline_ms is not None
    assert 1_800 < query.deadline_ms <= 2_000


def test_a_query_knows_its_bytes_as_the_broker_passed_them_on(
    server: Scripted, offloader: Open
) -> None:
    device = offloader()
    server.reply_bytes.clear()  # to probes
    asked_at = time.monotonic()
    pending = device.begin(lambda: TENSOR, TARGET, 2.0)
    assert isinstance(device.finish(pending), Reply)
    assert [pending.bytes_up] == server.query_bytes
    assert [pending.bytes_down] == server.reply_bytes
    assert pending.sent_at is not None
    assert asked_at <= pending.sent_at <= time.monotonic()
    assert (device.bytes_up, device.bytes_down) == (pending.bytes_up, pending.bytes_down)
    server.on_query = lambda query: None  # no reply: nothing came down
    late = device.begin(lambda: TENSOR, TARGET, 0.1)
    assert isinstance(device.finish(late), NoReply)
    assert (late.bytes_up, late.bytes_down) == (sum(server.query_bytes[1:]), 0)  # sent twice
    server.on_query = lambda query: server.send(answer(query))


def test_a_query_that_is_not_sent_has_no_bytes(offloader: Open, free_port: int) -> None:
    device = offloader(wait=False, port=free_port)
    pending = device.begin(lambda: TENSOR, TARGET, 0.05)
    assert isinstance(device.finish(pending), NoReply)
    assert (pending.bytes_up, pending.bytes_down, pending.sent_at) == (0, 0, None)
    assert device.bytes_up == 0


def test_presence_is_known_before_the_first_query(server: Scripted, offloader: Open) -> None:
    offloader()
    assert server.probes
    assert not server.queries


def test_replies_reach_their_own_queries_in_any_order(server: Scripted, offloader: Open) -> None:
    held: list[Query] = []

    def hold(query: Query) -> None:
        held.append(query)
        if len(held) == 5:
            for value, one in reversed(list(enumerate(held))):
                server.send(answer(one, value))

    server.on_query = hold
    device = offloader()
    begun = [device.begin(lambda: TENSOR, TARGET, 2.0) for _ in range(5)]
    outcomes = [device.finish(pending) for pending in begun]
    assert [one.tensors["logits"][0, 0] for one in outcomes if isinstance(one, Reply)] == [
        0.0, 1.0, 2.0, 3.0, 4.0,
    ]  # fmt: skip


def test_a_late_reply_is_counted_and_nothing_else(server: Scripted, offloader: Open) -> None:
    server.on_query = lambda query: None
    device = offloader()
    assert ask(device, 0.1) == NoReply("no reply within the deadline")
    server.send(answer(server.queries[0]))
    wait_until(lambda: device.late_replies == 1, "a late reply")
    server.on_query = lambda query: server.send(answer(query, 7.0))
    wait_until_present(device)
    outcome = ask(device)
    assert isinstance(outcome, Reply)
    assert outcome.tensors["logits"][0, 0] == 7.0


def test_of_two_replies_the_first_counts(server: Scripted, offloader: Open) -> None:
    def twice(query: Query) -> None:
        server.send(answer(query, 1.0))
        server.send(answer(query, 2.0))

    server.on_query = twice
    device = offloader()
    for number in range(1, 6):
        outcome = ask(device)
        assert isinstance(outcome, Reply)
        assert outcome.tensors["logits"][0, 0] == 1.0
        wait_until(partial(lambda n: device.late_replies == n, number), "the second reply")


@pytest.mark.parametrize("lost", ["query", "reply"])
def test_a_lost_query_or_reply_is_asked_for_once_more_when_half_of_its_time_is_gone(
    server: Scripted, offloader: Open, lost: str
) -> None:
    def second(query: Query) -> None:
        if len(server.queries) == 2:
            server.send(answer(query, 4.0))

    server.on_query = second
    device = offloader()
    begun_at = time.monotonic()
    outcome = ask(device, 1.0)
    assert time.monotonic() - begun_at >= AGAIN_SHARE * 1.0
    assert isinstance(outcome, Reply)
    assert outcome.tensors["logits"][0, 0] == 4.0
    first, again = server.queries
    assert again.id == first.id
    assert again.deadline_ms is not None
    assert 0 < again.deadline_ms <= 1e3 * (1 - AGAIN_SHARE)
    assert server.qualities == [0, 0]
    assert (device.sent_again, device.late_replies) == (1, 0)
    if lost == "reply":  # the first reply comes after all
        server.send(answer(first, 5.0))
        wait_until(lambda: device.late_replies == 1, "the first reply")


def test_few_queries_at_once_go_at_quality_of_service_0_and_a_kept_one_never(
    server: Scripted, offloader: Open
) -> None:
    """A query out of the outbox is not sent again by itself: its time is long, and it is kept."""
    server.on_query = lambda query: None
    device = offloader()
    begun = [device.begin(lambda: TENSOR, TARGET, 60.0) for _ in range(AT_ONCE + 2)]
    wait_until(lambda: len(server.queries) == AT_ONCE + 2, "the queries")
    assert server.qualities == [0] * AT_ONCE + [1] * 2
    for pending in begun:
        device.forget(pending)
    kept = device.begin(lambda: TENSOR, TARGET, 60.0, "ab" * 16)
    wait_until(lambda: len(server.queries) == AT_ONCE + 3, "the kept query")
    assert server.qualities[-1] == 1
    assert kept.again is None
    assert begun[0].again is not None


def test_replies_that_are_no_frames_are_counted_and_the_right_one_still_counts(
    server: Scripted, offloader: Open
) -> None:
    def garble(query: Query) -> None:
        good = pack_reply(answer(query, 3.0), "digits", "1")
        for bad in (b"", b"\xff" * 40, good[:-1], good[4:], bytes(8)):
            server.send_raw(bad)
        server.send_raw(good)

    server.on_query = garble
    device = offloader()
    outcome = ask(device)
    assert isinstance(outcome, Reply)
    assert outcome.tensors["logits"][0, 0] == 3.0
    assert device.refused_replies == 5


def test_the_last_word_is_offline(
    server: Scripted, offloader: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "edge_sdk")
    device = offloader()
    wait_until(lambda: server.statuses[-1:] == ["online"], "online")
    threads = set(threading.enumerate())
    device.close()
    wait_until(lambda: server.statuses[-1:] == ["offline"], "offline")
    gone = threads - set(threading.enumerate())
    assert {"splitedge-watch"} <= {thread.name for thread in gone}
    assert ask(device) == NoReply("the agent is closed")
    assert "the server is away" not in caplog.text  # the device left, not the server


def test_closing_does_not_wait_for_a_query_under_way(server: Scripted, offloader: Open) -> None:
    server.on_query = lambda query: None
    device = offloader()
    pending = device.begin(lambda: TENSOR, TARGET, 30.0)
    wait_until(lambda: server.queries, "the query")
    start = time.monotonic()
    device.close()
    assert device.finish(pending) == NoReply("the agent is closed")
    assert time.monotonic() - start < 3.0


def test_a_heartbeat_that_fails_ends_nothing(
    server: Scripted, offloader: Open, caplog: pytest.LogCaptureFixture
) -> None:
    beats = []

    def telemetry() -> dict[str, int]:
        beats.append(1)
        if len(beats) == 1:
            raise OSError("no such file")
        return {"beat": len(beats)}

    device = offloader(telemetry=telemetry, heartbeat_s=0.05)
    wait_until(lambda: {"beat": 3} in server.telemetry, "the third heartbeat")
    assert "watching the server failed" in caplog.text
    assert isinstance(ask(device), Reply)


def test_commands_are_handed_on_and_nonsense_is_not(server: Scripted, offloader: Open) -> None:
    heard: list[Any] = []
    offloader(on_command=heard.append)
    for payload in (b"not json", b"[1]", b'{"op": "update"}'):
        server.command(payload)
    wait_until(lambda: heard, "the command")
    assert heard == [{"op": "update"}]


def test_secrets_stay_out_of_logs(
    server: Scripted, offloader: Open, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)
    ask(offloader())
    assert SECRET not in caplog.text
