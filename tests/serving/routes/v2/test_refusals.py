"""Requests that are refused, too long or hostile: a short answer that says why."""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serving.routes.v2.inference_site import INFER, LENGTH, Inference, Site, as_json, binary

if TYPE_CHECKING:
    from tests.serving.conftest import Exported


pytestmark = pytest.mark.broker  # the services start the embedded broker

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
