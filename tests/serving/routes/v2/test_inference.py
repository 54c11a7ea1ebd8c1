"""The Open Inference Protocol v2 over a real server: ours by hand, and NVIDIA's client."""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pytest
import tritonclient.http as triton
import urllib3
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_sdk.wire.address import Address
from server.app import create_app
from server.backend.jobs import Job
from server.backend.ladder import Entry, LadderEngine
from server.backend.senders import SenderLimits
from server.errors import OverloadedError
from server.routes.bodies import BodyBudget
from server.services import Services
from server.settings import ServerSettings
from tests.answer import Answer
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Exported

pytestmark = pytest.mark.broker  # the services start the embedded broker

Array = NDArray[Any]
LENGTH = "Inference-Header-Content-Length"
INFER = "/v2/models/digits/infer"
QUEUE = 4
TOLERANCE = 1e-4  # float32 sums in another order, see test_ladder
NUMPY_OF = {"FP32": "<f4", "INT64": "<i8"}
DATATYPE_OF = {"float32": "FP32", "float16": "FP16", "uint8": "UINT8"}


class Inference(Answer):
    """The response of the v2 protocol to an inference request."""

    @property
    def outputs(self) -> dict[str, Array]:
        """By name, JSON and binary alike."""
        assert self.status == 200, self.body
        size = int(self.headers.get(LENGTH, len(self.body)))
        header, at = orjson.loads(self.body[:size]), size
        found = {}
        for output in header["outputs"]:
            dtype = np.dtype(NUMPY_OF[output["datatype"]])
            if "data" in output:
                array = np.array(output["data"], dtype)
            else:
                end = at + output["parameters"]["binary_data_size"]
                array = np.frombuffer(self.body[at:end], dtype)
                at = end
            found[output["name"]] = array.reshape(output["shape"])
        assert at == len(self.body)
        return found


class Site:
    """Services and their HTTP server in a thread of this process."""

    def __init__(self, state: Path, *, http: Address | None = None, **more: Any) -> None:
        free = Address("127.0.0.1", 0)
        settings = ServerSettings(state, http or free, free, queue_max=QUEUE, threads=1, **more)
        self.services = Services(settings)
        self.services.start()
        listener = socket.create_server(("127.0.0.1", 0))
        # asyncio sets it only on sockets made for TCP by number; 40 ms a request without
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port: int = listener.getsockname()[1]
        config = uvicorn.Config(create_app(self.services), log_config=None)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True)
        self._thread.start()
        self._pool = urllib3.HTTPConnectionPool("127.0.0.1", self.port, maxsize=8, timeout=20)

    def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Inference:
        response = self._pool.request(method, path, body=body, headers=headers, retries=1)
        return Inference(response.status, response.headers, response.data)

    def infer(self, request: Mapping[str, Any], path: str = INFER) -> Inference:
        """All in JSON."""
        return self.call("POST", path, orjson.dumps(request))

    def infer_binary(
        self, name: str, array: Array, parameters: Mapping[str, Any] | None = None, **more: Any
    ) -> Inference:
        """One binary input; `more` is added to its JSON."""
        text, raw = binary(name, array, parameters, **more)
        return self.call("POST", INFER, text + raw, {LENGTH: str(len(text))})

    def close(self) -> None:
        self._pool.close()
        self._server.should_exit = True
        self._thread.join(10)
        self.services.stop()


def binary(
    name: str, array: Array, parameters: Mapping[str, Any] | None = None, **more: Any
) -> tuple[bytes, bytes]:
    """The JSON and the bytes of a request with one tensor, written out by the protocol's text."""
    described = {
        "name": name,
        "shape": array.shape,
        "datatype": DATATYPE_OF[str(array.dtype)],
        "parameters": {**(parameters or {}), "binary_data_size": array.nbytes},
    }
    return orjson.dumps({"inputs": [described], **more}), array.tobytes()


def as_json(name: str, array: Array) -> dict[str, Any]:
    return {
        "name": name,
        "shape": array.shape,
        "datatype": DATATYPE_OF[str(array.dtype)],
        "data": array.ravel().tolist(),
    }


