"""Availability of the server: the table of transitions, probation and back-off, without a clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import pytest

from edge_sdk.offload.availability import PROBATION_MAX_S, Availability, Presence

UNKNOWN, PRESENT, AWAY = Presence

NOW: Final = 100.0
INTERVAL_S: Final = 0.5
DEADLINE_S: Final = 1.0

Event = Callable[[Availability], None]

EVENTS: Mapping[str, Event] = {
    "query answered": Availability.query_answered,
    "probe answered": lambda server: server.probe_answered(NOW),
    "deadline missed": lambda server: server.deadline_missed(NOW),
    "short deadline missed": lambda server: server.short_deadline_missed(NOW),
    "link lost": lambda server: server.link_lost("the connection was lost"),
    "overloaded": lambda server: server.overloaded(NOW, 1.0),
}

# the events that lead to each state from a new machine
PATHS: Mapping[Presence, tuple[str, ...]] = {
    UNKNOWN: (),
    PRESENT: ("query answered",),
    AWAY: ("link lost",),
}


def server_in(state: Presence) -> Availability:
    server = Availability(INTERVAL_S, DEADLINE_S)
    for event in PATHS[state]:
        EVENTS[event](server)
    assert server.presence is state
    return server


def miss(server: Availability, now: float) -> None:
    """The server came back by a probe, and a query got no reply until `now`."""
    assert server.presence is PRESENT
    server.deadline_missed(now)


@pytest.mark.parametrize(
    ("state", "event", "expected"),
    [
        (UNKNOWN, "query answered", PRESENT),
        (UNKNOWN, "probe answered", PRESENT),
        (UNKNOWN, "deadline missed", AWAY),
        (UNKNOWN, "short deadline missed", UNKNOWN),
        (UNKNOWN, "link lost", AWAY),
        (UNKNOWN, "overloaded", UNKNOWN),
        (PRESENT, "query answered", PRESENT),
        (PRESENT, "probe answered", PRESENT),
        (PRESENT, "deadline missed", AWAY),
        (PRESENT, "short deadline missed", PRESENT),
        (PRESENT, "link lost", AWAY),
        (PRESENT, "overloaded", PRESENT),
        (AWAY, "query answered", PRESENT),
        (AWAY, "probe answered", PRESENT),
        (AWAY, "deadline missed", AWAY),
        (AWAY, "short deadline missed", AWAY),
        (AWAY, "link lost", AWAY),
        (AWAY, "overloaded", AWAY),
    ],
)
def test_each_event_leads_to_one_state(state: Presence, event: str, expected: Presence) -> None:
    server = server_in(state)
    EVENTS[event](server)
    assert server.presence is expected


@pytest.mark.parametrize(
    ("state", "expected"),
    [(UNKNOWN, None), (PRESENT, None), (AWAY, "server away: the connection was lost")],
)
def test_only_a_server_that_is_away_gets_no_query(state: Presence, expected: str | None) -> None:
    assert server_in(state).refusal(NOW) == expected


def test_the_last_reason_is_given_while_away_and_none_after() -> None:
    server = server_in(AWAY)
    assert server.why_away == "the connection was lost"
    server.deadline_missed(NOW)
    assert server.why_away == "no reply within the deadline"
    server.query_answered()
    assert server.why_away == ""


def test_an_overloaded_server_gets_no_query_until_its_back_off_ends() -> None:
    server = server_in(PRESENT)
    server.overloaded(NOW, retry_after_s=2.0)
    assert server.refusal(NOW + 1.99) == "server overloaded; retry after its back-off"
    assert server.refusal(NOW + 2.0) is None


def test_a_back_off_outlasts_an_absence() -> None:
    server = server_in(PRESENT)
    server.overloaded(NOW, retry_after_s=2.0)
    server.link_lost("reset")
    assert server.refusal(NOW + 1.0) == "server away: reset"
    server.probe_answered(NOW + 1.0)
    assert server.refusal(NOW + 1.0) == "server overloaded; retry after its back-off"
    assert server.refusal(NOW + 2.0) is None


def test_after_the_first_miss_the_next_probe_counts() -> None:
    server = server_in(PRESENT)
    miss(server, NOW)
    server.probe_answered(NOW)
    assert server.presence is PRESENT


def test_probation_doubles_with_each_further_miss_up_to_its_limit() -> None:
    server = server_in(PRESENT)
    miss(server, NOW)
    server.probe_answered(NOW)
    # 0.5 s * 2^1, 2^2, 2^3 = 4 s, which is the limit
    for probation_s in (1.0, 2.0, 4.0, PROBATION_MAX_S, PROBATION_MAX_S):
        miss(server, NOW)
        server.probe_answered(NOW + probation_s - 0.01)
        assert server.presence is AWAY
        server.probe_answered(NOW + probation_s)
        assert server.presence is PRESENT


def test_queries_that_miss_together_count_once() -> None:
    server = server_in(PRESENT)
    for _ in range(5):
        server.deadline_missed(NOW)
    server.probe_answered(NOW)
    assert server.presence is PRESENT


def test_short_deadlines_that_are_missed_count_once_nothing_is_answered_for_a_deadline() -> None:
    server = server_in(PRESENT)
    server.short_deadline_missed(NOW)
    server.short_deadline_missed(NOW + DEADLINE_S - 0.01)
    assert server.presence is PRESENT
    server.short_deadline_missed(NOW + DEADLINE_S)
    assert server.presence is AWAY


@pytest.mark.parametrize("event", ["query answered", "probe answered"])
def test_an_answer_ends_the_doubt_of_short_deadlines(event: str) -> None:
    server = server_in(PRESENT)
    server.short_deadline_missed(NOW)
    assert server.doubted
    EVENTS[event](server)
    assert not server.doubted
    server.short_deadline_missed(NOW + DEADLINE_S)
    assert server.presence is PRESENT


def test_a_reply_to_a_query_ends_probation() -> None:
    server = server_in(PRESENT)
    for _ in range(3):
        miss(server, NOW)
        server.probe_answered(NOW + PROBATION_MAX_S)
    miss(server, NOW)
    server.query_answered()
    assert server.presence is PRESENT
    miss(server, NOW + PROBATION_MAX_S)  # the first miss again
    server.probe_answered(NOW + PROBATION_MAX_S)
    assert server.presence is PRESENT
