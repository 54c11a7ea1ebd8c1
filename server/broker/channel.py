"""The connection of one client, plain or with TLS, between its socket and the broker's core."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final, Protocol, cast

from server.broker.core.broker import HELD, Broker
from server.broker.core.connection import Closing, Connection
from server.broker.transport import Transport
from server.listening.direct_loop import DirectLoop
from server.listening.source import source_network

_HIGH_WATER_BYTES: Final = 65_536  # above it, a device is not read from
_CHUNK_BYTES: Final = 8_192  # fed to TLS at once; its buffers keep the size of the largest
_RECORD_BYTES: Final = 16_384  # the longest TLS record
_HANDSHAKE_BYTES: Final = 32_768

logger = logging.getLogger(__name__)


class Owner(Protocol):
    """The sockets of a broker, as a channel sees them."""

    core: Broker
    loop: DirectLoop
    time: Callable[[], float]
    buffer: memoryview
    plain: memoryview

    def opened(
        self, channel: Channel, unsent: Callable[[], int], written: Callable[[], int]
    ) -> Connection: ...

    def logged_in(self, channel: Channel) -> None: ...

    def heard(self, channel: Channel) -> None: ...

    def forget(self, channel: Channel) -> None: ...

    def queue_handshake(self, channel: TlsChannel) -> None: ...

    def settle(self) -> None: ...


class Channel:
    """A plain socket. All channels of a broker read into one buffer, one after the other.

    Attributes:
        address: the client's host. source: as limits count it.
        opened_at: when the socket was accepted.
        busy: it waits for us, not for the client; so it does not give way to others.
        closing_at: when the socket began to close, from either side; 0 before.
        connection: the core's side.
    """

    __slots__ = (
        "_again",
        "_logged_in",
        "_owner",
        "_paused",
        "_transport",
        "_written",
        "address",
        "busy",
        "closing_at",
        "connection",
        "opened_at",
        "source",
    )

    def __init__(self, owner: Owner, sock: socket.socket, address: str, opened_at: float) -> None:
        self.address = address
        self.source = source_network(address)
        self.opened_at = opened_at
        self.busy = False
        self.closing_at = 0.0
        self._owner = owner
        self._written = 0
        self._logged_in = False
        self._paused = False
        self._again: asyncio.Handle | None = None
        self._transport = Transport(owner.loop, sock, self, owner.buffer, _HIGH_WATER_BYTES)
        self.connection = owner.opened(
            self, lambda: self._transport.unsent_bytes, lambda: self._written
        )

    # --- what the transport calls -----------------------------------------------------------

    def received(self, size_bytes: int) -> None:
        """Take what is in the owner's buffer."""
        if not self._logged_in:
            self._owner.heard(self)
        try:
            self._take(self._owner.buffer[:size_bytes])
        except Exception as err:  # noqa: BLE001 - outermost loop of a connection: a fault ends this one alone
            self.failed(err)
        self._owner.settle()

    def ended(self) -> None:
        """Handle what came before the end, and give the client a while to read what waits."""
        self.closing_at = self.closing_at or self._owner.time()
        self._owner.core.closed(self.connection, self._owner.time())
        self._owner.settle()

    def closed(self) -> None:
        """Forget the connection."""
        self.ended()
        if self._again is not None:
            self._again.cancel()
        self._owner.forget(self)

    def pause_writing(self) -> None:
        """Note that the client does not take what is written."""
        self.connection.congested = True

    def resume_writing(self) -> None:
        """Note that it does so again."""
        self.connection.congested = False
        self.connection.attend()
        self._owner.settle()

    # --- what the owner calls ------------------------------------------------------------

    def attend(self) -> None:
        """Write what the core has for this client, and end the socket where it says so."""
        connection, transport = self.connection, self._transport
        if not self._logged_in and connection.rights is not None:
            self._logged_in = True
            self._owner.logged_in(self)
        if connection.output and not transport.closing:
            self._send(connection.take_output())
        if connection.closing is Closing.NOT:
            if connection.held and not connection.blocked and self._again is None:
                self._again = self._owner.loop.call_soon(self._go_on)
        elif connection.closing is Closing.NOW:
            self.abort()
        elif connection.closing is Closing.AFTER_OUTPUT and not self.closing_at:
            self.closing_at = self._owner.time()
            self._close()

    def abort(self) -> None:
        """Close the socket now."""
        self.closing_at = self.closing_at or self._owner.time()
        self._transport.abort()

    def failed(self, err: Exception) -> None:
        """End this connection, and log the fault in it; the others go on."""
        logger.error("connection of %s failed", self.address, exc_info=err)
        try:
            self._owner.core.cut(self.connection, "a fault of the broker", self._owner.time())
        finally:
            self.abort()

    # --- bytes ------------------------------------------------------------------------------

    def _take(self, data: memoryview) -> None:
        """Take bytes of the socket."""
        now = self._owner.time()
        self._owner.core.receive(self.connection, data, now)
        self._work(now)

    def _send(self, data: bytes) -> None:
        self._written += len(data)
        self._transport.write(data)

    def _close(self) -> None:
        self._transport.close()

    def _work(self, now: float) -> None:
        """Let the core handle packets, and read on when it needs more bytes."""
        wait_s = self._owner.core.work(self.connection, now)
        if wait_s is None:
            if self._paused:
                self._paused = False
                self._transport.resume_reading()
            return
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()
        if self._again is not None or wait_s == HELD:
            return
        loop = self._owner.loop
        if wait_s:
            self._again = loop.call_later(wait_s, self._go_on)
        else:
            self._again = loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._again = None
        if self.connection.ended:
            return
        try:
            self._work(self._owner.time())
        except Exception as err:  # noqa: BLE001 - outermost loop of a connection, as above
            self.failed(err)
        self._owner.settle()