@pytest.fixture(scope="module")
def site(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    state = tmp_path_factory.mktemp("site")
    exported.install(state / "models")
    site = Site(state)
    yield site
    site.close()


class HeldEngine(LadderEngine):
    """The real engine behind a gate."""

    def __init__(self, exported: Exported) -> None:
        super().__init__(exported.folder, exported.manifest)
        self.gate, self.entered = threading.Event(), threading.Event()

    def run(self, entries: Sequence[Entry]) -> list[Array]:
        self.entered.set()
        assert self.gate.wait(20)
        return super().run(entries)


@pytest.fixture
def busy(site: Site, exported: Exported) -> Iterator[threading.Event]:
    """The engine thread is busy until the event is set."""
    engine = HeldEngine(exported)
    done = threading.Event()
    entry = Entry(0, exported.x[:1])
    site.services.batcher.submit(Job(engine, entry, None, lambda _: done.set()))
    assert engine.entered.wait(10)
    yield engine.gate
    engine.gate.set()
    assert done.wait(10)


# health and what there is


def test_health_and_server_metadata(site: Site) -> None:
    assert site.call("GET", "/v2/health/live").status == 200
    assert site.call("GET", "/v2/health/ready").json == {"ready": True}
    assert site.call("GET", "/v2").json["name"] == "splitedge"
    assert "binary_tensor_data" in site.call("GET", "/v2").json["extensions"]


def test_repository_index_and_model_metadata(site: Site) -> None:
    assert site.call("POST", "/v2/repository/index").json == [
        {"name": "digits", "version": "1", "state": "READY", "reason": ""}
    ]
    for path in ("/v2/models/digits", "/v2/models/digits/versions/1"):
        assert site.call("GET", f"{path}/ready").status == 200
        model = site.call("GET", path).json
        assert (model["name"], model["versions"]) == ("digits", ["1"])
        assert [(i["name"], i["datatype"], i["shape"]) for i in model["inputs"]] == [
            ("x", "UINT8", [-1, 1, 8, 8]),
            ("z1", "FP32", [-1, 8, 8, 8]),
            ("z2", "FP32", [-1, 16, 4, 4]),
            ("z4", "FP32", [-1, 32, 2, 2]),
        ]
        assert [(o["name"], o["datatype"], o["shape"]) for o in model["outputs"]] == [
            ("logits", "FP32", [-1, 10]),
            ("probabilities", "FP32", [-1, 10]),
            ("label", "INT64", [-1]),
        ]


def test_live_without_a_model_but_not_ready(tmp_path: Path) -> None:
    site = Site(tmp_path)
    try:
        assert site.call("GET", "/v2/health/live").status == 200
        ready = site.call("GET", "/v2/health/ready")
        assert (ready.status, ready.json) == (503, {"ready": False})
        answer = site.infer({"inputs": [as_json("x", np.zeros((1, 1, 8, 8), np.uint8))]})
        assert answer.status == 503
        assert "publish" in answer.json["error"]
        assert site.call("POST", "/v2/repository/index").json == []
    finally:
        site.close()


# inference


def test_json_in_and_out(site: Site, exported: Exported) -> None:
    x = exported.x[:3]
    nested = {**as_json("x", x), "data": x.tolist()}
    for described in (as_json("x", x), nested):
        answer = site.infer({"id": "abc", "inputs": [described]})
        assert answer.headers["content-type"] == "application/json"
        assert LENGTH not in answer.headers
        header = answer.json
        names = header["id"], header["model_name"], header["model_version"]
        assert names == ("abc", "digits", "1")
        expected = exported.logits(x).astype(np.float64)
        odds = np.exp(expected)
        outputs = answer.outputs
        np.testing.assert_allclose(outputs["logits"], expected, atol=TOLERANCE)
        probabilities = odds / odds.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(outputs["probabilities"], probabilities, atol=TOLERANCE)
        assert outputs["label"].tolist() == expected.argmax(axis=1).tolist()


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_binary_from_every_depth(site: Site, exported: Exported, depth: int) -> None:
    z = exported.smashed(depth, exported.x[5:9])
    outputs = [{"name": "logits", "parameters": {"binary_data": True}}]
    answer = site.infer_binary(f"z{depth}" if depth else "x", z, outputs=outputs)
    assert answer.headers["content-type"] == "application/octet-stream"
    assert list(answer.outputs) == ["logits"]
    expected = exported.suffix(depth, z)
    np.testing.assert_allclose(answer.outputs["logits"], expected, atol=TOLERANCE)


def test_half_precision_from_a_device(site: Site, exported: Exported) -> None:
    z = exported.smashed(2, exported.x[:2]).astype(np.float16)
    expected = exported.suffix(2, z.astype(np.float32))
    logits = site.infer_binary("z2", z).outputs["logits"]
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE)


