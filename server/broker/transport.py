"""The socket of one client: reads into a shared buffer, and writes what the client takes."""

from __future__ import annotations

import socket
from typing import Final, Protocol

from server.listening.direct_loop import READ, WRITE, DirectLoop

_LOW_SHARE: Final = 4  # writing goes on below this part of the limit above which it pauses


class Reader(Protocol):
    """The owner of a transport."""

    def received(self, size_bytes: int) -> None:
        """Take so many bytes out of the buffer."""

    def ended(self) -> None:
        """Note that the client sends no more."""

    def closed(self) -> None:
        """Note that the socket is closed; called once, and never from within `abort` or `close`."""

    def pause_writing(self) -> None:
        """Note that more than the limit waits for the client."""

    def resume_writing(self) -> None:
        """Note that little waits again."""


class Transport:
    """A connected socket of the loop.

    Attributes:
        closing: `close` or `abort` was called, or the client has ended the connection.

    Args:
        sock: not blocking; the transport closes it.
        buffer: what is received; other transports use it too, one after the other.
        high_bytes: above it, `Reader.pause_writing` is called.
    """

    __slots__ = (
        "_buffer",
        "_descriptor",
        "_events",
        "_high_bytes",
        "_loop",
        "_over",
        "_paused",
        "_reader",
        "_sock",
        "_unsent",
        "closing",
    )

    def __init__(
        self,
        loop: DirectLoop,
        sock: socket.socket,
        reader: Reader,
        buffer: memoryview,
        high_bytes: int,
    ) -> None:
        self.closing = False
        self._loop = loop
        self._sock = sock
        self._descriptor = sock.fileno()
        self._reader = reader
        self._buffer = buffer
        self._high_bytes = high_bytes
        self._unsent = bytearray()
        self._paused = False
        self._over = False
        self._events = 0
        self._watch(READ)

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the system has not taken yet."""
        return len(self._unsent)

    def write(self, data: bytes) -> None:
        """Send now what the system takes, and the rest when it takes more."""
        if self._over:
            return
        sent = 0
        if not self._unsent:
            sent = self._send(data)
            if sent == len(data) or self._over:
                return
            self._watch(self._events | WRITE)
        self._unsent += memoryview(data)[sent:]
        if not self._paused and len(self._unsent) > self._high_bytes:
            self._paused = True
            self._reader.pause_writing()

    def pause_reading(self) -> None:
        """Leave what the client sends where it is."""
        self._watch(self._events & ~READ)

    def resume_reading(self) -> None:
        """Read again."""
        if not self.closing:
            self._watch(self._events | READ)

    def close(self) -> None:
        """Close the socket once everything is sent; read no more."""
        if self.closing:
            return
        self.closing = True
        self.pause_reading()
        if not self._unsent:
            self._end()

    def abort(self) -> None:
        """Close the socket, and send nothing more."""
        self.closing = True
        self._end()

    def _watch(self, events: int) -> None:
        if events != self._events and not self._over:
            self._events = events
            self._loop.watch(self._descriptor, events, self._ready)

    def _ready(self, events: int) -> None:
        # an error or the end of the connection is told as an event of neither kind
        if events & ~WRITE and self._events & READ:
            self._receive()
        if events & ~READ and self._events & WRITE:
            self._flush()

    def _receive(self) -> None:
        try:
            size = self._sock.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.abort()
            return
        if size:
            self._reader.received(size)
            return
        self._reader.ended()
        self.close()

    def _send(self, data: bytes | bytearray) -> int:
        try:
            return self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self.abort()
            return 0

    def _flush(self) -> None:
        del self._unsent[: self._send(self._unsent)]
        if self._paused and len(self._unsent) <= self._high_bytes // _LOW_SHARE and not self._over:
            self._paused = False
            self._reader.resume_writing()
        if not self._unsent:
            self._watch(self._events & ~WRITE)
            if self.closing:
                self._end()

    def _end(self) -> None:
        if self._over:
            return
        self._watch(0)
        self._over = True
        self._unsent = bytearray()
        self._loop.call_soon(self._close)

    def _close(self) -> None:
        self._sock.close()
        self._reader.closed()
