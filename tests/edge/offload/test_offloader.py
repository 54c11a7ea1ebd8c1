"""The offloader and a scripted server: a real broker, real links, and any reply at any time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pytest

from edge_sdk.identity import Identity
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.mqtt.messages import Message
from edge_sdk.offload.availability import Presence
from edge_sdk.offload.offloader import AGAIN_SHARE, AT_ONCE, BEHIND, LINK_SHARE, Offloader
from edge_sdk.offload.pending import NoReply, Outcome, Pending, Target
from edge_sdk.wire.broker_address import BrokerAddress
from edge_sdk.wire.codecs import decode, encode
from edge_sdk.wire.frames import Tensor, unpack
from edge_sdk.wire.messages import Problem, Query, Reply, pack_reply, read_query
from edge_sdk.wire.rows import parted
from edge_sdk.wire.topics import Kind, Topic, all_devices
from server.broker.child import BrokerChild
from server.broker.policy import Principal, credential_sha256
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.edge.fault_proxy import FaultProxy

pytestmark = pytest.mark.deadline

TARGET = Target("digits", "1")
TENSOR = Tensor("z2", np.zeros((1, 4), np.float32))
SECRET = "s" * 43


class Scripted:
    """A server with replies that the test decides; probes are answered unless `mute`."""

    def __init__(self, broker: BrokerChild) -> None:
        self.mute = False
        self.on_query: Callable[[Query], None] = lambda query: self.send(answer(query))
        self.queries: list[Query] = []
        self.query_bytes: list[int] = []
        self.qualities: list[int] = []  # QoS of the queries
        self.reply_bytes: list[int] = []
        self.probes: list[Query] = []
        self.statuses: list[Any] = []
        self.telemetry: list[Any] = []
        self.device = ""
        address = BrokerAddress("127.0.0.1", broker.port)
        self.link = MqttLink(address, client_id="backend-1", username="backend", password=SECRET)
        self.link.subscribe(all_devices(Kind.QUERY), self._receive)
        self.link.subscribe(
            all_devices(Kind.STATUS),
            lambda message: self.statuses.append(orjson.loads(message.payload)["status"]),
        )
        self.link.subscribe(
            all_devices(Kind.TELEMETRY),
            lambda message: self.telemetry.append(orjson.loads(message.payload)),
        )
        self.link.start()
        self.link.wait_connected(10.0)

    def send(self, reply: Reply) -> None:
        """Reply to the device."""
        payload = pack_reply(reply, "digits", "1")
        self.reply_bytes.append(len(payload))
        self.send_raw(payload)

    def send_raw(self, payload: bytes) -> None:
        """Publish any bytes on the device's reply topic."""
        self.link.publish(str(Topic("default", self.device, Kind.REPLY)), payload)

    def command(self, payload: bytes) -> None:
        """Publish any bytes on the device's command topic."""
        self.link.publish(str(Topic("default", self.device, Kind.COMMAND)), payload)

    def _receive(self, message: Message) -> None:
        query = read_query(unpack(message.payload))
        if query.tensor is None:
            self.probes.append(query)
            if not self.mute:
                self.send(Reply(query.id))
        else:
            self.queries.append(query)
            self.query_bytes.append(len(message.payload))
            self.qualities.append(message.qos)
            self.on_query(query)


def answer(query: Query, value: float = 0.0) -> Reply:
    return Reply(query.id, {"logits": np.full((1, 3), value, np.float32)})


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerChild]:
    child = BrokerChild()
    child.set_principal(Principal("backend", "backend", None, credential_sha256(SECRET)))
    child.start()
    yield child
    child.stop()


@pytest.fixture
def server(broker: BrokerChild) -> Iterator[Scripted]:
    server = Scripted(broker)
    yield server
    server.link.stop()


Open = Callable[..., Offloader]


@pytest.fixture
def offloader(
    broker: BrokerChild, server: Scripted, request: pytest.FixtureRequest
) -> Iterator[Open]:
    """Opens the offloader of a new device, connected and with the server present."""
    opened: list[Offloader] = []

    def start(*, wait: bool = True, port: int | None = None, **other: Any) -> Offloader:
        device = f"pi-{request.node.name.replace('_', '-')}"[:50].rstrip("-").lower()
        device = "".join(c for c in device if c.isalnum() or c == "-")
        principal = Principal(device, "device", "default", credential_sha256(SECRET))
        broker.set_principal(principal)
        server.device = device
        offloader = Offloader(
            Identity("http://127.0.0.1:9", device, "default", SECRET),
            BrokerAddress("127.0.0.1", port or broker.port),
            **{"probe_interval_s": 0.1, **other},
        )
        opened.append(offloader)
        if wait:
            wait_until_present(offloader)
        return offloader

    yield start
    for one in opened:
        one.close()


def wait_until_present(device: Offloader, timeout_s: float = 5.0) -> None:
    wait_until(lambda: device.presence is Presence.PRESENT, "the server is present", timeout_s)


def ask(offloader: Offloader, deadline_s: float = 2.0) -> Outcome:
    return offloader.finish(offloader.begin(lambda: TENSOR, TARGET, deadline_s))


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


def test_a_pack_without_a_reply_is_sent_once_more(server: Scripted, offloader: Open) -> None:
    server.on_query = lambda query: server.send(answer(query)) if len(server.queries) > 1 else None
    device = offloader()
    begun = device.begin(lambda: TENSOR, TARGET, 1.0, together=True)
    wait_until(lambda: begun.done, "the reply to the second message")  # nobody waits for it yet
    assert isinstance(device.finish(begun), Reply)
    assert [query.id for query in server.queries] == [begun.id] * 2


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


def test_secrets_stay_out_of_logs(
    server: Scripted, offloader: Open, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)
    ask(offloader())
    assert SECRET not in caplog.text


def begin_together(device: Offloader, many: int, deadline_s: float = 5.0) -> list[Pending]:
    begun = [
        device.begin(
            lambda value=value: Tensor("z2", np.full((1, 4), value, np.float32)),  # type: ignore[misc]  # of a lambda
            TARGET,
            deadline_s,
            together=True,
        )
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
    begun = [
        device.begin(
            lambda value=value: Tensor("z2", *encode(np.full((1, 4), value, np.float32), "int8")),  # type: ignore[misc]  # of a lambda
            TARGET,
            5.0,
            together=True,
        )
        for value in range(40)
    ]
    device.send_gathered()
    for value, pending in enumerate(begun):
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
