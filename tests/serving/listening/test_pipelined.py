"""Requests that are sent ahead of the answers, over real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from fastapi import FastAPI, Request

from server.http_connection import PIPELINED_MOST
from server.http_server import HttpServer
from tests.waiting import wait_until

pytestmark = pytest.mark.deadline

Serving = Callable[..., HttpServer]
WAIT = b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n"
LIVE = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
OFFER = b"Upgrade: h2c\r\nHTTP2-Settings: AAEAAQ\r\n"
OFFERED = LIVE[:-2] + b"Connection: Upgrade, HTTP2-Settings\r\n" + OFFER + b"\r\n"


@pytest.fixture
def waiting() -> threading.Event:
    """Set once a request waits."""
    return threading.Event()


@pytest.fixture
def gone() -> threading.Event:
    """Set once a request that waits is told that its peer has gone."""
    return threading.Event()


@pytest.fixture
def peer(
    serving: Serving, waiting: threading.Event, gone: threading.Event
) -> Iterator[socket.socket]:
    """A connection to an application with an answer at once, and one that waits for the end."""
    app = FastAPI()

    @app.get("/live")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @app.get("/wait")
    async def wait(request: Request) -> None:
        waiting.set()
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone.set()

    host, _, port = serving(app).url.partition("://")[2].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        yield sock


def read_to_end(peer: socket.socket) -> bytes:
    """What the server says until it ends the connection."""
    raw = b""
    with contextlib.suppress(ConnectionError):
        while part := peer.recv(65_536):
            raw += part
    return raw


@pytest.mark.parametrize("ahead", [LIVE, OFFERED], ids=["requests", "offers"])
def test_more_requests_ahead_than_may_wait_end_the_connection(
    peer: socket.socket, waiting: threading.Event, ahead: bytes
) -> None:
    """FAULTS row 22: each one takes memory until its answer, and a stranger may send them."""
    peer.sendall(WAIT)
    assert waiting.wait(20)
    with contextlib.suppress(ConnectionError):
        peer.sendall(1_000 * ahead)
    assert read_to_end(peer) == b""  # nothing that could be taken for the answer that is awaited


def test_bytes_behind_a_request_are_not_answered_in_its_place(
    peer: socket.socket, waiting: threading.Event, gone: threading.Event
) -> None:
    """The peer would take "bad request" for the answer to what is being done."""
    peer.sendall(WAIT)
    assert waiting.wait(20)
    peer.sendall(b"}}\r\n\r\n")
    assert read_to_end(peer) == b""
    wait_until(gone.is_set, "the request was not told that its peer has gone", 20)


def test_as_many_requests_ahead_as_may_wait_are_answered(peer: socket.socket) -> None:
    closing = LIVE[:-2] + b"Connection: close\r\n\r\n"
    peer.sendall(PIPELINED_MOST * LIVE + closing)
    assert read_to_end(peer).count(b'{"live":true}') == PIPELINED_MOST + 1


def test_request_that_waits_is_told_of_the_end_though_another_came_behind_it(
    peer: socket.socket, waiting: threading.Event, gone: threading.Event
) -> None:
    # in one piece: the request reads on, once it waits; one that comes later pauses the reading
    peer.sendall(WAIT + LIVE)
    assert waiting.wait(20)
    peer.close()
    wait_until(gone.is_set, "the request that was being answered was not told", 20)


def test_offer_with_a_last_request_is_answered_though_more_came_behind_it(
    peer: socket.socket,
) -> None:
    """uvicorn allows this for requests without an offer."""
    peer.sendall(LIVE[:-2] + b"Connection: Upgrade, close\r\n" + OFFER + b"\r\n" + LIVE)
    assert b'{"live":true}' in read_to_end(peer)
