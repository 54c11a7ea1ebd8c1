"""Request bodies of bounded size: a body that is too long is refused before it is in memory.

Without this a route that declares a body reads all of it before it checks anything, the credential
included.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, ClassVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from edge_sdk.errors import FrameTooLargeError
from server.errors import OverloadedError


async def read_body(
    request: Request, limit_bytes: int, grown: Callable[[int], None] | None = None
) -> bytes:
    """The body of `request`, as `read_message` reads it."""
    return await read_message(request.receive, request.headers, limit_bytes, grown)


async def read_message(
    receive: Receive,
    headers: Mapping[str, str],
    limit_bytes: int,
    grown: Callable[[int], None] | None = None,
) -> bytes:
    """The body of a request with these headers.

    Args:
        grown: called with the size so far, in bytes, as it arrives; may raise.
    Raises: FrameTooLargeError as soon as the body is, or declares itself, above `limit_bytes`;
        ClientDisconnect if its sender has gone before its end.
    """
    _check(declared_bytes(headers), limit_bytes)
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(chunk)
        _check(size, limit_bytes)
        if grown is not None:
            grown(size)
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def declared_bytes(headers: Mapping[str, str]) -> int:
    """Length of the body as the headers declare it; 0 without one."""
    declared = headers.get("content-length", "")
    return int(declared) if declared.isdecimal() and len(declared) < 20 else 0


Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class BodyBudget:
    """Memory for the long bodies that are read and answered at one time, on one event loop.

    Short bodies need none, so a client that sends long bodies slowly keeps no other query out. A
    sender may hold as much as it leaves free, so it never takes all.

    Args:
        limit_bytes: all long bodies together. short_bytes: the longest body that counts as short.
    """

    def __init__(self, limit_bytes: int, short_bytes: int) -> None:
        self._left = limit_bytes
        self._short = short_bytes
        self._held: Counter[str] = Counter()

    @contextlib.contextmanager
    def body(self, sender: str = "") -> Iterator[Callable[[int], None]]:
        """Memory for one body of the sender until the end of the block.

        Gives a function to call with the body's size so far.

        Raises: OverloadedError, in that call, when no memory is left.
        """
        held = 0

        def grown(size_bytes: int) -> None:
            nonlocal held
            if size_bytes <= self._short:
                return
            more = size_bytes - held
            if self._held[sender] + more > self._left - more:
                raise OverloadedError("too many long bodies at once; try again")
            self._left -= more
            self._held[sender] += more
            held = size_bytes

        try:
            yield grown
        finally:
            self._left += held
            self._held[sender] -= held
            if not self._held[sender]:
                del self._held[sender]


class BoundedRoute(APIRoute):
    """A route whose declared body is at most `body_limit_bytes` long; give it as `route_class`."""

    body_limit_bytes: ClassVar[int] = 65_536

    def get_route_handler(self) -> Handler:
        """FastAPI's handler, behind the limit."""
        handler = self.after_body(super().get_route_handler())
        if self.body_field is None:
            return handler

        async def bounded(request: Request) -> Response:
            body = await read_body(request, self.body_limit_bytes)

            async def replay() -> Message:
                return {"type": "http.request", "body": body, "more_body": False}

            return await handler(Request(request.scope, replay))

        return bounded

    def after_body(self, handler: Handler) -> Handler:
        """The handler as it is called once the body is read; for routes that add to it."""
        return handler


def _check(size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise FrameTooLargeError(f"body: expected at most {limit_bytes} bytes, got {size_bytes}")
