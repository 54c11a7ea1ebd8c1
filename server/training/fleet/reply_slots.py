"""One reply of a device at a time: what the trainer holds in memory is bounded by its devices.

A device that lost its connection sends its reply again while the trainer still waits for the rest
of the first: so the newer one is read, and the older one given up. One that has arrived is decoded
first; whoever sends another meanwhile is told to come again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from server.errors import OverloadedError

Arrived = Callable[[Coroutine[Any, Any, bytes]], Awaitable[bytes]]


class ReplySlots:
    """On one event loop."""

    def __init__(self) -> None:
        self._reading: dict[str, asyncio.Task[bytes]] = {}
        self._decoding: set[str] = set()

    @asynccontextmanager
    async def acquire(self, device: str) -> AsyncIterator[Arrived]:
        """A reply of that device until the end of the block; await what it gives with the body.

        Raises: OverloadedError, there, where another one has arrived or a newer one comes.
        """
        mine = False

        async def arrived(body: Coroutine[Any, Any, bytes]) -> bytes:
            nonlocal mine
            if device in self._decoding:
                body.close()
                raise OverloadedError(f"{device}: one reply at a time; try again")
            older = self._reading.pop(device, None)
            if older is not None:
                older.cancel()
            reading = self._reading[device] = asyncio.ensure_future(body)
            try:
                await asyncio.wait([reading])
            finally:
                reading.cancel()  # where this request is given up; nothing where it is done
                newest = self._reading.get(device) is reading
                if newest:
                    del self._reading[device]
            if not newest:
                raise OverloadedError(f"{device}: a newer reply came; try again")
            raw = reading.result()
            self._decoding.add(device)
            mine = True
            return raw

        try:
            yield arrived
        finally:
            if mine:
                self._decoding.discard(device)
