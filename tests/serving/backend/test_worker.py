"""Queries over a broker: answered, refused with a word, and never a reason to fall over."""

from __future__ import annotations

import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_sdk.mqtt.link import MqttLink
from edge_sdk.wire.broker_address import BrokerAddress
from edge_sdk.wire.frames import Tensor, pack_request, unpack
from edge_sdk.wire.messages import Problem, Query, new_id, pack_query
from edge_sdk.wire.topics import Kind
from server.backend.batcher import Batcher
from server.backend.duplicates import Served
from server.backend.inference import Inference
from server.backend.models import ModelStore, ServedModel
from server.backend.senders import SenderLimits, Senders
from server.backend.worker import MqttWorker
from server.broker.child import BrokerChild
from server.broker.policy import Principal, credential_sha256
from server.deployment.heartbeats import hear_devices
from server.errors import OverloadedError
from tests.serving.held_engine import kept_busy
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Device, Exported

pytestmark = pytest.mark.broker

Array = NDArray[Any]
QUEUE = 8
TOLERANCE = 1e-4  # float32 sums in another order, see test_ladder
SECRET = secrets.token_hex(32)


@dataclass(frozen=True)
class Backend:
    """A worker on a broker, and how a device gets in there."""

    address: BrokerAddress
    worker: MqttWorker
    inference: Inference
    seen: list[str]
    heard: list[tuple[Kind, str, bytes]]


def serve(
    address: BrokerAddress, models: ModelStore, limits: SenderLimits | None = None
) -> tuple[Backend, Callable[[], None]]:
    batcher = Batcher(queue_max=QUEUE, batch_max=4)
    inference = Inference(models, batcher, 4, Senders(limits))
    seen: list[str] = []
    link = MqttLink(address, client_id="backend", password=SECRET)
    heard: list[tuple[Kind, str, bytes]] = []
    worker = MqttWorker(link, inference, seen=seen.append)
    hear_devices(link, lambda *message: heard.append(message))
    link.start()
    link.wait_connected(10)

    def stop() -> None:
        batcher.stop()
        link.stop()

    return Backend(address, worker, inference, seen, heard), stop


@pytest.fixture(scope="module")
def models(exported: Exported) -> ModelStore:
    store = ModelStore(exported.root)
    store.load()
    return store


@pytest.fixture(scope="module")
def embedded() -> Iterator[BrokerAddress]:
    child = BrokerChild()
    for name, role, fleet in (("backend", "backend", None), ("pi-1", "device", "default")):
        child.set_principal(Principal(name, role, fleet, credential_sha256(SECRET)))  # type: ignore[arg-type]  # a Literal from a tuple
    child.start()
    yield BrokerAddress("127.0.0.1", child.port)
    child.stop()


@pytest.fixture(scope="module", params=["embedded", "mosquitto"])
def backend(request: pytest.FixtureRequest, models: ModelStore) -> Iterator[Backend]:
    running, stop = serve(request.getfixturevalue(request.param), models)
    yield running
    stop()


@pytest.fixture
def pi(backend: Backend, device: Callable[..., Device]) -> Device:
    return device(backend.address, "pi-1", SECRET)


@pytest.fixture
def busy(backend: Backend, exported: Exported) -> Iterator[threading.Event]:
    """The engine thread is busy until the event is set."""
    with kept_busy(backend.inference.batcher, exported) as gate:
        yield gate


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_a_query_is_answered_as_torch_answers(pi: Device, exported: Exported, depth: int) -> None:
    z = exported.smashed(depth, exported.x[3:5])
    reply = pi.ask(exported.query(depth, z, id=f"depth-{depth}"))
    assert reply.problem is None
    expected = exported.suffix(depth, z)
    np.testing.assert_allclose(reply.tensors["logits"], expected, atol=TOLERANCE)


