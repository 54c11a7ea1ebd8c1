"""The event loop of the HTTP server: asyncio's, which knows how many sockets it found ready."""

from __future__ import annotations

import asyncio
import selectors
from typing import Final


class CountingLoop(asyncio.SelectorEventLoop):
    """asyncio's event loop."""

    def __init__(self) -> None:
        self._counting = _CountingSelector()
        super().__init__(self._counting)

    @property
    def ready(self) -> int:
        """Sockets that the last look found ready; all are served before the next look."""
        return self._counting.ready


class _CountingSelector(selectors.DefaultSelector):
    ready = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(timeout)
        self.ready = len(found)
        return found


# as uvicorn imports it
COUNTING_LOOP: Final = f"{__name__}:{CountingLoop.__name__}"


def is_alone() -> bool:
    """Whether what runs came in a turn of the loop in which no other socket had anything."""
    loop = asyncio.get_running_loop()
    return isinstance(loop, CountingLoop) and loop.ready <= 1