class TlsChannel(Channel):
    """A socket with TLS, by memory buffers that are small and made when the client speaks.

    asyncio's own TLS keeps a buffer of 256 KiB for each connection.
    """

    __slots__ = ("_context", "_incoming", "_outgoing", "_ready", "_tls")

    def __init__(
        self,
        owner: Owner,
        sock: socket.socket,
        address: str,
        opened_at: float,
        context: ssl.SSLContext,
    ) -> None:
        super().__init__(owner, sock, address, opened_at)
        self._context = context
        self._tls: ssl.SSLObject | None = None
        self._incoming: ssl.MemoryBIO | None = None
        self._outgoing: ssl.MemoryBIO | None = None
        self._ready = False

    def shake_hands(self) -> None:
        """Do the next part of the handshake; the owner calls it, a few in a turn."""
        self.busy = False
        self._owner.heard(self)  # from now on it is the client's turn
        incoming = self._incoming
        if incoming is None or self._transport.closing:
            return
        if self._tls is None:
            self._outgoing = ssl.MemoryBIO()
            self._tls = self._context.wrap_bio(incoming, self._outgoing, server_side=True)
        try:
            self._tls.do_handshake()
            self._ready = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as err:
            logger.debug("TLS handshake with %s failed: %s", self.address, err)
            self._flush()
            self._transport.close()
            return
        self._flush()
        if self._ready:
            self._decrypt()
            self._owner.settle()

    def _take(self, data: memoryview) -> None:
        if self._incoming is None:
            self._incoming = ssl.MemoryBIO()
        if not self._ready:
            self._incoming.write(data)
            if self._incoming.pending > _HANDSHAKE_BYTES:
                self.abort()
            elif not self.busy:
                self.busy = True
                self._owner.queue_handshake(self)
            return
        for at in range(0, len(data), _CHUNK_BYTES):
            self._incoming.write(data[at : at + _CHUNK_BYTES])
            self._decrypt()

    def _decrypt(self) -> None:
        assert self._tls is not None
        now, plain = self._owner.time(), self._owner.plain
        try:
            while size := cast("int", self._tls.read(len(plain), plain)):
                self._owner.core.receive(self.connection, plain[:size], now)
        except ssl.SSLWantReadError:
            self._work(now)
            return
        except ssl.SSLError as err:
            logger.debug("TLS of %s failed: %s", self.address, err)
        self.ended()
        self.abort()

    def _send(self, data: bytes) -> None:
        assert self._tls is not None
        view = memoryview(data)
        try:
            for at in range(0, len(view), _RECORD_BYTES):
                self._tls.write(view[at : at + _RECORD_BYTES])
                self._flush()
        except ssl.SSLError as err:
            logger.debug("TLS of %s failed: %s", self.address, err)
            self.abort()

    def _close(self) -> None:
        assert self._tls is not None
        with contextlib.suppress(ssl.SSLError):  # it would wait for the client's own end of TLS
            self._tls.unwrap()
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        assert self._outgoing is not None
        if self._outgoing.pending:
            super()._send(self._outgoing.read())
