"""Queries answered from their connection, beside the application's way: the same answers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pytest
from numpy.typing import NDArray

import server.backend.batcher
from server.backend.jobs import Job
from server.backend.ladder import Entry
from server.backend.senders import SenderLimits
from server.routes.v2.direct import DirectQueries
from tests.exposition import families_of, value_of
from tests.serving.held_engine import HeldEngine, kept_busy
from tests.serving.routes.v2.direct_site import (
    INFER,
    LENGTH,
    DirectSite,
    ask,
    binary_of,
    body_of,
    connect,
    outputs_of,
    read_answer,
    request_of,
    undated,
)
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Exported

pytestmark = pytest.mark.broker  # the services start the embedded broker

Array = NDArray[Any]


@pytest.fixture(scope="module")
def site(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DirectSite]:
    state = tmp_path_factory.mktemp("site")
    exported.install(state / "models")
    site = DirectSite(state)
    with site.stack:
        yield site


@pytest.fixture
def busy(site: DirectSite, exported: Exported) -> Iterator[threading.Event]:
    """The engine's thread is busy until the event is set."""
    with kept_busy(site.services.batcher, exported) as gate:
        yield gate


def requests(x: Array) -> dict[str, bytes]:
    """Requests that go from their connection, by what is particular about them."""
    one, raw = body_of(x[:1]), binary_of(x[:1])
    binary = {"parameters": {"binary_data_output": True}}
    many = body_of(x[:32])
    long = {"outputs": [{"name": "logits"}, {"name": "label", "parameters": {"binary_data": True}}]}
    return {
        "JSON": request_of(one),
        "an id": request_of(body_of(x[:1], id="abc")),
        "a version": request_of(one, path="/v2/models/digits/versions/1/infer"),
        "binary in": request_of(*raw),
        "binary out": request_of(body_of(x[:2], **binary)),
        "both binary": request_of(*binary_of(x[:2], **binary)),
        "chosen outputs": request_of(body_of(x[:1], **long)),
        "a long answer": request_of(many),
        "a long answer, gzip": request_of(many, {"Accept-Encoding": "gzip"}),
        "a short answer, gzip": request_of(one, {"Accept-Encoding": "gzip"}),
        "the last of a connection": request_of(one, {"Connection": "close"}),
        "HTTP/1.0": request_of(one, version="1.0"),
        # and what fails behind the checks of its head
        "an unknown model": request_of(one, path="/v2/models/unknown/infer"),
        "an unknown version": request_of(one, path="/v2/models/digits/versions/9/infer"),
        "no JSON": request_of(b"{"),
        "no input": request_of(b"{}"),
        "another shape": request_of(body_of(x[:1].reshape(1, 64))),
        "too many rows": request_of(body_of(np.repeat(x[:1], 33, axis=0))),
        "an unknown output": request_of(body_of(x[:1], outputs=[{"name": "unknown"}])),
        "a wrong length of its JSON": request_of(one, {LENGTH: "x"}),
        "a wrong deadline": request_of(body_of(x[:1], parameters={"deadline_ms": -1})),
    }


def for_the_application(x: Array) -> dict[str, bytes]:
    """Requests that go to the application, which answers or refuses them."""
    one = body_of(x[:1])
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(one), one)
    chunked = request_of(b"", {"Transfer-Encoding": "chunked"})
    return {
        "another host": request_of(one, host="attacker.example"),
        "brought by a proxy": request_of(one, {"X-Forwarded-For": "10.0.0.1"}),
        "a wrong login": request_of(one, {"Authorization": "Bearer pi-1:wrong"}),
        "no route": request_of(one, path="/v2/models/a/b/infer"),
        "a query string": request_of(one, path=f"{INFER}?x=1"),
        "an encoded path": request_of(one, path="/v2/models/%64igits/infer"),
        "no body": request_of(b""),
        "chunks": chunked.replace(b"Content-Length: 0\r\n", b"") + chunk,
        "a long body": request_of(body_of(np.repeat(x[:1], 300, axis=0)) + 40_000 * b" "),
        "an encoding": request_of(one, {"Content-Encoding": "br"}),
        "a field twice": request_of(one, {"X-One": "1", "x-one": "2"}),
    }


