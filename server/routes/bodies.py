"""Request bodies of a bounded size: refused before they are held in memory.

Without this a route that declares a body reads all of it before it looks at anything, the
credential included.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import Message

from edge_sdk.errors import FrameTooLargeError


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The body of `request`.

    Raises: FrameTooLargeError as soon as it is, or says it will be, above `limit_bytes`.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20:
        _check(int(declared), limit_bytes)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        _check(size, limit_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


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
