"""Many clients, long bodies and a busy engine: who is served, and what the others are told."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import orjson
import pytest
import urllib3

from server.backend.senders import SenderLimits
from server.errors import OverloadedError
from server.routes.bodies import BodyBudget
from tests.serving.held_engine import kept_busy
from tests.serving.routes.v2.inference_site import (
    INFER,
    LENGTH,
    QUEUE,
    TOLERANCE,
    Inference,
    Site,
    as_json,
    binary,
)
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Exported


pytestmark = pytest.mark.broker  # the services start the embedded broker


@pytest.fixture
def busy(site: Site, exported: Exported) -> Iterator[threading.Event]:
    """The engine thread is busy until the event is set."""
    with kept_busy(site.services.batcher, exported) as gate:
        yield gate


def test_batches_from_many_clients_do_not_mix(site: Site, exported: Exported) -> None:
    expected = exported.logits(exported.x[:64])
    failures: list[str] = []

    def ask(offset: int) -> None:
        for i in range(offset, 64, 4):
            answer = site.infer({"inputs": [as_json("x", exported.x[i : i + 1])]})
            if abs(answer.outputs["logits"][0] - expected[i]).max() > TOLERANCE:
                failures.append(f"sample {i}")

    threads = [threading.Thread(target=ask, args=(offset,), daemon=True) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures


@pytest.mark.deadline
def test_long_bodies_do_not_keep_the_others_waiting(site: Site, exported: Exported) -> None:
    """Read on the event loop they stop it: 0.14 s for each MB of JSON."""
    values = np.full((1, 199_900), 3.25, np.float32)  # as text 5 bytes each
    body = orjson.dumps({"inputs": [as_json("x", values)]})
    assert 999_000 < len(body) <= 1_000_000
    statuses: list[int] = []
    slowest = 0.0

    def flood() -> None:
        statuses.extend(site.call("POST", INFER, body).status for _ in range(3))

    threads = [threading.Thread(target=flood, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        began = time.perf_counter()
        assert site.call("GET", "/v2/health/live").status == 200
        slowest = max(slowest, time.perf_counter() - began)
    assert statuses == [400] * 12  # an input of another shape
    assert slowest < 1.0


@pytest.mark.deadline
def test_long_bodies_at_once_are_bounded_and_short_ones_pass(
    site: Site, exported: Exported
) -> None:
    """64 MB of them: four of 16 MB that are still being sent, and no fifth."""
    head = f"POST {INFER} HTTP/1.1\r\nHost: h\r\n{LENGTH}: 99\r\n"
    head += "Content-Length: 16000000\r\n\r\n"
    with contextlib.ExitStack() as stack:
        peers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", site.port), 10))
            for _ in range(4)
        ]
        for peer in peers:
            peer.sendall(head.encode() + bytes(15_990_000))
        before = site.services.inference.senders.counts()["127.0.0.1"].refused
        refused = wait_refused(site)
        assert site.services.inference.senders.counts()["127.0.0.1"].refused > before
        assert (refused.status, list(refused.json)) == (429, ["error"])
        assert "long bodies" in refused.json["error"]
        assert int(refused.headers["Retry-After"]) >= 1
        x = exported.x[:2]
        assert len(site.infer_binary("x", x).outputs["label"]) == 2
    wait_until(
        lambda: site.call("POST", INFER, bytes(200_000), {LENGTH: "99"}).status != 429,
        "memory for the bodies of clients that left is still held",
    )


def wait_refused(site: Site) -> Inference:
    """The answer to a long body once the server has read what others sent before."""

    def refused() -> Inference | None:
        answer = site.call("POST", INFER, bytes(200_000), {LENGTH: "99"})
        return None if answer.status == 400 else answer

    found = wait_until(refused, "a long body is still taken", 20)
    assert found is not None
    return found


def test_a_sender_above_its_limit_is_429_and_others_are_served(
    exported: Exported, tmp_path: Path
) -> None:
    """FAULTS row 22: anonymous clients of one address are one sender; a device is its own."""
    exported.install(tmp_path / "models")
    site = Site(tmp_path, limits=SenderLimits(rows=4))
    try:
        token = site.services.registry.create_token("default", 60.0, "")
        _, credential = site.services.registry.redeem_token(token, "pi-1", {})
        text, raw = binary("x", exported.x[:4])
        headers = {LENGTH: str(len(text))}
        device = {**headers, "Authorization": f"Bearer pi-1:{credential}"}
        wrong = {**headers, "Authorization": "Bearer pi-1:wrong"}  # so it is anonymous

        answers = [site.call("POST", INFER, text + raw, each) for each in (headers, wrong, device)]

        assert [answer.status for answer in answers] == [200, 429, 200]
        assert "at most 4 rows a second" in answers[1].json["error"]
        assert int(answers[1].headers["Retry-After"]) >= 1
        # in chunks, with no length before
        urllib3.request(
            "POST", f"http://127.0.0.1:{site.port}{INFER}", body=iter([text, raw]), headers=device
        )
        secret = (tmp_path / "keys" / "operator.key").read_text().strip()
        operator = {"Authorization": f"Bearer operator:{secret}"}
        load = site.call("GET", "/api/v1/load", headers=operator).json
        assert load["engine"]["queries"] == 2
        assert load["senders"]["pi-1"]["bytes"] == 2 * len(text + raw)
        assert load["senders"].keys() == {"127.0.0.1", "pi-1"}
        assert load["senders"]["127.0.0.1"] == {
            "requests": 2,
            "rows": 8,
            "bytes": 2 * len(text + raw),
            "answered": 1,
            "limited": 1,
            "refused": 0,
            "expired": 0,
            "failed": 0,
        }
        assert site.call("GET", "/api/v1/load", headers=device).status == 403
        assert site.call("GET", "/api/v1/load").status == 401
    finally:
        site.close()


def test_long_bodies_of_one_sender_leave_memory_for_others() -> None:
    """A sender may hold as much as it leaves free: half of all."""
    budget = BodyBudget(limit_bytes=100, short_bytes=10)
    with contextlib.ExitStack() as stack:
        flood = [stack.enter_context(budget.body("flood")) for _ in range(3)]
        flood[0](30)
        flood[1](20)
        with pytest.raises(OverloadedError):
            flood[2](11)
        flood[2](10)  # short
        stack.enter_context(budget.body("pi"))(25)
    with budget.body("flood") as grown:
        grown(50)


@pytest.mark.deadline
def test_a_full_queue_is_429_while_probes_are_answered(
    site: Site, exported: Exported, busy: threading.Event
) -> None:
    """FAULTS row 8."""
    request = {"inputs": [as_json("x", exported.x[:1])]}
    answers: list[Inference] = []
    threads = [
        threading.Thread(target=lambda: answers.append(site.infer(request)), daemon=True)
        for _ in range(QUEUE)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: site.services.batcher.full, "the queue does not fill")

    began = time.monotonic()
    refused = site.infer(request)
    live, ready = site.call("GET", "/v2/health/live"), site.call("GET", "/v2/health/ready")
    assert time.monotonic() - began < 2

    assert refused.status == 429
    assert int(refused.headers["Retry-After"]) >= 1
    assert "waiting" in refused.json["error"]
    assert (live.status, ready.status) == (200, 503)
    busy.set()
    for thread in threads:
        thread.join(10)
    assert [answer.status for answer in answers] == [200] * QUEUE
    assert site.call("GET", "/v2/health/ready").status == 200


def test_a_deadline_that_passed_is_504(
    site: Site, exported: Exported, busy: threading.Event
) -> None:
    request = {"inputs": [as_json("x", exported.x[:1])], "parameters": {"deadline_ms": 50}}
    threading.Timer(0.3, busy.set).start()
    answer = site.infer(request)
    assert answer.status == 504
    assert "deadline" in answer.json["error"]
    assert site.infer(request | {"parameters": {"deadline_ms": 60_000}}).status == 200


def test_a_client_that_leaves_harms_no_other(
    site: Site, exported: Exported, busy: threading.Event
) -> None:
    text, raw = binary("x", exported.x[:1])
    for whole in (text + raw, text):
        with socket.create_connection(("127.0.0.1", site.port), 10) as peer:
            size = len(text + raw)
            head = f"POST {INFER} HTTP/1.1\r\nHost: h\r\nContent-Length: {size}\r\n"
            peer.sendall(f"{head}{LENGTH}: {len(text)}\r\n\r\n".encode() + whole)
            time.sleep(0.05)  # some of it is read before the client leaves
    busy.set()
    assert site.infer_binary("x", exported.x[:1]).status == 200
