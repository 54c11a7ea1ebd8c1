"""A port: accepts connections, gives them places, and cuts off those whose peers are silent."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final

from server.listening.acceptor import Acceptor
from server.listening.guarded import TICK_S, GuardedProtocol
from server.listening.places import Place, Places
from server.listening.seldom import SeldomFilter
from server.listening.tls import TlsProtocol

PLACES_MOST: Final = 8_192
PLACES_LEAST: Final = 64
# at most in one read of a connection; the allocator keeps memory of that size
READ_BYTES: Final = 65_536
# descriptors for files, databases and connections of our own
DESCRIPTORS_KEPT: Final = 256

logger = logging.getLogger(__name__)
logger.addFilter(SeldomFilter())


def places_for(descriptors: int) -> Places:
    """Places of a port in a process that may open so many files and sockets."""
    return Places(max(PLACES_LEAST, min(PLACES_MOST, descriptors - DESCRIPTORS_KEPT)))


class Port:
    """A listening socket and the connections that came in there; make it on the event loop.

    Args:
        listening: closed by `close`.
        make: makes the protocol of a connection that has a place.
        tls: for TLS; None for none.
        tick_s: seconds between two looks at the waits of all connections.
    """

    def __init__(
        self,
        listening: socket.socket,
        places: Places,
        make: Callable[[Place], GuardedProtocol],
        tls: ssl.SSLContext | None = None,
        *,
        tick_s: float = TICK_S,
    ) -> None:
        self._tick_s = tick_s
        self._places = places
        self._make = make
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._open: set[_Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._ticks = self._loop.call_later(self._tick_s, self._tick)
        self._acceptor = Acceptor(listening, self._accepted)

    def close(self) -> None:
        """Stop accepting, and cut off connections before their TLS handshake. Others stay."""
        self._ticks.cancel()
        self._acceptor.close()
        for connection in list(self._open):
            protocol = connection.protocol
            if isinstance(protocol, TlsProtocol) and not protocol.ready:
                connection.cut()

    def _accepted(self, accepted: socket.socket, address: str) -> None:
        connection = _Connection()
        evicted = self._places.evicted
        place = self._places.take(address, connection.cut)
        if place is None:
            logger.warning("a connection was refused: all %d are at work", self._places.taken)
            accepted.close()
            return
        if self._places.evicted != evicted:
            logger.warning(
                "address=%s a silent connection gave way to a new one; %d are open",
                address,
                self._places.taken,
            )

        def lost() -> None:
            self._places.leave(place)
            self._open.discard(connection)

        protocol = self._protocol(place)
        protocol.on_lost = lost
        connection.protocol = protocol
        self._open.add(connection)
        opening = self._loop.create_task(self._start(connection, accepted, lost))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    def _protocol(self, place: Place) -> GuardedProtocol:
        if self._tls is None:
            return self._make(place)
        return TlsProtocol(self._tls, lambda: self._make(place))

    async def _start(
        self, connection: _Connection, accepted: socket.socket, lost: Callable[[], None]
    ) -> None:
        protocol = connection.protocol
        assert protocol is not None
        try:
            transport, _ = await self._loop.connect_accepted_socket(lambda: protocol, accepted)
        except OSError:  # the peer has gone
            accepted.close()
            lost()
            return
        # asyncio reads up to 256 KiB at a time: for so much memory it asks the system, at each read
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # of its sockets
        connection.transport = transport
        if connection.is_cut:
            transport.abort()

    def _tick(self) -> None:
        self._ticks = self._loop.call_later(self._tick_s, self._tick)
        for connection in list(self._open):
            if connection.protocol is not None and connection.transport is not None:
                connection.protocol.tick()


class _Connection:
    """One connection, which may be cut before its transport is there."""

    __slots__ = ("is_cut", "protocol", "transport")

    def __init__(self) -> None:
        self.protocol: GuardedProtocol | None = None
        self.transport: asyncio.Transport | None = None
        self.is_cut = False

    def cut(self) -> None:
        """Close it at once."""
        self.is_cut = True
        if self.transport is not None:
            self.transport.abort()