def test_answers_are_those_of_the_application_byte_for_byte(
    site: DirectSite, exported: Exported
) -> None:
    for what, raw in requests(exported.x).items():
        expected = ask(site.other, raw)
        answer, direct = site.went_direct(raw)
        assert direct, f"{what}: went to the application"
        assert undated(answer) == undated(expected), what
        assert b"\r\ndate: " in answer


def test_what_is_unusual_goes_to_the_application(site: DirectSite, exported: Exported) -> None:
    for what, raw in for_the_application(exported.x).items():
        expected = ask(site.other, raw)
        answer, direct = site.went_direct(raw)
        assert not direct, f"{what}: did not go to the application"
        assert undated(answer) == undated(expected), what
    refused = ask(site.direct, for_the_application(exported.x)["another host"])
    assert refused.startswith(b"HTTP/1.1 421 ")


def test_where_a_login_is_asked_for_the_application_answers(
    site: DirectSite, exported: Exported
) -> None:
    body = body_of(exported.x[:1])
    fields = [(b"host", b"127.0.0.1"), (b"content-length", b"%d" % len(body))]
    given = b"POST", INFER.encode(), fields, ("127.0.0.1", 9)
    inference = site.services.inference
    logins = site.services.recent_logins
    assert DirectQueries(inference, None, loopback=True, logins=logins).admit(*given) is not None
    assert DirectQueries(inference, None, loopback=False, logins=logins).admit(*given) is None


def test_both_ways_count_the_same(site: DirectSite, exported: Exported) -> None:
    def counts() -> dict[str, float]:
        """All that is counted and is no time."""
        engine = site.services.models.served("digits", None).engine
        of_model = site.services.inference.statistics.of(engine)
        of_sender = site.services.inference.senders.counts()["127.0.0.1"]
        families = families_of(site.services.metrics.text()[0].decode())
        answered = {"model": "digits", "version": "1", "outcome": "answered"}
        names = "query_duration_seconds", "queue_wait_seconds", "batch_samples"
        found = {
            f"splitedge_{name}_count": value_of(families, f"splitedge_{name}_count", model="digits")
            for name in names
        }
        return {
            **asdict(of_sender),
            **found,
            "answered by the model": value_of(families, "splitedge_queries_total", **answered),
            "successes": of_model.success.count,
            "samples": of_model.samples,
            "batches": of_model.batches,
            "queries of batches": of_model.queue.count,
            "load": site.services.batcher.load.queries,
        }

    def added(address: str) -> dict[str, float]:
        before = counts()
        assert outputs_of(ask(address, request_of(body_of(exported.x[:2]))))
        wait_until(lambda: site.services.batcher.idle, "the engine stays busy")
        wait_until(lambda: counts()["batches"] > before["batches"], "the batch is not counted")
        return {name: value - before[name] for name, value in counts().items()}

    added(site.other)  # a first answer makes the entries of its model
    direct = added(site.direct)
    assert direct == added(site.other)
    assert (direct["requests"], direct["rows"], direct["answered"]) == (1, 2, 1)
    assert (direct["answered by the model"], direct["samples"], direct["load"]) == (1, 2, 1)


# connections


def test_a_connection_is_used_again_and_answers_keep_their_order(
    site: DirectSite, exported: Exported
) -> None:
    asked = [body_of(exported.x[:1], id=f"q{number}") for number in range(6)]
    with connect(site.direct) as peer:
        peer.sendall(b"".join(map(request_of, asked)))  # ahead of the answers
        rest, found = b"", []
        for _ in asked:
            answer, rest = read_answer(peer, rest)
            found.append(orjson.loads(answer.partition(b"\r\n\r\n")[2])["id"])
        assert found == [f"q{number}" for number in range(6)]
        for number in range(3):  # and one after the other
            peer.sendall(request_of(body_of(exported.x[:1], id=f"again{number}")))
            answer, rest = read_answer(peer)
            assert b"again%d" % number in answer
            assert b"connection:" not in answer


def test_more_queries_ahead_than_may_wait_end_the_connection(
    site: DirectSite, exported: Exported
) -> None:
    """One read holds hundreds, and each would hold up all other connections."""
    raw = b""
    with connect(site.direct) as peer, contextlib.suppress(ConnectionError):
        peer.sendall(400 * request_of(body_of(exported.x[:1])))
        while part := peer.recv(65_536):
            raw += part
    assert raw.count(b"HTTP/1.1 200 OK") < 400