def test_int8_from_a_device_is_read_by_its_scale_and_zero_point(
    site: Site, exported: Exported
) -> None:
    z = exported.smashed(4, exported.x[:2])
    scale = float(np.float32(z.max() / 200))
    steps = np.round(z / scale + 30).clip(0, 255).astype(np.uint8)
    expected = exported.suffix(4, (steps.astype(np.float32) - 30) * np.float32(scale))
    answer = site.infer_binary("z4", steps, {"scale": scale, "zero_point": 30})
    np.testing.assert_allclose(answer.outputs["logits"], expected, atol=TOLERANCE)
    # in JSON as well
    described = {**as_json("z4", steps), "parameters": {"scale": scale, "zero_point": 30}}
    logits = site.infer({"inputs": [described]}).outputs["logits"]
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    "kind", [None, "application/json", "application/octet-stream", "text/plain", "image/png"]
)
def test_the_content_type_does_not_matter(site: Site, exported: Exported, kind: str | None) -> None:
    x = exported.x[:1]
    headers = {} if kind is None else {"Content-Type": kind}
    text, raw = binary("x", x)
    answers = [
        site.call("POST", INFER, text + raw, {LENGTH: str(len(text)), **headers}),
        site.call("POST", INFER, orjson.dumps({"inputs": [as_json("x", x)]}), headers),
    ]
    for answer in answers:
        expected = exported.logits(x)
        np.testing.assert_allclose(answer.outputs["logits"], expected, atol=TOLERANCE)


def test_outputs_are_mixed_as_they_are_asked_for(site: Site, exported: Exported) -> None:
    x = exported.x[:2]
    outputs = [
        {"name": "label", "parameters": {"binary_data": False}},
        {"name": "logits", "parameters": {"binary_data": True}},
    ]
    answer = site.infer_binary("x", x, outputs=outputs)
    assert set(answer.outputs) == {"label", "logits"}
    np.testing.assert_allclose(answer.outputs["logits"], exported.logits(x), atol=TOLERANCE)
    everything = site.infer_binary("x", x, outputs=[])
    assert set(everything.outputs) == {"label", "logits", "probabilities"}
    text, raw = binary("x", x)
    whole = orjson.dumps({**orjson.loads(text), "parameters": {"binary_data_output": True}})
    answer = site.call("POST", INFER, whole + raw, {LENGTH: str(len(whole))})
    assert int(answer.headers[LENGTH]) < len(answer.body)
    assert set(answer.outputs) == {"label", "logits", "probabilities"}


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


# an independent client


@pytest.fixture
def client(site: Site) -> Iterator[triton.InferenceServerClient]:
    client = triton.InferenceServerClient(f"127.0.0.1:{site.port}")
    yield client
    client.close()


