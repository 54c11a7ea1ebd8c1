"""Bytes of one connection, with a deadline on every wait."""

from __future__ import annotations

import socket
import time
from typing import Final

CHUNK_BYTES: Final = 65_536
# a peer that is still sending gets this long to read its error before the connection is cut
LINGER_S: Final = 1.0
LINGER_BYTES: Final = 4_000_000


class Stream:
    """Reads and writes a socket until its deadline; one thread at a time.

    A socket's own timeout starts again with each byte, so that a peer that sends slowly would hold
    its place for ever.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._deadline = 0.0

    def allow(self, seconds: float) -> None:
        """Set the deadline of all that follows."""
        self._deadline = time.monotonic() + seconds

    def receive(self) -> bytes:
        """The bytes that come next; empty if the peer sends no more.

        Raises: TimeoutError at the deadline; OSError if the connection breaks.
        """
        self._arm()
        return self._socket.recv(CHUNK_BYTES)

    def send(self, data: bytes) -> None:
        """Send all of `data`.

        Raises: TimeoutError at the deadline; OSError if the connection breaks.
        """
        self._arm()
        self._socket.sendall(data)

    def drain(self) -> None:
        """Read for a moment what the peer still sends: closing with unread bytes would cut off the
        answer that it has not read yet.
        """
        self.allow(LINGER_S)
        try:
            self._socket.shutdown(socket.SHUT_WR)
            left = LINGER_BYTES
            while left > 0 and (piece := self.receive()):
                left -= len(piece)
        except OSError:
            pass

    def _arm(self) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(left_s)
