"""An event loop that calls chosen sockets at once, where asyncio makes an entry in a queue first.

A broker handles packets of a few microseconds. asyncio's entry for each event, its context and its
transport cost as much as the packet itself; see docs/decisions/0058-the-echo-of-the-broker.md.
"""

from __future__ import annotations

import asyncio
import math
import os
import select
import selectors
from collections.abc import Callable
from typing import Final

READ: Final = select.EPOLLIN
WRITE: Final = select.EPOLLOUT
_RESOLUTION_S: Final = 1e-3  # epoll takes whole milliseconds

Ready = Callable[[int], None]


class DirectLoop(asyncio.SelectorEventLoop):
    """The event loop of asyncio, with sockets whose owners are called without its queue."""

    def __init__(self) -> None:
        self._direct = _DirectSelector(self._report)
        super().__init__(self._direct)

    def watch(self, descriptor: int, events: int, ready: Ready) -> None:
        """Call `ready` with the events of a descriptor; errors and its end come unasked.

        A second call changes the events and keeps `ready`. With no events, nothing is called.

        Args:
            events: READ, WRITE, both, or 0.
        """
        self._direct.watch(descriptor, events, ready)

    def _report(self, err: Exception) -> None:
        """Say that a `ready` has failed; the loop goes on."""
        self.call_exception_handler({"message": "a socket's owner failed", "exception": err})


class _DirectSelector(selectors.EpollSelector):
    """Calls the owners of some descriptors itself, and tells asyncio of the others."""

    def __init__(self, report: Callable[[Exception], None]) -> None:
        super().__init__()
        self._report = report
        # the same set of descriptors; each object closes a descriptor of its own
        self._epoll = select.epoll.fromfd(os.dup(self.fileno()))
        self._owners: dict[int, Ready] = {}

    def close(self) -> None:
        self._epoll.close()
        super().close()

    def watch(self, descriptor: int, events: int, ready: Ready) -> None:
        if not events:
            if self._owners.pop(descriptor, None) is not None:
                self._epoll.unregister(descriptor)
        elif descriptor in self._owners:
            self._epoll.modify(descriptor, events)
        else:
            self._epoll.register(descriptor, events)
            self._owners[descriptor] = ready

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        others: list[tuple[selectors.SelectorKey, int]] = []
        try:
            found = self._epoll.poll(_whole_milliseconds(timeout))
        except InterruptedError:
            return others
        for descriptor, events in found:
            ready = self._owners.get(descriptor)
            if ready is None:
                self._tell(descriptor, events, others)
                continue
            try:
                ready(events)
            except Exception as err:  # noqa: BLE001 - a fault of one owner; the others go on
                self._report(err)
        return others

    def _tell(
        self, descriptor: int, events: int, others: list[tuple[selectors.SelectorKey, int]]
    ) -> None:
        key = self.get_map().get(descriptor)
        if key is None:
            return  # its owner has closed it in this turn
        # as selectors.EpollSelector: an error or the end is told to who reads and who writes
        asked = (selectors.EVENT_WRITE if events & ~READ else 0) | (
            selectors.EVENT_READ if events & ~WRITE else 0
        )
        if asked & key.events:
            others.append((key, asked & key.events))


def _whole_milliseconds(timeout: float | None) -> float | None:
    """A timeout for epoll, rounded up so that the loop does not spin; None waits for ever."""
    if timeout is None:
        return None
    return math.ceil(timeout / _RESOLUTION_S) * _RESOLUTION_S if timeout > 0 else 0
