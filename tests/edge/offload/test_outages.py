"""An offloader and a server that is away, overloaded, behind or silent: what a query costs then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import numpy as np
import pytest

from edge_sdk.offload.availability import Presence
from edge_sdk.offload.offloader import BEHIND, LINK_SHARE
from edge_sdk.offload.pending import NoReply, Outcome
from edge_sdk.wire.broker_address import BrokerAddress
from edge_sdk.wire.frames import Tensor
from edge_sdk.wire.messages import Problem, Query, Reply
from server.broker.child import BrokerChild
from tests.edge.offload.scripted import (
    TARGET,
    TENSOR,
    Open,
    Scripted,
    answer,
    ask,
    wait_until_present,
)
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.edge.fault_proxy import FaultProxy

pytestmark = pytest.mark.deadline


def test_an_overloaded_server_gets_no_query_during_its_back_off(
    server: Scripted, offloader: Open
) -> None:
    def refuse(query: Query) -> None:
        server.send(Reply(query.id, problem=Problem.OVERLOADED, detail="full", retry_after_s=0.4))

    server.on_query = refuse
    device = offloader()
    refused = ask(device)
    told_at = time.monotonic()
    assert isinstance(refused, Reply)
    assert refused.problem is Problem.OVERLOADED
    server.on_query = lambda query: server.send(answer(query))
    outcomes: list[Outcome] = []

    def answered() -> bool:
        outcomes.append(ask(device))
        return isinstance(outcomes[-1], Reply)

    wait_until(answered, "the end of the back-off")
    assert time.monotonic() - told_at > 0.35
    assert set(outcomes[:-1]) == {NoReply("server overloaded; retry after its back-off")}
    assert len(server.queries) == 2  # one refused, one answered
    assert device.presence is Presence.PRESENT


def test_a_query_that_would_wait_too_long_for_the_link_is_not_sent(
    server: Scripted, offloader: Open
) -> None:
    """FAULTS row 8: the backend takes nothing, so the broker holds the device back.

    A query for which there is time is sent, and says the time without its wait for the link.
    """
    device = offloader()
    go_on = threading.Event()

    def hold(query: Query) -> None:
        go_on.wait(60)  # nothing more is read, and nothing acknowledged
        server.send(answer(query))

    server.on_query = hold
    held = [device.begin(lambda: TENSOR, TARGET, 60.0) for _ in range(40)]

    def refused() -> bool:
        hasty = device.begin(lambda: TENSOR, TARGET, 0.4)
        device.forget(hasty)
        return hasty.outcome == NoReply(BEHIND)

    try:
        wait_until(refused, "the link is behind")
        assert device.presence is Presence.PRESENT
        patient = device.begin(lambda: TENSOR, TARGET, 60.0)
    finally:
        go_on.set()
    assert all(isinstance(device.finish(one), Reply) for one in [*held, patient])
    waited = next(query for query in server.queries if query.id == patient.id)
    assert waited.deadline_ms is not None
    assert waited.deadline_ms < 60_000 - 1e3 * LINK_SHARE * 0.4
    assert isinstance(ask(device), Reply)


def test_a_silent_server_costs_one_deadline_and_then_none(
    server: Scripted, offloader: Open
) -> None:
    server.on_query = lambda query: None
    device = offloader()
    server.mute = True
    start = time.monotonic()
    assert ask(device, 0.3) == NoReply("no reply within the deadline")
    assert 0.3 <= time.monotonic() - start < 0.55
    made: list[int] = []
    for number in range(100):
        start = time.monotonic()

        def tensor(number: int = number) -> Tensor:
            made.append(number)
            return TENSOR

        outcome = device.finish(device.begin(tensor, TARGET, 0.3))
        assert outcome == NoReply("server away: no reply within the deadline")
        assert time.monotonic() - start < 0.05
    assert made == []  # nothing is encoded in vain
    assert len({query.id for query in server.queries}) == 1


def test_a_caller_s_short_deadline_takes_the_server_from_nobody_else(
    server: Scripted, offloader: Open
) -> None:
    late: list[Query] = []
    server.on_query = late.append
    device = offloader()
    for _ in range(5):
        hasty = device.begin(lambda: TENSOR, TARGET, 0.05, short=True)
        assert device.finish(hasty) == NoReply("no reply within the deadline")
        assert device.presence is Presence.PRESENT
    assert {query.id for query in late} >= {hasty.id}  # it was sent, and not refused
    server.on_query = lambda query: server.send(answer(query))
    assert isinstance(ask(device), Reply)


def test_short_deadlines_at_a_silent_server_cost_the_agent_s_own_deadline_and_then_none(
    server: Scripted, offloader: Open
) -> None:
    server.on_query = lambda query: None
    device = offloader(deadline_s=0.3)
    server.mute = True
    start = time.monotonic()
    outcomes: list[Outcome] = []

    def refused() -> bool:
        outcomes.append(device.finish(device.begin(lambda: TENSOR, TARGET, 0.05, short=True)))
        return outcomes[-1] == NoReply("server away: no reply within the deadline")

    wait_until(refused, "the server is away")
    assert time.monotonic() - start >= 0.3
    assert set(outcomes[:-1]) == {NoReply("no reply within the deadline")}


def test_a_server_that_answers_probes_but_no_query_goes_on_longer_probation(
    server: Scripted, offloader: Open
) -> None:
    server.on_query = lambda query: None
    device = offloader()
    waits = []
    for _ in range(4):
        wait_until_present(device)
        assert isinstance(ask(device, 0.05), NoReply)
        away_at = time.monotonic()
        wait_until_present(device)
        waits.append(time.monotonic() - away_at)
    # probes every 0.1 s: the first counts, then none for 0.2, 0.4 and 0.8 s
    assert waits[1] >= 0.2
    assert waits[2] >= 0.4
    assert waits[3] >= 0.8
    server.on_query = lambda query: server.send(answer(query))
    assert isinstance(ask(device), Reply)
    server.on_query = lambda query: None
    assert isinstance(ask(device, 0.05), NoReply)
    away_at = time.monotonic()
    wait_until_present(device)
    assert time.monotonic() - away_at < 0.4  # one answer ends probation


class UnknownModel(BaseHTTPRequestHandler):
    """Answers each query over HTTP: there is no such model."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def http_server() -> Iterator[str]:
    """URL of a server that answers queries over HTTP."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), UnknownModel)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_an_answer_over_http_ends_probation_too(
    server: Scripted, offloader: Open, http_server: str
) -> None:
    server.on_query = lambda query: None
    large = Tensor("z2", np.zeros((1, 4_000), np.float32))
    device = offloader(http=http_server, max_packet_bytes=2_000)
    for _ in range(5):
        wait_until_present(device)
        answered = device.finish(device.begin(lambda: large, TARGET, 5.0))
        assert isinstance(answered, Reply)
        assert answered.problem is Problem.UNKNOWN_MODEL
        assert isinstance(ask(device, 0.05), NoReply)
    away_at = time.monotonic()
    wait_until_present(device)
    assert time.monotonic() - away_at < 0.8  # it would be 1.6 s without the answers


def test_probation_probes_at_the_interval_and_not_at_the_pace_of_the_answers(
    server: Scripted, offloader: Open
) -> None:
    server.on_query = lambda query: None
    device = offloader()
    for _ in range(4):
        wait_until_present(device)
        assert isinstance(ask(device, 0.05), NoReply)
    before, away_at = len(server.probes), time.monotonic()
    wait_until_present(device)  # after a probation of 0.8 s
    intervals = (time.monotonic() - away_at) / (0.75 * 0.1)  # jitter shortens one by a quarter
    assert len(server.probes) - before <= intervals + 2  # one at once, one under way


def test_a_round_trip_longer_than_the_probe_interval_is_no_absence(
    broker: BrokerChild, server: Scripted, offloader: Open, make_proxy: Callable[[int], FaultProxy]
) -> None:
    proxy = make_proxy(broker.port)
    proxy.latency_s = 0.15  # each way; a probe every 0.1 s
    device = offloader(port=proxy.port)
    assert isinstance(ask(device), Reply)


def test_a_reset_in_mid_offload_ends_the_wait_at_once(
    broker: BrokerChild, server: Scripted, offloader: Open, make_proxy: Callable[[int], FaultProxy]
) -> None:
    proxy = make_proxy(broker.port)
    server.on_query = lambda query: proxy.reset()
    device = offloader(port=proxy.port)
    start = time.monotonic()
    outcome = ask(device, 5.0)
    assert isinstance(outcome, NoReply)
    assert "connection was lost: the broker ended, or the network failed" in outcome.reason
    assert time.monotonic() - start < 1.0
    server.on_query = lambda query: server.send(answer(query))
    wait_until_present(device)
    assert isinstance(ask(device), Reply)


def test_closing_in_a_black_hole_takes_seconds_at_most(
    broker: BrokerChild, offloader: Open, make_proxy: Callable[[int], FaultProxy]
) -> None:
    proxy = make_proxy(broker.port)
    device = offloader(port=proxy.port)
    proxy.hole()
    big = Tensor("z2", np.zeros((1, 250_000), np.float32))
    # more than the sockets between here and there hold
    for _ in range(12):
        device.begin(lambda: big, TARGET, 0.2)
    start = time.monotonic()
    device.close()
    assert time.monotonic() - start < 6.0


def test_a_broker_that_moved_is_found(
    broker: BrokerChild, server: Scripted, offloader: Open, free_port: int
) -> None:
    device = offloader(
        wait=False, port=free_port, locate=lambda: BrokerAddress("127.0.0.1", broker.port)
    )
    wait_until_present(device, 8.0)
    assert isinstance(ask(device), Reply)


def test_reasons_name_the_broker_that_is_not_there(offloader: Open, free_port: int) -> None:
    device = offloader(wait=False, port=free_port)
    outcome = ask(device, 0.3)
    assert isinstance(outcome, NoReply)
    assert f"no broker at mqtt://127.0.0.1:{free_port}" in outcome.reason
    assert device.why_away
