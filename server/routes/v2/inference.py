"""Inference by the Open Inference Protocol v2 over HTTP.

Bodies are parsed here, not by FastAPI: existing clients send no Content-Type, ask for binary
tensors by default, and read errors only as `{"error": ...}`. `Queries` is the way of a query from
its head to its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
from fastapi import APIRouter, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from edge_sdk.session import Array
from edge_sdk.wire.answers import HEADER_LENGTH, pack_answer, read_header_length
from edge_sdk.wire.frames import HTTP_LIMITS, Frame, decode
from edge_sdk.wire.messages import Query, frame_id, read_deadline
from edge_sdk.wire.traceparent import TRACEPARENT, TraceContext, read_traceparent
from server.access.heads import headers_of, is_query
from server.access.table import rule_of
from server.backend.inference import Inference
from server.backend.models import ServedModel
from server.backend.senders import SenderLimits, Senders
from server.errors import BadRequestError, OverloadedError, ServerError
from server.routes.bodies import BodyBudget, declared_bytes, read_message
from server.routes.errors import ANSWERED, error_answer
from server.routes.v2.encodings import Answer, compressed, encoding_of, inflate
from server.routes.v2.models import FEATURES, check_model
from server.tracing.query_traces import QueryTrace

# JSON makes a Python object of every value: 10 MB took 1.4 s, as binary a few ms
JSON_BYTES: Final = 1_000_000
LIMITS: Final = replace(HTTP_LIMITS, header_bytes=JSON_BYTES)
# a longer body is parsed in a thread; a shorter one is parsed before a thread would have woken
SHORT_BYTES: Final = 65_536
LONG_BODIES_BYTES: Final = 64_000_000
# long bodies of one sender that are read at a time (a device sends two), and how long others wait:
# long enough that a client which asks again at once is slowed down, short enough for a refusal
TURNS: Final = 2
TURN_S: Final = 0.5


def router() -> APIRouter:
    """The routes of inference, for the description of the API: `Queries` answers them."""
    routes = APIRouter()

    @routes.post("/v2/models/{name}/infer")
    @routes.post("/v2/models/{name}/versions/{version}/infer")
    async def infer(name: str, version: str | None = None) -> Response:
        raise AssertionError(f"{name} {version}: expected `Queries` to answer")

    return routes


class Queries:
    """Middleware that answers queries, and hands on all other requests.

    FastAPI's way to a route takes longer than a small model (docs/decisions/0060). So this is the
    last middleware, which the guard and all others come before, and queries do not reach FastAPI's
    router.
    """

    def __init__(self, app: ASGIApp, inference: Inference) -> None:
        self._app = app
        self._inference = inference
        self._senders = inference.senders
        self._budget = BodyBudget(LONG_BODIES_BYTES, SHORT_BYTES)
        self._turns = _Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or not is_query(scope):
            await self._app(scope, receive, send)
            return
        try:
            answer = await self._answer(scope, receive)
        except ANSWERED as err:
            await error_answer(Request(scope), err)(scope, receive, send)
            return
        await answer.send(send)

    async def _answer(self, scope: Scope, receive: Receive) -> Answer:
        """From the head of a query to its answer.

        Raises: ServerError, FrameError, ClientDisconnect.
        """
        name, version = _model_of(scope)
        headers = headers_of(scope)
        sender = _sender(scope, self._senders, name)
        declared = declared_bytes(headers)
        self._senders.arrived(sender, declared)
        length = read_header_length(headers.get(HEADER_LENGTH.lower()))
        outcome = _Outcome()

        def ask(body: bytes, *, may_run_here: bool = False) -> _Asked:
            frame = decode(body, length, LIMITS)
            trace = read_traceparent(headers.get(TRACEPARENT.lower()))
            query = _query(frame, name, version, trace)
            traced = self._inference.trace(query, sender)
            with _ending(traced):
                model = self._inference.submit(
                    query, outcome.done, sender=sender, may_run_here=may_run_here, trace=traced
                )
            return _Asked(frame, query, model, traced)

        encoding = encoding_of(headers)
        if encoding is None and 0 < declared <= SHORT_BYTES:
            # read, asked and, if the model is quick, computed without another thread
            asked = ask(await read_message(receive, headers, declared), may_run_here=True)
            return await _answered(headers, asked, outcome)
        limit = JSON_BYTES if length is None else LIMITS.frame_bytes
        with self._budget.body(sender) as grown:
            counted = _charging(self._senders, sender, declared, grown)
            async with contextlib.AsyncExitStack() as stack:
                with _counted(self._senders, sender):
                    await stack.enter_async_context(self._turns.turn(sender))
                    body = await read_message(receive, headers, limit, counted)
                    if encoding is not None:
                        body = await inflate(body, encoding, limit, grown)
                asked = await asyncio.to_thread(ask, body)
            return await _answered(headers, asked, outcome)


async def _answered(headers: Mapping[str, str], asked: _Asked, outcome: _Outcome) -> Answer:
    """The answer to a query, once it has its outcome; its trace, if it has one, ends here."""
    with _ending(asked.trace):
        outputs = await outcome.outputs()
        reply_s = time.monotonic()
        answer = await _respond(headers, asked, outputs)
    if asked.trace is not None:
        asked.trace.end(outputs, reply_s)
    return answer


def _model_of(scope: Scope) -> tuple[str, str | None]:
    """Name and version of the model that the path of a query names."""
    found = rule_of(scope["method"], scope["path"])
    assert found is not None, "the guard lets no other path in"
    return found[1]["name"], found[1].get("version")


def _sender(scope: Scope, senders: Senders, model: str) -> str:
    """The sender of a query, for its limits and its share of the engine: who has logged in, or the
    address of an anonymous client.

    Raises: ForbiddenError if it may not ask the model.
    """
    login = check_model(Request(scope), model)
    if login is None:
        client = scope.get("client")
        return "" if client is None else str(client[0])
    if login.key is not None:
        own = SenderLimits(login.key.requests, login.key.rows, login.key.bytes)
        senders.limit(login.name, own)
    return login.name


def _charging(
    senders: Senders, sender: str, declared: int, grown: Callable[[int], None]
) -> Callable[[int], None]:
    """`grown`, which also charges the sender for bytes that its request had not declared: a body in
    chunks declares none.
    """
    charged = declared

    def counted(size_bytes: int) -> None:
        nonlocal charged
        if size_bytes > charged:
            senders.arrived_more(sender, size_bytes - charged)
            charged = size_bytes
        grown(size_bytes)

    return counted


@contextlib.contextmanager
def _counted(senders: Senders, sender: str) -> Iterator[None]:
    """Count a refusal in the block, before the query was known."""
    try:
        yield
    except OverloadedError:
        senders.turned_away(sender)
        raise


class _Turns:
    """Turns of a sender in which its long bodies are read and parsed, TURNS at a time.

    The others stay unread in their sockets, so a flood of them costs no memory and little time.
    """

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def turn(self, sender: str) -> AsyncIterator[None]:
        """Wait for a turn, and hold it until the end of the block.

        Raises: OverloadedError after TURN_S.
        """
        # the dictionary forgets the turns of a sender with its last request
        turns = self._turns.setdefault(sender, asyncio.Semaphore(TURNS))
        try:
            async with asyncio.timeout(TURN_S):
                await turns.acquire()
        except TimeoutError:
            raise OverloadedError("too many long bodies of one sender; try again") from None
        try:
            yield
        finally:
            turns.release()


@dataclass(frozen=True, slots=True)
class _Asked:
    """A query that the engine has taken, and its trace, if it is traced."""

    frame: Frame
    query: Query
    model: ServedModel
    trace: QueryTrace | None


@contextlib.contextmanager
def _ending(trace: QueryTrace | None) -> Iterator[None]:
    """Record that a query ends with the error that leaves the block, if one does."""
    try:
        yield
    except ServerError as err:
        if trace is not None:
            trace.end(err, None)
        raise
    except BaseException as err:  # such as the end of a client that disconnects
        if trace is not None:
            trace.end(ServerError(type(err).__name__), None)
        raise


def _query(frame: Frame, name: str, version: str | None, trace: TraceContext | None) -> Query:
    if len(frame.tensors) != 1:
        raise BadRequestError(f"inputs: expected one tensor, got {len(frame.tensors)}")
    deadline_ms = read_deadline(frame.parameters)
    return Query(frame_id(frame), name, version, frame.tensors[0], deadline_ms, trace)


class _Outcome:
    """The outcome of a query, handed to the event loop that made this object."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._outcome: asyncio.Future[Array | ServerError] = self._loop.create_future()

    def done(self, outcome: Array | ServerError) -> None:
        """Hand over the outcome, from any thread."""
        if threading.get_ident() == self._thread:  # computed here: nothing has to be woken
            self._settle(outcome)
        else:
            self._loop.call_soon_threadsafe(self._settle, outcome)

    async def outputs(self) -> Array:
        """Wait for the outcome.

        Raises: ServerError if the outcome is an error.
        """
        outcome = await self._outcome
        if isinstance(outcome, ServerError):
            raise outcome
        return outcome

    def _settle(self, outcome: Array | ServerError) -> None:
        if not self._outcome.done():  # the client may have disconnected
            self._outcome.set_result(outcome)


async def _respond(headers: Mapping[str, str], asked: _Asked, outputs: Array) -> Answer:
    query, model = asked.query, asked.model
    computed = {FEATURES: outputs} if model.engine.output == FEATURES else _outputs(outputs)
    header: dict[str, Any] = {
        "model_name": model.manifest.name,
        "model_version": model.manifest.version,
    }
    if query.id:
        header["id"] = query.id
    body, length = pack_answer(asked.frame, header, computed)
    if length is None:
        return await compressed(headers, body, {"content-type": "application/json"})
    kind = {"content-type": "application/octet-stream", HEADER_LENGTH.lower(): str(length)}
    return await compressed(headers, body, kind)


def _outputs(logits: Array) -> dict[str, Array]:
    # `reduce` is what `max` and `sum` call in the end, after a microsecond each
    weights = np.exp(logits - np.maximum.reduce(logits, axis=1, keepdims=True))
    return {
        "logits": logits,
        "probabilities": weights / np.add.reduce(weights, axis=1, keepdims=True),
        "label": logits.argmax(axis=1),
    }
