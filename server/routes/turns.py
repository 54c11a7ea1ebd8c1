"""Routes whose requests write the registry, a few at a time.

A request that writes may wait seconds for the database. It holds one of the threads that all routes
share, so only some of them may do so at once: the others wait without a thread.
"""

from __future__ import annotations

import asyncio
from typing import Final

from fastapi import Request, Response

from server.errors import RegistryError
from server.routes.bodies import BoundedRoute, Handler

# of the 40 threads that FastAPI has; the others serve downloads and reads
TURNS: Final = 16
TURN_S: Final = 5.0

_READS: Final = frozenset({"GET", "HEAD"})


class RegistryRoute(BoundedRoute):
    """A bounded route that waits for a turn, unless it only reads; give it as `route_class`."""

    def after_body(self, handler: Handler) -> Handler:
        """The handler, called once it is the request's turn.

        It raises RegistryError if that takes longer than `TURN_S`: nothing was changed then.
        """
        if (self.methods or set()) <= _READS:
            return handler

        async def in_turn(request: Request) -> Response:
            turns = _turns(request)
            try:
                async with asyncio.timeout(TURN_S):
                    await turns.acquire()
            except TimeoutError:
                raise RegistryError(
                    "registry: too many changes wait for the database; try again"
                ) from None
            try:
                return await handler(request)
            finally:
                turns.release()

        return in_turn


def _turns(request: Request) -> asyncio.Semaphore:
    """The turns of the request's application, which all its routes share, on this event loop."""
    state = request.app.state
    if not hasattr(state, "registry_turns"):
        state.registry_turns = {}
    by_loop: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = state.registry_turns
    return by_loop.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(TURNS))
