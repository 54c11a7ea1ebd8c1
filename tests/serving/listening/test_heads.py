"""Heads and frames of requests that the parser alone would take, over real sockets."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI, Request

from server.http_connection import HEAD_BYTES
from server.http_server import HttpServer

pytestmark = pytest.mark.deadline

Serving = Callable[..., HttpServer]
LONG = b"x" * 2 * HEAD_BYTES
CHUNKED = b"POST /body HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
HOST = b"Host: localhost\r\n"


@pytest.fixture
def app() -> FastAPI:
    """An application that tells the body and the header `x-more` of a request."""
    app = FastAPI()

    @app.post("/body")
    async def body(request: Request) -> dict[str, Any]:
        raw = await request.body()
        return {"body": raw.decode(), "more": request.headers.get("x-more")}

    @app.get("/live")
    async def live() -> dict[str, bool]:
        return {"live": True}

    return app


@pytest.fixture
def peer(serving: Serving, app: FastAPI) -> socket.socket:
    """A connection to it."""
    host, _, port = serving(app).url.partition("://")[2].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def ask(peer: socket.socket, request: bytes) -> bytes:
    """The status and the body of the answer; empty if the connection ends before."""
    raw = b""
    with contextlib.suppress(ConnectionError):
        peer.sendall(request)
    with contextlib.suppress(ConnectionError):
        while b"\r\n\r\n" not in raw and (part := peer.recv(65_536)):
            raw += part
        head, _, body = raw.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        while len(body) < length and (part := peer.recv(65_536)):
            body += part
        return head[9:12] + b" " + body
    return b""


def is_ended(peer: socket.socket) -> bool:
    """Whether the server has ended the connection, once what it said is read."""
    with contextlib.suppress(ConnectionError):
        while peer.recv(65_536):
            pass
    return True


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(b"GET /live HTTP/1.1\r\n" + HOST + b"A: " + LONG, id="one-field"),
        pytest.param(b"GET /live HTTP/1.1\r\n" + HOST + b"A: b\r\n" * HEAD_BYTES, id="many-fields"),
        pytest.param(b"GET /" + LONG, id="path"),
        pytest.param(CHUNKED + b"\r\n1;" + LONG, id="frame-of-a-chunk"),
        pytest.param(CHUNKED + b"\r\n1\r\nx\r\n0\r\nA: " + LONG, id="trailer"),
        pytest.param(CHUNKED + b"\r\n0\r\n" + b"A: b\r\n" * HEAD_BYTES, id="many-trailers"),
    ],
)
def test_head_without_end_takes_no_memory(peer: socket.socket, request_: bytes) -> None:
    """FAULTS row 22: it is refused long before its peer would be called silent."""
    with peer:
        assert ask(peer, request_)[:3].strip() in (b"400", b"")  # the end may overtake the answer
        assert is_ended(peer)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /live HTTP/1.1\r\n", b"400"),
        (b"GET /live HTTP/1.1\r\n" + 2 * HOST, b"400"),
        (b"GET /live HTTP/1.0\r\n" + 2 * HOST, b"400"),
        (b"GET /live HTTP/1.1\r\n" + HOST, b"200"),
        (b"GET /live HTTP/1.0\r\n", b"200"),
        (CHUNKED + b"Content-Length: 5\r\n", b"400"),
    ],
)
def test_head_that_two_programs_could_read_differently_is_refused(
    peer: socket.socket, head: bytes, status: bytes
) -> None:
    with peer:
        assert ask(peer, head + b"\r\n")[:3] == status


def test_trailer_is_no_header(peer: socket.socket) -> None:
    with peer:
        request = CHUNKED + b"\r\n2\r\nab\r\n0\r\nX-More: 1\r\n\r\n"
        assert ask(peer, request) == b'200 {"body":"ab","more":null}'
        assert ask(peer, b"GET /live HTTP/1.1\r\n" + HOST + b"\r\n") == b'200 {"live":true}'


def test_offer_of_http_2_is_not_taken_up(peer: socket.socket) -> None:
    """Java's client makes it with each first request, and goes on in HTTP/1.1."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAQ\r\n"
    request = b"POST /body HTTP/1.1\r\n" + HOST + offer + b"Content-Length: 2\r\n\r\nab"
    with peer:
        for _ in range(2):
            assert ask(peer, request) == b'200 {"body":"ab","more":null}'
        assert ask(peer, b"GET /live HTTP/1.1\r\n" + HOST + offer + b"\r\n") == b'200 {"live":true}'
        assert ask(peer, b"GET /live HTTP/1.1\r\n" + HOST + b"\r\n") == b'200 {"live":true}'


def test_body_refused_early_that_comes_after_all_leaves_the_connection(
    peer: socket.socket,
) -> None:
    with peer:
        head = b"POST /none HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n\r\n"
        assert ask(peer, head)[:3] == b"404"
        peer.sendall(b"12345")
        assert ask(peer, b"GET /live HTTP/1.1\r\n" + HOST + b"\r\n") == b'200 {"live":true}'
