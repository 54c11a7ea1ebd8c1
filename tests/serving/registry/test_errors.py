"""Every failure of a route is answered as `{"error": one line}` with the status of its kind."""

from __future__ import annotations

import asyncio
import json
import logging

import httpx
import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel, Field
from starlette.types import Message

from edge_sdk.errors import FrameError, FrameTooLargeError
from server.errors import BadRequestError, OverloadedError, UnknownDeviceError
from server.routes import errors
from server.routes.bodies import BoundedRoute, read_body


class Body(BaseModel):
    secret: str = Field(max_length=3)
    count: int


FAILURES: dict[str, Exception] = {
    "unknown": UnknownDeviceError("no device\n'pi'"),
    "bad": BadRequestError("expected 3\ud800, got 4"),
    "long": BadRequestError("x" * 5000),
    "busy": OverloadedError("queue full", retry_after_s=2.2),
    "soon": OverloadedError("queue full", retry_after_s=0.01),
    "frame": FrameError("not a frame"),
    "large": FrameTooLargeError("frame: 3 MB"),
    "surprise": ValueError("password=hunter2"),
}


def application() -> FastAPI:
    app = FastAPI()
    app.router.route_class = BoundedRoute
    errors.install(app)

    @app.get("/fail/{kind}")
    def fail(kind: str) -> None:
        raise FAILURES[kind]

    @app.post("/body")
    def body(body: Body) -> dict[str, int]:
        return {"count": body.count}

    return app


def call(method: str, path: str, content: bytes = b"") -> httpx.Response:
    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(application(), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            json_type = {"Content-Type": "application/json"}
            return await client.request(method, path, content=content, headers=json_type)

    return asyncio.run(once())


@pytest.mark.parametrize(
    ("kind", "status", "text"),
    [
        ("unknown", 404, "no device 'pi'"),
        ("bad", 400, "expected 3\\ud800, got 4"),
        ("long", 400, "x" * 500),
        ("busy", 429, "queue full"),
        ("frame", 400, "not a frame"),
        ("large", 413, "frame: 3 MB"),
    ],
)
def test_our_errors_carry_their_status_and_one_line(kind: str, status: int, text: str) -> None:
    reply = call("GET", f"/fail/{kind}")
    assert (reply.status_code, reply.json()) == (status, {"error": text})


@pytest.mark.parametrize(("kind", "seconds"), [("busy", "3"), ("soon", "1")])
def test_overload_says_when_to_come_back_in_whole_seconds(kind: str, seconds: str) -> None:
    assert call("GET", f"/fail/{kind}").headers["Retry-After"] == seconds


def test_a_surprise_tells_the_peer_nothing_and_the_log_everything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR, logger="server.routes.errors"):
        reply = call("GET", "/fail/surprise")
    assert reply.status_code == 500
    assert "hunter2" not in reply.text
    assert list(reply.json()) == ["error"]
    assert "GET /fail/surprise failed" in caplog.text
    assert "ValueError: password=hunter2" in caplog.text


def test_an_invalid_body_is_refused_by_field_and_not_quoted() -> None:
    reply = call("POST", "/body", json.dumps({"secret": "s3cr3t-value"}).encode())
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error == "body.secret: String should have at most 3 characters (and 1 more)"
    assert "s3cr3t" not in reply.text


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 90, b"\xff\xfe", b"1", b"NaN", b"null"])
def test_a_body_that_is_not_the_expected_json_is_a_400(content: bytes) -> None:
    reply = call("POST", "/body", content)
    assert reply.status_code == 400
    assert list(reply.json()) == ["error"]


def test_a_body_above_the_limit_is_a_413() -> None:
    reply = call("POST", "/body", b" " * 65_537)
    assert reply.status_code == 413
    assert reply.json() == {"error": "body: expected at most 65536 bytes, got 65537"}


def test_a_body_of_unknown_length_is_given_up_at_the_limit() -> None:
    sent = 0

    async def endless() -> Message:
        nonlocal sent
        sent += 1
        return {"type": "http.request", "body": bytes(1000), "more_body": True}

    request = Request({"type": "http", "method": "POST", "headers": []}, endless)
    with pytest.raises(FrameTooLargeError, match="at most 4500 bytes, got 5000"):
        asyncio.run(read_body(request, 4500))
    assert sent == 5


def test_a_client_that_goes_away_half_way_is_no_surprise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    messages: list[Message] = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]
    statuses: list[int] = []

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        statuses.append(message.get("status", 0))

    path = {"path": "/body", "raw_path": b"/body", "root_path": "", "query_string": b""}
    scope = {"type": "http", "method": "POST", "headers": [], **path}
    asyncio.run(application()(scope, receive, send))
    assert statuses[0] == 400
    assert not caplog.records


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/x", 404), ("GET", "/body", 405)])
def test_an_unknown_path_or_verb_is_answered_in_the_same_form(
    method: str, path: str, status: int
) -> None:
    reply = call(method, path)
    assert reply.status_code == status
    assert list(reply.json()) == ["error"]
