"""TLS in front of a protocol, at little memory.

asyncio gives each TLS connection a buffer of 256 KiB before the first byte of its handshake: 1,500
silent sockets cost 470 MB. Here a connection that has said nothing costs what a plain one does, and
one that is open the state of OpenSSL.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable, Iterator
from typing import Any, Final

from server.listening.guarded import GuardedProtocol

HANDSHAKE_TICKS: Final = 8
# OpenSSL's buffers stay as large as the largest piece that has gone through them
PIECE_BYTES: Final = 65_536

logger = logging.getLogger(__name__)


class TlsProtocol(GuardedProtocol):
    """The server's end of TLS; another protocol gets what it decrypts.

    Args:
        make: makes that protocol once the handshake is done; its transport encrypts.
    """

    def __init__(self, context: ssl.SSLContext, make: Callable[[], GuardedProtocol]) -> None:
        self._context = context
        self._make = make
        self._pipe: _Pipe | None = None  # from the first bytes on
        self._inner: GuardedProtocol | None = None  # from the end of the handshake on
        self._waited = 0
        self._reading = True
        self._transport: asyncio.Transport

    @property
    def ready(self) -> bool:
        """Whether the handshake is done."""
        return self._inner is not None

    def tick(self) -> None:
        """Cut off a peer that is overdue with its handshake, or that the inner protocol cuts."""
        if self._inner is not None:
            self._inner.tick()
            return
        self._waited += 1
        if self._waited > HANDSHAKE_TICKS:
            self._transport.abort()

    # what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the peer's first bytes."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Go on with the handshake, or decrypt."""
        if self._pipe is None:
            self._pipe = _Pipe(self._context)
        pipe = self._pipe
        try:
            for piece in _pieces(data):
                pipe.incoming.write(piece)
                if self._inner is not None or self._shake(pipe):
                    self._decrypt(pipe)
        except ssl.SSLError as err:
            logger.debug("a TLS connection ended: %s", err.reason)
            self._send(pipe)  # the alert, which tells the peer why
            self._transport.close() if self._inner is None else self._transport.abort()

    def eof_received(self) -> bool | None:
        """Close: half of a TLS connection is none."""
        if self._inner is not None:
            self._inner.eof_received()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the inner protocol, which tells the port; without one, tell the port."""
        if self._inner is not None:
            self._inner.connection_lost(exc)
        else:
            self.on_lost()

    def pause_writing(self) -> None:
        """Tell the inner protocol that the peer reads too slowly."""
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Tell the inner protocol that it may go on."""
        if self._inner is not None:
            self._inner.resume_writing()

    # what the inner protocol's transport calls

    def encrypt(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Send `data`."""
        assert self._pipe is not None
        for piece in _pieces(data):
            if piece and not self._transport.is_closing():
                self._pipe.tls.write(piece)
                self._send(self._pipe)

    def read_on(self, *, reading: bool) -> None:
        """Stop reading, or go on."""
        self._reading = reading
        if reading:
            self._transport.resume_reading()
            # what has arrived is decrypted in a turn of its own: the caller may be the reader
            asyncio.get_running_loop().call_soon(self.data_received, b"")
        else:
            self._transport.pause_reading()

    def end(self) -> None:
        """Say goodbye, send what is left and close."""
        if self._transport.is_closing():
            return
        assert self._pipe is not None
        with contextlib.suppress(ssl.SSLError):  # it would wait for the peer's goodbye
            self._pipe.tls.unwrap()
        self._send(self._pipe)
        self._transport.close()

    def _shake(self, pipe: _Pipe) -> bool:
        """Go on with the handshake; whether it is done."""
        try:
            pipe.tls.do_handshake()
        except ssl.SSLWantReadError:
            self._send(pipe)
            return False
        self._send(pipe)
        self._inner = self._make()
        self._inner.on_lost = self.on_lost
        self._inner.connection_made(TlsTransport(self, self._transport, pipe.tls))
        return True

    def _decrypt(self, pipe: _Pipe) -> None:
        """Hand over what has arrived."""
        assert self._inner is not None
        while self._reading and not self._transport.is_closing():
            try:
                data = pipe.tls.read(PIECE_BYTES)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLZeroReturnError:
                data = b""
            if not data:  # the peer's goodbye
                self._inner.eof_received()
                self.end()
                return
            self._inner.data_received(data)
        self._send(pipe)

    def _send(self, pipe: _Pipe) -> None:
        """Send what TLS has to say."""
        if pipe.outgoing.pending and not self._transport.is_closing():
            self._transport.write(pipe.outgoing.read())


class _Pipe:
    """OpenSSL's state of one connection, and the bytes that go into and come out of it."""

    __slots__ = ("incoming", "outgoing", "tls")

    def __init__(self, context: ssl.SSLContext) -> None:
        self.incoming = ssl.MemoryBIO()
        self.outgoing = ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=True)


class TlsTransport(asyncio.Transport):
    """The transport of the protocol behind TLS."""

    def __init__(
        self, protocol: TlsProtocol, transport: asyncio.Transport, tls: ssl.SSLObject
    ) -> None:
        super().__init__({"sslcontext": tls.context, "ssl_object": tls})
        self._protocol = protocol
        self._transport = transport
        self._reading = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Facts of the transport below, and `sslcontext` and `ssl_object`."""
        found = super().get_extra_info(name)
        return self._transport.get_extra_info(name, default) if found is None else found

    def is_closing(self) -> bool:
        """Whether it is closed, or about to be."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Send what is left, and close."""
        self._protocol.end()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def is_reading(self) -> bool:
        """Whether the protocol gets data."""
        return self._reading

    def pause_reading(self) -> None:
        """Hand over nothing until `resume_reading`."""
        if self._reading and not self.is_closing():
            self._reading = False
            self._protocol.read_on(reading=False)

    def resume_reading(self) -> None:
        """Hand over what arrives."""
        if not self._reading and not self.is_closing():
            self._reading = True
            self._protocol.read_on(reading=True)

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Encrypt and send."""
        self._protocol.encrypt(data)

    def get_write_buffer_size(self) -> int:
        """Bytes that wait to be sent."""
        return self._transport.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Bytes at which writing goes on again, and is paused."""
        return self._transport.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set those."""
        self._transport.set_write_buffer_limits(high, low)


def _pieces(data: bytes | bytearray | memoryview[Any]) -> Iterator[memoryview[Any]]:
    """The data in pieces; one empty piece for none."""
    view = memoryview(data)
    for start in range(0, max(len(view), 1), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]
