"""Accepting connections on an event loop.

Where no descriptor is left, asyncio's own acceptor tries again 2,048 times in a row, each time with
a traceback in the log: an attack made 581 MB of log in a minute. It also makes the state of TLS
before anything can refuse a connection.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

from server.listening.seldom import SeldomFilter

BACKLOG: Final = 2048
TURN: Final = 64  # accepted before the loop does other work
PAUSE_S: Final = 0.1  # after an accept that failed

Accepted = Callable[[socket.socket, str], None]

logger = logging.getLogger(__name__)
logger.addFilter(SeldomFilter())


class Acceptor:
    """Accepts on a listening socket until `close`; make it on the event loop.

    Args:
        listening: closed by `close`.
        accepted: called with each connection, not blocking, and the peer's IP address.
        turn: connections accepted before the loop does other work.
        failed: called after an accept that failed, before the pause that follows; it may close
            connections to free descriptors.
    """

    def __init__(
        self,
        listening: socket.socket,
        accepted: Accepted,
        *,
        turn: int = TURN,
        failed: Callable[[], object] = lambda: None,
    ) -> None:
        self._socket = listening
        self._accepted = accepted
        self._turn = turn
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._paused: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        listening.listen(BACKLOG)
        self._start()

    def close(self) -> None:
        """Stop accepting, and close the socket. A second call does nothing."""
        if self._paused is not None:
            self._paused.cancel()
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def _start(self) -> None:
        self._paused = None
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(self._turn):
            try:
                connection, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as err:
                logger.error("a connection was not accepted: %s", err.strerror)  # noqa: TRY400
                self._failed()
                self._loop.remove_reader(self._socket)
                self._paused = self._loop.call_later(PAUSE_S, self._start)
                return
            connection.setblocking(False)
            self._accepted(connection, str(address[0]))