def test_nothing_is_answered_behind_the_last_request(site: DirectSite, exported: Exported) -> None:
    last = request_of(body_of(exported.x[:1]), {"Connection": "close"})
    with connect(site.direct) as peer:
        peer.sendall(last + request_of(body_of(exported.x[:1])))
        answer, rest = read_answer(peer)
        assert b"connection: close" in answer
        assert rest + peer.recv(1) == b""


def test_a_client_that_leaves_while_its_query_waits_harms_no_other(
    site: DirectSite, exported: Exported, busy: threading.Event
) -> None:
    with connect(site.direct) as peer:
        peer.sendall(request_of(body_of(exported.x[:1])))
        wait_until(lambda: site.services.batcher.waiting == 1, "the query does not wait")
    with connect(site.direct) as peer:
        peer.sendall(request_of(body_of(exported.x[:1], id="other")))
        wait_until(lambda: site.services.batcher.waiting == 2, "the query does not wait")
        busy.set()
        assert b"other" in read_answer(peer)[0]


def test_a_body_that_never_comes_is_waited_for_as_in_the_application(site: DirectSite) -> None:
    head = f"POST {INFER} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{{"
    with connect(site.direct) as peer:
        peer.sendall(head.encode())
        assert peer.recv(1) == b""  # within ten of the ticks, which are short here


def test_an_orderly_end_lets_a_query_that_waits_have_its_answer(
    exported: Exported, tmp_path: Path
) -> None:
    exported.install(tmp_path / "models")
    site = DirectSite(tmp_path)
    engine = HeldEngine(exported)
    with site.stack:
        site.services.batcher.submit(Job(engine, Entry(0, exported.x[:1]), None, lambda _: None))
        assert engine.entered.wait(10)
        with connect(site.direct) as peer:
            peer.sendall(request_of(body_of(exported.x[:1])))
            wait_until(lambda: site.services.batcher.waiting == 1, "the query does not wait")
            site.server.stop()
            threading.Timer(0.5, engine.gate.set).start()
            answer, rest = read_answer(peer)
            assert outputs_of(answer)
            assert b"connection: close" in answer
            assert rest + peer.recv(1) == b""


# limits and turns


def test_the_limits_of_a_sender_hold(exported: Exported, tmp_path: Path) -> None:
    exported.install(tmp_path / "models")
    site = DirectSite(tmp_path, limits=SenderLimits(rows=4))
    with site.stack:
        raw = request_of(body_of(exported.x[:4]))
        assert outputs_of(ask(site.direct, raw))
        refused, direct = site.went_direct(raw)
        assert direct
        assert refused.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
        assert b"retry-after: 1\r\n" in refused
        assert b"at most 4 rows a second" in refused
        counts = site.services.inference.senders.counts()["127.0.0.1"]
        assert (counts.requests, counts.rows, counts.answered, counts.limited) == (2, 8, 1, 1)


def test_queries_of_one_turn_are_one_batch_and_each_gets_its_own_answer(
    site: DirectSite, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    # quick on any machine: on a busy one, eight rows may seem too long for clients that share
    for limit in ("HANDOVER_S", "SHARED_BATCH_S"):
        monkeypatch.setattr(server.backend.batcher, limit, 10.0)
    engine = site.services.models.served("digits", None).engine
    ask(site.direct, request_of(body_of(exported.x[:1])))  # from now on its speed is known
    wait_until(lambda: site.services.batcher.idle, "the engine stays busy")
    sizes = site.services.inference.statistics.of(engine).by_size.get(8)
    before = 0 if sizes is None else sizes.count
    loop = site.server._server.loop
    assert loop is not None
    with ExitStack() as stack:
        peers = [stack.enter_context(connect(site.direct)) for _ in range(8)]
        for number, peer in enumerate(peers):  # each has its place, and is read from
            peer.sendall(request_of(body_of(exported.x[number : number + 1])))
            read_answer(peer)
        held, sent = threading.Event(), threading.Event()
        loop.call_soon_threadsafe(held.set)
        loop.call_soon_threadsafe(sent.wait, 20)
        assert held.wait(20)
        for number, peer in enumerate(peers):
            peer.sendall(request_of(body_of(exported.x[number : number + 1])))
        sent.set()
        logits = [outputs_of(read_answer(peer)[0])["logits"] for peer in peers]
    np.testing.assert_allclose(logits, exported.logits(exported.x[:8]), atol=1e-4, rtol=0)
    assert site.services.inference.statistics.of(engine).by_size[8].count == before + 1
