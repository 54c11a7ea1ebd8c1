"""The acceptor of the embedded broker: sockets, logins, and the table of live connections.

A client is authenticated, checked and limited here; the broker behind sees only sockets of
principals, and only whole, well-formed packets within the size limit. So bytes of a stranger never
reach a session, and a fault on a connection ends that connection alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from edge_sdk.errors import FrameError
from server.broker import packets, policy
from server.broker.connection import (
    AcceptorLimits,
    ClientConnection,
    FlowWindow,
    PacketReader,
    read_packet,
)
from server.broker.packets import Connect, PacketType, ReturnCode
from server.broker.policy import Principal

_BACKLOG: Final = 1_024  # sockets that the kernel queues: a whole fleet may reconnect at once

logger = logging.getLogger(__name__)


Serve = Callable[[ClientConnection, PacketReader, asyncio.StreamWriter], Awaitable[None]]


class Acceptor:
    """Listens, lets principals in, and keeps the table of live connections.

    Args:
        serve: runs the broker's side of a connection until it ends.
    """

    def __init__(self, serve: Serve, limits: AcceptorLimits) -> None:
        self.live: dict[str, ClientConnection] = {}
        self._serve = serve
        self._limits = limits
        self._principals: dict[str, Principal] = {}
        self._logins: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._fleet_inbound = FlowWindow(2**31, limits.fleet_inbound_bytes)
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Accept connections from now on, and return the port; the system chooses one for 0.

        Raises: OSError where the address cannot be used.
        """
        handshake = self._limits.connect_s if tls is not None else None
        self._server = await asyncio.start_server(
            self._accept, host, port, ssl=tls, backlog=_BACKLOG, ssl_handshake_timeout=handshake
        )
        self._sweeper = asyncio.create_task(self._sweep())
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def set_principal(self, principal: Principal) -> None:
        """Let `principal` log in; a change cuts connections made under the old rules."""
        before = self._principals.get(principal.client_id)
        self._principals[principal.client_id] = principal
        if before is not None and before != principal:
            self._cut(before, "its principal changed")

    def remove_principal(self, client_id: str) -> Principal | None:
        """Refuse that principal and cut its connections; returns the principal, if it was known."""
        before = self._principals.pop(client_id, None)
        if before is not None:
            self._cut(before, "revoked")
        return before

    def knows(self, principal: Principal) -> bool:
        """Whether this very principal may log in."""
        return self._principals.get(principal.client_id) == principal

    async def close(self) -> None:
        """Stop listening and cut every connection."""
        if self._server is not None:
            self._server.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for writer in self._logins:
            writer.transport.abort()
        ending = list(self.live.values())
        for connection in ending:
            connection.abort()
        await _all_ended(ending)

    def _cut(self, principal: Principal, why: str) -> None:
        for connection in list(self.live.values()):
            if connection.principal == principal:
                connection.cut(why)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            for connection in list(self.live.values()):
                connection.sweep(now)

    async def _accept(self, stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one socket, from its first byte to its end."""
        try:
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection, connect = await self._login(stream, writer)
            if connection is not None and connect is not None:
                await self._run(connection, connect, stream, writer)
        except (FrameError, TimeoutError, asyncio.IncompleteReadError, OSError) as err:
            logger.debug("login failed: %r", err)
        except Exception:  # outermost loop of a connection: a fault ends this one alone
            logger.exception("connection failed")
        finally:
            writer.transport.abort()

    async def _login(
        self, stream: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[ClientConnection | None, Connect | None]:
        if len(self._logins) >= self._limits.logins:
            next(iter(self._logins)).transport.abort()
        self._logins[writer] = None
        try:
            async with asyncio.timeout(self._limits.connect_s):
                first, _, body = await read_packet(stream, self._limits.connect_bytes)
                if first != PacketType.CONNECT << 4:
                    raise FrameError("login: expected a CONNECT packet")
                if packets.connect_level(body) != packets.LEVEL:
                    await _refuse(writer, ReturnCode.WRONG_LEVEL)
                    return None, None
                connect = packets.parse_connect(body)
                principal = self._authenticate(connect)
                if principal is None:
                    peer = writer.get_extra_info("peername")
                    logger.warning("client=%.63r refused, peer %s", connect.client_id, peer)
                    await _refuse(writer, ReturnCode.NOT_AUTHORISED)
                    return None, None
        finally:
            self._logins.pop(writer, None)
        return ClientConnection(
            principal, connect, writer, self._limits, self._fleet_inbound
        ), connect

    def _authenticate(self, connect: Connect) -> Principal | None:
        principal = policy.authenticate(
            self._principals, connect.client_id, connect.username, connect.password
        )
        if principal is None or connect.will is None:
            return principal
        return principal if policy.may_publish(principal, connect.will.topic) else None

    async def _run(
        self,
        connection: ClientConnection,
        connect: Connect,
        stream: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        await self._take_over(connection.client_id)
        if not self.knows(connection.principal):
            return  # revoked while the old socket was closing
        self.live[connection.client_id] = connection
        shown = packets.encode_connect(connect)
        reader = PacketReader(stream, connection, shown, self._limits.packet_bytes)
        try:
            await self._serve(connection, reader, writer)
        finally:
            del self.live[connection.client_id]
            connection.ended.set()

    async def _take_over(self, client_id: str) -> None:
        """End an older connection with this client id (3.1.4), and wait until it is gone."""
        while (old := self.live.get(client_id)) is not None:
            old.cut("it connected again")
            await old.ended.wait()


async def _refuse(writer: asyncio.StreamWriter, code: ReturnCode) -> None:
    """Refuse a login, and close the socket so that the answer still arrives."""
    writer.write(packets.connack(code))
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _all_ended(connections: Iterable[ClientConnection]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(2.0):
            for connection in connections:
                await connection.ended.wait()
