"""Queries that come twice: which are served, and what is kept. Times are set by the test."""

from __future__ import annotations

from edge_sdk.wire.messages import new_id
from server.backend.duplicates import (
    ENTRY_BYTES,
    KEPT_BYTES,
    KEPT_MOST,
    KEPT_S,
    LATER_S,
    REPLY_BYTES,
    RecentQueries,
)

ID = "0" * 32


def test_a_second_message_is_served_only_after_a_refusal() -> None:
    recent = RecentQueries()
    served, new = recent.come("pi-1", ID, 1_000.0, 0.0)
    assert new
    assert recent.come("pi-1", ID, 500.0, 0.5) == (served, False)  # under way: its reply will come
    recent.drop(served)  # it was refused
    again, new = recent.come("pi-1", ID, 500.0, 0.5)
    assert new
    recent.replied(again, b"reply")
    known, new = recent.come("pi-1", ID, 400.0, 0.6)
    assert not new
    assert known.reply == b"reply"
    assert recent.duplicates == 2
    # another device with the same id is another query
    assert recent.come("pi-2", ID, 400.0, 0.6)[1]


def test_a_late_answer_is_not_the_duplicate_of_a_query_that_may_expire() -> None:
    recent = RecentQueries()
    live, _ = recent.come("pi-1", ID, 1_000.0, 0.0)
    assert not recent.come("pi-1", ID, 1_000.0, LATER_S)[1]  # a slow link brought it later
    late, new = recent.come("pi-1", ID, 30_000.0, 1.5)
    assert new
    recent.drop(live)  # it expires, and says nothing of the other
    assert recent.come("pi-1", ID, 29_000.0, 2.0) == (late, False)
    recent.replied(live, b"of a query that is replaced")
    assert late.reply is None


def test_ids_that_may_be_counters_are_not_compared() -> None:
    recent = RecentQueries()
    for identifier in ("", "1", "query-17"):
        assert recent.come("pi-1", identifier, 1_000.0, 0.0)[1]
        assert recent.come("pi-1", identifier, 1_000.0, 0.1)[1]


def test_queries_without_a_deadline_are_known_too() -> None:
    recent = RecentQueries()
    assert recent.come("pi-1", ID, None, 0.0)[1]
    assert not recent.come("pi-1", ID, None, 1.0)[1]


def test_what_is_kept_is_bounded_in_time_number_and_bytes() -> None:
    recent = RecentQueries()
    first, _ = recent.come("pi-1", ID, 1_000.0, 0.0)
    recent.replied(first, b"reply")
    assert recent.come("pi-1", ID, 1_000.0, KEPT_S + 1)[1]

    recent = RecentQueries()
    ids = [new_id() for _ in range(KEPT_MOST + 1)]
    for identifier in ids:
        recent.come("pi-1", identifier, 1_000.0, 0.0)
    assert recent.find("pi-1", ids[0]) is None
    assert recent.find("pi-1", ids[1]) is not None

    recent = RecentQueries()
    reply = bytes(100_000)
    fit = KEPT_BYTES // (len(reply) + ENTRY_BYTES)
    ids = [new_id() for _ in range(fit + 1)]
    for identifier in ids:
        served, _ = recent.come("pi-1", identifier, 1_000.0, 0.0)
        recent.replied(served, reply)
    assert [recent.find("pi-1", identifier) is None for identifier in ids] == [True] + [False] * fit
    # one long reply puts nothing out
    served, _ = recent.come("pi-1", ID, 1_000.0, 0.0)
    recent.replied(served, bytes(REPLY_BYTES + 1))
    assert recent.find("pi-1", ID) is None
    assert recent.find("pi-1", ids[-1]) is not None
