"""One reply of a device at a time, so that the number of devices bounds the trainer's memory.

A device that lost its connection sends its reply again while the trainer still waits for the rest
of the first copy. So the newer copy is read, and the older one given up. A reply that is whole is
decoded first; a device that sends another one meanwhile is told to try again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from server.errors import OverloadedError

Receive = Callable[[Coroutine[Any, Any, bytes]], Awaitable[bytes]]


class ReplySlots:
    """One slot for each device, on one event loop."""

    def __init__(self) -> None:
        self._reading: dict[str, asyncio.Task[bytes]] = {}
        self._decoding: set[str] = set()

    @asynccontextmanager
    async def acquire(self, device: str) -> AsyncIterator[Receive]:
        """Hold the device's slot to the end of the block.

            async with slots.acquire("pi") as receive:
                raw = await receive(read_body(...))     # from here on no other reply comes in

        Raises: OverloadedError, by `receive`, if another reply is being decoded or a newer one
            comes.
        """
        mine = False

        async def receive(body: Coroutine[Any, Any, bytes]) -> bytes:
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
                reading.cancel()  # where this request is given up; no effect where it is done
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
            yield receive
        finally:
            if mine:
                self._decoding.discard(device)
