"""Request bodies of bounded size: a body that is too long is refused before it is in memory.

Without this a route that declares a body reads all of it before it checks anything, the credential
included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, ClassVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import Message

from edge_sdk.errors import FrameTooLargeError
from server.errors import OverloadedError


async def read_body(
    request: Request, limit_bytes: int, grown: Callable[[int], None] | None = None
) -> bytes:
    """The body of `request`.

    Args:
        grown: called with the size so far, in bytes, as it arrives; may raise.
    Raises: FrameTooLargeError as soon as the body is, or declares itself, above `limit_bytes`.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20:
        _check(int(declared), limit_bytes)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        _check(size, limit_bytes)
        if grown is not None:
            grown(size)
        chunks.append(chunk)
    return b"".join(chunks)


class BodyBudget:
    """Memory for the long bodies that are read and answered at one time, on one event loop.

    Short bodies need none, so a client that sends long bodies slowly keeps no other query out.

    Args:
        limit_bytes: all long bodies together. short_bytes: the longest body that counts as short.
    """

    def __init__(self, limit_bytes: int, short_bytes: int) -> None:
        self._left = limit_bytes
        self._short = short_bytes

    @contextlib.contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """Memory for one body until the end of the block.

        Gives a function to call with the body's size so far.

        Raises: OverloadedError, in that call, when no memory is left.
        """
        held = 0

        def grown(size_bytes: int) -> None:
            nonlocal held
            if size_bytes <= self._short:
                return
            if size_bytes - held > self._left:
                raise OverloadedError("too many long bodies at once; try again")
            self._left -= size_bytes - held
            held = size_bytes

        try:
            yield grown
        finally:
            self._left += held


class BoundedRoute(APIRoute):
    """A route whose declared body is at most `body_limit_bytes` long; give it as `route_class`."""

    body_limit_bytes: ClassVar[int] = 65_536

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, behind the limit."""
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler

        async def bounded(request: Request) -> Response:
            body = await read_body(request, self.body_limit_bytes)

            async def replay() -> Message:
                return {"type": "http.request", "body": body, "more_body": False}

            return await handler(Request(request.scope, replay))

        return bounded


def _check(size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise FrameTooLargeError(f"body: expected at most {limit_bytes} bytes, got {size_bytes}")