def test_the_active_model_answers_where_none_is_named(pi: Device, exported: Exported) -> None:
    reply = pi.ask(exported.query(0, exported.x[:1], id="any", model=None))
    expected = exported.logits(exported.x[:1])
    np.testing.assert_allclose(reply.tensors["logits"], expected, atol=TOLERANCE)


def test_queries_in_flight_each_get_their_own_answer(pi: Device, exported: Exported) -> None:
    expected = exported.logits(exported.x[:48])
    for start in range(0, 48, QUEUE):
        some = range(start, start + QUEUE)
        for i in some:
            depth = (0, 1, 2, 4)[i % 4]
            z = exported.smashed(depth, exported.x[i : i + 1])
            pi.send(pack_query(exported.query(depth, z, id=str(i))))
        pi.wait(lambda n=start + QUEUE: pi.replies if len(pi.replies) == n else [])  # type: ignore[misc]  # mypy has no type for a lambda's default
    for reply in pi.replies:
        answer = reply.tensors["logits"][0]
        np.testing.assert_allclose(answer, expected[int(reply.id)], atol=TOLERANCE)


def test_a_probe_is_answered_at_once_even_while_the_engine_is_busy(
    pi: Device, busy: threading.Event
) -> None:
    reply = pi.ask(Query("probe", None, None, None))
    assert (reply.problem, dict(reply.tensors)) == (None, {})
    assert not busy.is_set()


def test_a_device_that_the_queue_refused_is_told_so_by_the_header_of_its_query_alone(
    embedded: BrokerAddress, models: ModelStore, device: Callable[..., Device], exported: Exported
) -> None:
    """FAULTS row 8."""
    backend, stop = serve(embedded, models)
    try:
        pi = device(embedded, "pi-1", SECRET)
        full = OverloadedError("full", retry_after_s=60.0)
        backend.inference.senders.settled("pi-1", full)
        query = pack_query(exported.query(0, exported.x[:1], id="unread"))
        pi.send(query[:-1])  # a tensor that could not be read
        reply = pi.wait(lambda: pi.replies)[-1]
        assert (reply.id, reply.problem) == ("unread", Problem.OVERLOADED)
        assert reply.retry_after_s == 60.0
        assert pi.ask(Query("probe", None, None, None)).problem is None
        assert backend.worker.malformed == 0
    finally:
        stop()


def test_a_worker_without_models_says_it_is_not_ready(
    embedded: BrokerAddress, device: Callable[..., Device], exported: Exported, tmp_path: Path
) -> None:
    _, stop = serve(embedded, ModelStore(tmp_path))
    try:
        pi = device(embedded, "pi-1", SECRET)
        assert pi.ask(Query("probe", None, None, None)).problem is Problem.NOT_READY
        reply = pi.ask(exported.query(0, exported.x[:1]))
        assert reply.problem is Problem.NOT_READY
        assert "publish" in reply.detail
    finally:
        stop()


class Restless(ModelStore):
    """A store whose operator activates the other version after each look at it."""

    def served(self, name: str | None = None, version: str | None = None) -> ServedModel:
        found = super().served(name, version)
        self.activate({"digits": "1" if found.manifest.version == "2" else "2"})
        return found


def test_reply_names_the_version_that_was_computed(
    embedded: BrokerAddress, exported: Exported, tmp_path: Path
) -> None:
    for version in (1, 2):
        exported.install(tmp_path, version=version)
    models = Restless(tmp_path)
    models.load()
    models.activate({"digits": "1"})
    engines = {one.manifest.version: one.engine for one in (models.served(), models.served())}
    backend, stop = serve(embedded, models)
    named: list[str] = []
    link = MqttLink(embedded, client_id="pi-1", password=SECRET)
    topic = "splitedge/v1/default/pi-1/"
    link.subscribe(
        topic + "reply",
        lambda message: named.append(unpack(message.payload).header["model_version"]),
    )
    link.start()
    try:
        link.wait_connected(10)
        query = pack_query(exported.query(0, exported.x[:1], id="one", version=None))
        wait_until(lambda: link.publish(topic + "query", query), "the query was not taken")
        wait_until(lambda: named, "no reply", 20)
        statistics = backend.inference.statistics
        wait_until(lambda: any(statistics.of(one).batches for one in engines.values()), "no run")
        assert named == [v for v, one in engines.items() if statistics.of(one).batches]
    finally:
        link.stop()
        stop()


