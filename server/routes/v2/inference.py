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
from typing import Final
from weakref import WeakValueDictionary

from fastapi import APIRouter, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from edge_sdk.session import Array
from edge_sdk.wire.answers import HEADER_LENGTH
from edge_sdk.wire.traceparent import TRACEPARENT
from server.access.heads import headers_of, is_query
from server.access.table import rule_of
from server.backend.inference import Inference
from server.backend.senders import Senders
from server.backend.turns import Turn
from server.errors import OverloadedError, ServerError
from server.listening.direct_request import Answer
from server.routes.bodies import BodyBudget, declared_bytes, read_message
from server.routes.errors import ANSWERED, error_answer
from server.routes.v2.asking import (
    JSON_BYTES,
    LIMITS,
    SHORT_BYTES,
    Asked,
    Head,
    ask,
    ending,
    packed,
    sender_of,
)
from server.routes.v2.encodings import compressed, encoding_of, inflate
from server.routes.v2.models import check_model

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
        self._turn = Turn(inference.batcher)
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
        await send({"type": "http.response.start", "status": 200, "headers": answer.fields})
        await send({"type": "http.response.body", "body": answer.body})

    async def _answer(self, scope: Scope, receive: Receive) -> Answer:
        """From the head of a query to its answer.

        Raises: ServerError, FrameError, ClientDisconnect; ForbiddenError if the sender may not ask
            the model.
        """
        names = _model_of(scope)
        headers = headers_of(scope)
        login = check_model(Request(scope), names[0])
        sender = sender_of(login, scope.get("client"), self._senders)
        declared = declared_bytes(headers)
        self._senders.arrived(sender, declared)
        head = Head.read(
            names, sender, headers.get(HEADER_LENGTH.lower()), headers.get(TRACEPARENT.lower())
        )
        outcome = _Outcome()
        encoding = encoding_of(headers)
        if encoding is None and 0 < declared <= SHORT_BYTES:
            # read, asked and, if the model is quick, computed without another thread
            body = await read_message(receive, headers, declared)
            asked = ask(self._inference, head, body, outcome.done, self._turn)
            return await _answered(headers, asked, outcome)
        limit = JSON_BYTES if head.json_bytes is None else LIMITS.frame_bytes
        with self._budget.body(sender) as grown:
            counted = _charging(self._senders, sender, declared, grown)
            async with contextlib.AsyncExitStack() as stack:
                with _counted(self._senders, sender):
                    await stack.enter_async_context(self._turns.turn(sender))
                    body = await read_message(receive, headers, limit, counted)
                    if encoding is not None:
                        body = await inflate(body, encoding, limit, grown)
                asked = await asyncio.to_thread(ask, self._inference, head, body, outcome.done)
            return await _answered(headers, asked, outcome)


async def _answered(headers: Mapping[str, str], asked: Asked, outcome: _Outcome) -> Answer:
    """The answer to a query, once it has its outcome; its trace, if it has one, ends here."""
    with ending(asked.trace):
        outputs = await outcome.outputs()
        reply_s = time.monotonic()
        answer = await compressed(headers.get("accept-encoding", ""), *packed(asked, outputs))
    if asked.trace is not None:
        asked.trace.end(outputs, reply_s)
    return answer


def _model_of(scope: Scope) -> tuple[str, str | None]:
    """Name and version of the model that the path of a query names."""
    found = rule_of(scope["method"], scope["path"])
    assert found is not None, "the guard lets no other path in"
    return found[1]["name"], found[1].get("version")


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