def test_triton_client_sees_the_server(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("digits")
    assert client.is_model_ready("digits", "1")
    assert not client.is_model_ready("digits", "2")
    assert client.get_server_metadata()["name"] == "splitedge"
    assert client.get_model_metadata("digits")["inputs"][0]["name"] == "x"
    assert client.get_model_repository_index()[0]["state"] == "READY"


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize(("depth", "datatype"), [(0, "UINT8"), (2, "FP32")])
def test_triton_client_gets_torchs_answers(
    client: triton.InferenceServerClient,
    exported: Exported,
    binary_in: bool,
    binary_out: bool,
    depth: int,
    datatype: str,
) -> None:
    z = exported.smashed(depth, exported.x[10:13])
    given = triton.InferInput(f"z{depth}" if depth else "x", list(z.shape), datatype)
    given.set_data_from_numpy(z, binary_data=binary_in)
    wanted = [
        triton.InferRequestedOutput(name, binary_data=binary_out) for name in ("logits", "label")
    ]
    result = client.infer("digits", [given], outputs=wanted, request_id="t1")
    expected = exported.suffix(depth, z)
    np.testing.assert_allclose(result.as_numpy("logits"), expected, atol=TOLERANCE)
    assert result.as_numpy("label").tolist() == expected.argmax(axis=1).tolist()
    assert result.get_response()["id"] == "t1"


def test_triton_client_without_outputs_gets_all(
    client: triton.InferenceServerClient, exported: Exported
) -> None:
    given = triton.InferInput("x", [1, 1, 8, 8], "UINT8")
    given.set_data_from_numpy(exported.x[:1])
    result = client.infer("digits", [given], model_version="1")
    expected = exported.logits(exported.x[:1])
    np.testing.assert_allclose(result.as_numpy("logits"), expected, atol=TOLERANCE)
    assert result.as_numpy("probabilities").shape == (1, 10)


def test_triton_client_reads_our_errors(
    client: triton.InferenceServerClient, exported: Exported
) -> None:
    given = triton.InferInput("x", [1, 1, 8, 8], "FP32")
    given.set_data_from_numpy(exported.x[:1].astype(np.float32))
    with pytest.raises(triton.InferenceServerException, match="expected uint8, got float32"):
        client.infer("digits", [given])


# refusals

X = np.zeros((1, 1, 8, 8), np.uint8)
Z = np.zeros((1, 16, 4, 4), np.float32)
REFUSED: list[tuple[int, str, dict[str, Any], str]] = [
    (404, "/v2/models/letters/infer", {"inputs": [as_json("x", X)]}, "letters.*digits version 1"),
    (
        404,
        "/v2/models/digits/versions/7/infer",
        {"inputs": [as_json("x", X)]},
        "digits version 7.*available: digits version 1",
    ),
    (400, INFER, {}, "one tensor, got 0"),
    (400, INFER, {"inputs": [as_json("x", X)] * 2}, "one tensor, got 2"),
    (400, INFER, {"inputs": [as_json("y", X)]}, "expected x, z1"),
    (400, INFER, {"inputs": [as_json("z3", Z)]}, "takes x, z1, z2, z4"),
    (400, INFER, {"inputs": [as_json("z4", Z)]}, r"\[n, 32, 2, 2\], got \[1, 16, 4, 4\]"),
    (400, INFER, {"inputs": [as_json("x", X.astype("f4"))]}, "expected uint8, got float32"),
    (400, INFER, {"inputs": [as_json("z2", Z.astype("u1"))]}, "scale"),
    (400, INFER, {"inputs": [as_json("x", X[:0])]}, "1 to 32 samples, got 0"),
    (400, INFER, {"inputs": [as_json("x", X.repeat(33, 0))]}, "1 to 32 samples, got 33"),
    (400, INFER, {"inputs": [{**as_json("x", X), "shape": [2, 1, 8, 8]}]}, "128 values"),
    (400, INFER, {"inputs": [{**as_json("x", X), "data": ["a"] * 64}]}, "expected numbers"),
    (400, INFER, {"inputs": [{**as_json("x", X), "datatype": "BYTES"}]}, "FP32.*BYTES"),
    (400, INFER, {"inputs": [as_json("z2", Z + np.float32(3e38))]}, "NaN or infinity"),
    (400, INFER, {"inputs": [as_json("x", X)], "outputs": [{"name": "p"}]}, "logits, prob"),
    (400, INFER, {"inputs": [as_json("x", X)], "parameters": {"deadline_ms": 0}}, "deadline_ms"),
    (400, INFER, {"inputs": [as_json("x", X)], "id": "i" * 65}, "64 characters"),
    (404, "/v2/nothing", {}, "Not Found"),
]


@pytest.mark.parametrize(("status", "path", "request_", "reason"), REFUSED)
def test_refusals_say_why(
    site: Site, status: int, path: str, request_: dict[str, Any], reason: str
) -> None:
    answer = site.infer(request_, path)
    assert answer.status == status, answer.body
    assert list(answer.json) == ["error"]
    assert re.search(reason, answer.json["error"]), answer.json["error"]


@pytest.mark.parametrize("length", ["-1", "1e3", "x", "99999999999999", "٣", "100000000"])
def test_a_header_length_that_is_none_is_refused(
    site: Site, exported: Exported, length: str
) -> None:
    text, raw = binary("x", exported.x[:1])
    answer = site.call("POST", INFER, text + raw, {LENGTH: length.encode().decode("latin-1")})
    assert answer.status in (400, 413)
    assert list(answer.json) == ["error"]


@pytest.mark.parametrize(("header", "limit"), [("", 1_000_000), (f"{LENGTH}: 99\r\n", 16_000_000)])
def test_a_body_that_says_it_is_too_long_is_refused_unread(
    site: Site, header: str, limit: int
) -> None:
    """JSON is a Python object for every value of it; binary is as it comes."""
    with socket.create_connection(("127.0.0.1", site.port), 10) as peer:
        length = f"Content-Length: {limit + 1}\r\n\r\n"
        peer.sendall(f"POST {INFER} HTTP/1.1\r\nHost: h\r\n{header}{length}".encode())
        received = b""
        while b"error" not in received:  # although not one byte of the body was sent
            part = peer.recv(65536)
            assert part, received
            received += part
    assert received.startswith(b"HTTP/1.1 413 ")
    assert f"at most {limit} bytes".encode() in received


def test_a_body_without_an_end_is_refused_at_the_limit(site: Site) -> None:
    sent = 0
    chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    with socket.create_connection(("127.0.0.1", site.port), 10) as peer:
        peer.sendall(
            f"POST {INFER} HTTP/1.1\r\nHost: h\r\n{LENGTH}: 99\r\n"
            "Transfer-Encoding: chunked\r\n\r\n".encode()
        )
        received = b""
        while not received and sent < 200_000_000:
            readable, writable, _ = select.select([peer], [peer], [], 20)
            assert readable or writable
            if readable:
                received = peer.recv(65536)
                break
            with contextlib.suppress(OSError):  # refused meanwhile: the answer can still be read
                sent += peer.send(chunk[sent % len(chunk) :], socket.MSG_DONTWAIT)
    assert received.startswith(b"HTTP/1.1 413 ")
    assert 16_000_000 < sent < 40_000_000  # the limit, and what the sockets hold


def test_the_json_of_a_binary_body_is_bounded_as_json_alone_is(site: Site) -> None:
    text = b'{"inputs": [' + b" " * 1_000_000 + b"]}"
    answer = site.call("POST", INFER, text, {LENGTH: str(len(text))})
    assert answer.status == 413
    assert "at most 1000000 bytes" in answer.json["error"]


# load


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


# hostile input

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=10,
)
TENSOR = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["x", "z1", "z2", "z4", "z9"]) | JSON,
        "shape": st.lists(st.integers(-1, 70), max_size=5) | st.just([1, 1, 8, 8]) | JSON,
        "datatype": st.sampled_from(["FP32", "UINT8", "FP16", "INT64", "BYTES"]) | JSON,
        "data": st.just([7] * 64) | st.lists(st.integers(0, 255)) | JSON,
        "parameters": st.dictionaries(
            st.sampled_from(["binary_data_size", "scale", "zero_point"]), JSON
        )
        | JSON,
    },
)
REQUEST = st.fixed_dictionaries(
    {},
    optional={
        "id": JSON,
        "inputs": st.lists(TENSOR, max_size=3) | JSON,
        "outputs": st.lists(st.dictionaries(st.sampled_from(["name", "parameters"]), JSON)) | JSON,
        "parameters": st.dictionaries(st.sampled_from(["binary_data_output", "x"]), JSON) | JSON,
    },
)