def test_an_unknown_model_or_version_is_named(pi: Device, exported: Exported) -> None:
    x = exported.x[:1]
    reply = pi.ask(exported.query(0, x, id="a", model="letters"))
    assert (reply.problem, reply.detail) == (
        Problem.UNKNOWN_MODEL,
        "model letters: not served; available: digits version 1",
    )
    reply = pi.ask(exported.query(0, x, id="b", version="9"))
    assert reply.problem is Problem.UNKNOWN_MODEL
    assert "digits version 9" in reply.detail


def test_what_cannot_be_served_is_a_bad_request_with_its_id(pi: Device, exported: Exported) -> None:
    z = exported.smashed(2, exported.x[:1])
    x = Tensor("x", exported.x[:1])
    bad = {
        "shape": pack_query(exported.query(4, z, id="shape")),
        "depth": pack_query(exported.query(3, z, id="depth")),
        "dtype": pack_query(exported.query(0, z, id="dtype")),
        "rows": pack_query(exported.query(0, exported.x[:5], id="rows")),
        "scale": pack_query(exported.query(2, z.astype(np.uint8), id="scale")),
        "name": pack_request({"id": "name"}, [Tensor("y", exported.x[:1])]),
        "two": pack_request({"id": "two"}, [x, x]),
        "overflow": pack_query(exported.query(2, np.full_like(z, 3e38), id="overflow")),
    }
    for payload in bad.values():
        pi.send(payload)
    replies = pi.wait(lambda: pi.replies if len(pi.replies) == len(bad) else [])
    assert {reply.id: reply.problem for reply in replies} == dict.fromkeys(bad, Problem.BAD_REQUEST)
    assert all(reply.detail for reply in replies)


def test_a_full_queue_is_told_with_when_to_come_back(
    pi: Device, exported: Exported, busy: threading.Event
) -> None:
    for i in range(QUEUE + 3):
        pi.send(pack_query(exported.query(0, exported.x[:1], id=str(i))))
    refused = pi.wait(lambda: pi.replies if len(pi.replies) >= 3 else [])
    assert {reply.id for reply in refused} == {str(QUEUE), str(QUEUE + 1), str(QUEUE + 2)}
    assert all(reply.problem is Problem.OVERLOADED for reply in refused)
    assert all(0.05 <= reply.retry_after_s <= 10 for reply in refused)
    assert pi.ask(Query("probe", None, None, None)).problem is Problem.NOT_READY

    busy.set()

    pi.wait(lambda: pi.replies if len(pi.replies) == QUEUE + 4 else [])
    answered = [reply for reply in pi.replies if reply.problem is None]
    assert {reply.id for reply in answered} == {str(i) for i in range(QUEUE)}


def test_a_query_that_comes_twice_is_computed_once_and_answered_again(
    pi: Device, backend: Backend, exported: Exported, busy: threading.Event
) -> None:
    query = pack_query(exported.query(0, exported.x[:1], id=new_id(), deadline_ms=60_000.0))
    seen, answered = len(backend.seen), backend.inference.senders.totals().answered
    pi.send(query)
    pi.send(query)  # while the first is under way
    wait_until(lambda: len(backend.seen) - seen == 2, "the queries did not arrive")
    assert pi.replies == []
    busy.set()
    pi.wait(lambda: pi.replies)
    pi.send(query)  # its reply was lost, say
    pi.wait(lambda: pi.replies if len(pi.replies) == 2 else [])
    first, second = pi.replies
    assert first.id == second.id
    np.testing.assert_array_equal(first.tensors["logits"], second.tensors["logits"])
    assert backend.inference.senders.totals().answered == answered + 1


def test_a_query_that_comes_again_as_its_reply_arrives_is_answered_again(
    pi: Device, backend: Backend, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    recent = backend.worker.recent
    keep = recent.replied

    def keep_late(served: Served, reply: bytes) -> None:
        time.sleep(0.3)  # as on a busy machine
        keep(served, reply)

    monkeypatch.setattr(recent, "replied", keep_late)
    query = exported.query(0, exported.x[:1], id=new_id())
    assert pi.ask(query).problem is None
    pi.send(pack_query(query))
    replies = pi.wait(lambda: pi.replies if len(pi.replies) == 2 else [])
    assert [reply.problem for reply in replies] == [None, None]


def test_a_second_message_above_the_limits_does_not_refuse_what_the_first_asked(
    embedded: BrokerAddress, models: ModelStore, device: Callable[..., Device], exported: Exported
) -> None:
    backend, stop = serve(embedded, models)
    try:
        pi = device(embedded, "pi-1", SECRET)
        query = exported.query(0, exported.x[:1], id=new_id())
        assert pi.ask(query).problem is None
        full = OverloadedError("full", retry_after_s=60.0)
        backend.inference.senders.settled("pi-1", full)
        pi.send(pack_query(query))
        replies = pi.wait(lambda: pi.replies if len(pi.replies) == 2 else [])
        assert [reply.problem for reply in replies] == [None, None]
        assert pi.ask(exported.query(0, exported.x[:1], id="other")).problem is Problem.OVERLOADED
    finally:
        stop()


def test_a_reply_has_the_quality_of_service_of_its_query(pi: Device, exported: Exported) -> None:
    queries = [
        Query("probe", None, None, None),
        exported.query(0, exported.x[:1], id="sound"),
        exported.query(0, exported.x[:1], id="unknown", model="none"),
    ]
    for qos in (0, 1):
        before = len(pi.qualities)
        for query in queries:
            pi.link.publish(pi.topic(Kind.QUERY), pack_query(query), qos=qos)
        pi.wait(lambda n=before + 3: pi.replies if len(pi.qualities) == n else [])  # type: ignore[misc]  # mypy has no type for a lambda's default
        assert pi.qualities[before:] == [qos] * 3


@pytest.mark.deadline
def test_what_came_too_late_is_not_answered(
    pi: Device, backend: Backend, exported: Exported, busy: threading.Event
) -> None:
    load = backend.inference.batcher.load
    before = load.expired + load.refused
    seen = len(backend.seen)
    # first, since a sender that the queue refused is refused by the header for a short time
    pi.send(pack_query(exported.query(0, exported.x[:1], id="good", deadline_ms=60_000.0)))
    for i in range(3):
        query = exported.query(0, exported.x[:1], id=f"late-{i}", deadline_ms=1.0)
        pi.send(pack_query(query))
    wait_until(lambda: len(backend.seen) - seen == 4, "the queries did not arrive")
    time.sleep(0.01)  # the deadlines of 1 ms pass
    busy.set()
    pi.wait(lambda: [reply for reply in pi.replies if reply.id == "good"])
    assert [reply.id for reply in pi.replies if reply.problem is None] == ["good"]
    # refused at once where the queue alone would have taken as long
    assert load.expired + load.refused > before


def test_a_device_above_its_limit_is_told_when_to_come_back_and_others_are_served(
    mosquitto: BrokerAddress, models: ModelStore, device: Callable[..., Device], exported: Exported
) -> None:
    """FAULTS row 22: its own queries are refused, with the word for an overload."""
    backend, stop = serve(mosquitto, models, SenderLimits(requests=5))
    flood, small = device(mosquitto, "pi-1"), device(mosquitto, "pi-2")
    for i in range(40):
        flood.send(pack_query(exported.query(0, exported.x[:1], id=str(i))))
    flood.wait(lambda: flood.replies if len(flood.replies) == 40 else [])
    refused = [reply for reply in flood.replies if reply.problem is not None]
    assert len(refused) >= 40 - QUEUE - 5
    assert {reply.problem for reply in refused} == {Problem.OVERLOADED}
    assert all(0 < reply.retry_after_s <= 10 and reply.id for reply in refused)
    assert small.ask(exported.query(0, exported.x[:1], id="small")).problem is None
    counts = backend.inference.senders.counts()
    assert (counts["pi-1"].requests, counts["pi-2"].answered) == (40, 1)
    assert counts["pi-1"].limited + counts["pi-1"].answered + counts["pi-1"].refused == 40
    stop()


def test_a_reply_goes_to_the_device_that_asked_only(
    mosquitto: BrokerAddress, models: ModelStore, device: Callable[..., Device], exported: Exported
) -> None:
    _, stop = serve(mosquitto, models)
    one, two = device(mosquitto, "pi-1"), device(mosquitto, "pi-2")
    one.ask(exported.query(0, exported.x[:1], id="one"))
    two.ask(exported.query(0, exported.x[:1], id="two"))
    assert ([r.id for r in one.replies], [r.id for r in two.replies]) == (["one"], ["two"])
    stop()


@pytest.mark.deadline
def test_a_query_that_a_broker_kept_is_not_answered(
    mosquitto: BrokerAddress, models: ModelStore, device: Callable[..., Device], exported: Exported
) -> None:
    """A retained query would be answered at each reconnect, for days."""
    pi = device(mosquitto, "pi-1")
    kept = pack_query(exported.query(0, exported.x[:1], id="kept"))
    assert pi.link.publish(pi.topic(Kind.QUERY), kept, retain=True)
    there = threading.Event()
    watcher = MqttLink(mosquitto, client_id="watcher")
    watcher.subscribe(pi.topic(Kind.QUERY), lambda _: there.set())
    watcher.start()
    assert there.wait(20)  # a publish is only queued until then
    watcher.stop()
    backend, stop = serve(mosquitto, models)
    pi.ask(exported.query(0, exported.x[:1], id="new"))
    assert pi.link.publish(pi.topic(Kind.QUERY), b"", retain=True)  # forget it
    assert [reply.id for reply in pi.replies] == ["new"]
    assert "pi-1" in backend.seen
    stop()


def test_devices_are_noted_when_they_are_heard(
    pi: Device, backend: Backend, exported: Exported
) -> None:
    backend.seen.clear()
    backend.heard.clear()
    assert pi.link.publish(pi.topic(Kind.TELEMETRY), b"{}", qos=0)
    assert pi.link.publish(pi.topic(Kind.STATUS), b'{"status": "online"}')
    pi.ask(exported.query(0, exported.x[:1]))
    assert backend.seen == ["pi-1"]
    assert sorted(backend.heard) == [
        (Kind.STATUS, "pi-1", b'{"status": "online"}'),
        (Kind.TELEMETRY, "pi-1", b"{}"),
    ]


# hostile frames


def framed(header: object, raw: bytes = b"") -> bytes:
    text = orjson.dumps(header)
    return struct.pack(">I", len(text)) + text + raw


X64 = {"name": "x", "shape": [1, 1, 8, 8], "datatype": "UINT8"}
HOSTILE = {
    "nothing": b"",
    "two bytes": b"\0\0",
    "no header": b"\0\0\0\0",
    "header of 4 GB": b"\xff\xff\xff\xff{}",
    "header longer than allowed": struct.pack(">I", 70_000) + b" " * 70_000,
    "header cut off": framed({"inputs": []})[:-3],
    "not JSON": b"\0\0\0\x04nope",
    "no object": framed([]),
    "deep": struct.pack(">I", 40_000) + b"[" * 40_000,
    "bytes left over": framed({"inputs": []}, b"more"),
    "bytes missing": framed(
        {"inputs": [{**X64, "parameters": {"binary_data_size": 64}}]}, bytes(63)
    ),
    "another size": framed(
        {"inputs": [{**X64, "parameters": {"binary_data_size": 32}}]}, bytes(32)
    ),
    "a terabyte": framed({"inputs": [{**X64, "shape": [2**40], "data": []}]}),
    "sizes below 0": framed({"inputs": [{**X64, "shape": [-1, -64], "data": [0] * 64}]}),
    "unknown dtype": framed({"inputs": [{**X64, "datatype": "BYTES", "data": ["a"]}]}),
    "a pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "17 tensors": framed({"inputs": [{**X64, "data": [0] * 64}] * 17}),
    "NaN": framed(
        {
            "inputs": [
                {**X64, "shape": [1], "datatype": "FP32", "parameters": {"binary_data_size": 4}}
            ]
        },
        struct.pack("<f", float("nan")),
    ),
    "an id as long as a book": framed({"id": "i" * 60_000, "inputs": []}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_frame_is_refused_and_the_next_query_answered(
    pi: Device, exported: Exported, name: str
) -> None:
    """FAULTS row 26."""
    pi.send(HOSTILE[name])
    good = pi.ask(exported.query(0, exported.x[:1], id="good"))
    assert good.problem is None
    assert [reply.problem for reply in pi.replies[:-1]] == [Problem.MALFORMED]
    assert 0 < len(pi.replies[0].detail) < 500


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)
TENSOR = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["x", "z2", "z3"]) | JSON,
        "shape": st.just([1, 1, 8, 8]) | st.lists(st.integers(-1, 70), max_size=5) | JSON,
        "datatype": st.sampled_from(["FP32", "UINT8", "FP16"]) | JSON,
        "data": st.just([7] * 64) | JSON,
        "parameters": st.dictionaries(st.sampled_from(["binary_data_size", "scale"]), JSON) | JSON,
    },
)
HEADER = st.fixed_dictionaries(
    {},
    optional={
        "id": JSON,
        "inputs": st.lists(TENSOR, max_size=3) | JSON,
        "parameters": st.dictionaries(st.sampled_from(["model_name", "model_version"]), JSON)
        | JSON,
    },
)
FRAMES = st.binary(max_size=200) | st.builds(framed, HEADER, st.binary(max_size=70))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(payloads=st.lists(FRAMES, min_size=3, max_size=6))
def test_after_any_bytes_the_next_good_query_is_answered(
    pi: Device, exported: Exported, payloads: list[bytes]
) -> None:
    """FAULTS row 26: each frame gets one reply; hundreds of them leave nothing behind."""
    pi.replies.clear()
    for payload in payloads:
        pi.send(payload)
    pi.send(pack_query(exported.query(0, exported.x[:1], id="the good one")))
    replies = pi.wait(lambda: pi.replies if len(pi.replies) == len(payloads) + 1 else [])
    allowed = {None, Problem.MALFORMED, Problem.BAD_REQUEST, Problem.UNKNOWN_MODEL}
    assert {reply.problem for reply in replies} <= allowed
    (good,) = [reply for reply in replies if reply.id == "the good one"]
    assert good.problem is None


def test_memory_stays_flat_under_frames_that_promise_much(pi: Device, exported: Exported) -> None:
    """2 MB each, refused: 100 MB went through a process that may keep none of it."""
    big = struct.pack(">I", 1_900_000) + b"[" * 1_900_000
    shaped = framed({"inputs": [{**X64, "shape": [4_000_000], "data": []}]})
    process = psutil.Process(os.getpid())

    def send(count: int) -> None:
        for i in range(count):
            pi.send(big)
            pi.send(shaped)
            pi.ask(exported.query(0, exported.x[:1], id=f"{count}-{i}"))

    send(10)
    before = process.memory_info().rss
    send(50)
    assert process.memory_info().rss - before < 30e6
    assert pi.ask(exported.query(0, exported.x[:1], id="after")).problem is None