def check_refused_or_answered(site: Site, exported: Exported, answer: Inference) -> None:
    assert answer.status < 500, answer.body
    assert answer.status == 200 or list(answer.json) == ["error"]
    good = site.infer_binary("x", exported.x[:1]).outputs["label"]
    assert good.tolist() == exported.logits(exported.x[:1]).argmax(axis=1).tolist()


@given(st.binary(max_size=300), st.none() | st.integers(0, 400))
def test_any_bytes_are_refused(
    site: Site, exported: Exported, body: bytes, length: int | None
) -> None:
    """FAULTS row 26."""
    headers = {} if length is None else {LENGTH: str(length)}
    check_refused_or_answered(site, exported, site.call("POST", INFER, body, headers))


@given(REQUEST, st.booleans())
def test_any_json_is_refused_or_answered(
    site: Site, exported: Exported, request_: dict[str, Any], announced: bool
) -> None:
    """FAULTS row 26."""
    body = json.dumps(request_).encode()  # orjson would leave out NaN and numbers above 64 bits
    headers = {LENGTH: str(len(body))} if announced else {}
    check_refused_or_answered(site, exported, site.call("POST", INFER, body, headers))


@given(st.data())
def test_any_damage_to_a_good_request_is_refused_or_answered(
    site: Site, exported: Exported, data: st.DataObject
) -> None:
    """FAULTS row 26."""
    z = exported.smashed(2, exported.x[:1])
    text, raw = binary("z2", z, None, outputs=[{"name": "logits"}])
    body = bytearray(text + raw)
    length = len(text) + data.draw(st.sampled_from([0, 0, 0, -1, 1, 7, -60]))
    for _ in range(data.draw(st.integers(0, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.none() | st.integers(0, len(body)))
    answer = site.call("POST", INFER, bytes(body[:cut]), {LENGTH: str(length)})
    check_refused_or_answered(site, exported, answer)
