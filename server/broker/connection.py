"""The connection of one client that logged in: its limits, its socket, its packets."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from edge_sdk.errors import FrameError, FrameTooLargeError
from edge_sdk.wire.topics import PAYLOAD_BYTES
from server.broker import packets
from server.broker.packets import PUBLISH_OVERHEAD_BYTES, Connect, PacketType
from server.broker.policy import Principal

_CHUNK_BYTES: Final = 65_536
_TURNS: Final = 8  # of the event loop, more than taking a message and acknowledging it

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AcceptorLimits:
    """Limits of the embedded broker on its clients. Sizes in bytes, times in seconds.

    Attributes:
        payload_bytes: longest message.
        connect_bytes, connect_s: size of a login, and how long a socket may take to send it.
        logins: sockets that have not logged in yet; above it, the oldest is closed.
        keep_alive_s: the longest keep-alive; a client that asks for none gets this one.
        inbound_messages, inbound_bytes: undelivered messages of one device, above which the broker
            stops reading from it.
        fleet_inbound_bytes: undelivered bytes of all devices, with the same effect.
        outbound_messages, outbound_bytes: messages that wait for a device; above it, the device is
            cut.
        stall_s: how long a client may take no byte while some wait for it.
    """

    payload_bytes: int = PAYLOAD_BYTES
    connect_bytes: int = 4_096
    connect_s: float = 5.0
    logins: int = 1_000
    keep_alive_s: int = 300
    inbound_messages: int = 16
    inbound_bytes: int = 1_000_000
    fleet_inbound_bytes: int = 32_000_000
    outbound_messages: int = 256
    outbound_bytes: int = 8_000_000
    stall_s: float = 8.0

    @property
    def packet_bytes(self) -> int:
        """The longest packet: a message with its topic."""
        return self.payload_bytes + PUBLISH_OVERHEAD_BYTES


class FlowWindow:
    """A count of messages under way; `open` while another one fits."""

    def __init__(self, messages: int, size_bytes: int, parent: FlowWindow | None = None) -> None:
        self._left_messages = messages
        self._left_bytes = size_bytes
        self._parent = parent
        self._room = asyncio.Event()
        self._room.set()

    @property
    def open(self) -> bool:
        """Whether another message fits."""
        return self._room.is_set()

    def take(self, size_bytes: int) -> None:
        """Count a message in, whether or not it fits."""
        self._count(-1, -size_bytes)
        if self._parent is not None:
            self._parent.take(size_bytes)

    def give(self, size_bytes: int) -> None:
        """Count a message out."""
        self._count(1, size_bytes)
        if self._parent is not None:
            self._parent.give(size_bytes)

    async def wait(self) -> None:
        """Wait until another message fits here and in the parent."""
        await self._room.wait()
        if self._parent is not None:
            await self._parent.wait()

    def _count(self, messages: int, size_bytes: int) -> None:
        self._left_messages += messages
        self._left_bytes += size_bytes
        if self._left_messages > 0 and self._left_bytes > 0:
            self._room.set()
        else:
            self._room.clear()


class ClientConnection:
    """The connection of one client that logged in: its socket, its principal, its flow windows.

    Attributes:
        inbound: messages of a device that are not delivered yet; None for a backend.
        outbound: messages that wait for this client.
        left: the client sent DISCONNECT, so its will is void (3.1.2.5).
        ended: set when the broker has finished with the connection.
    """

    def __init__(
        self,
        principal: Principal,
        connect: Connect,
        writer: asyncio.StreamWriter,
        limits: AcceptorLimits,
        fleet_inbound: FlowWindow,
    ) -> None:
        self.principal = principal
        self.client_id = connect.client_id
        self.left = False
        self.ended = asyncio.Event()
        # a backend sends to many devices: one device that does not read must not stop it
        self.inbound = (
            FlowWindow(limits.inbound_messages, limits.inbound_bytes, fleet_inbound)
            if principal.role == "device"
            else None
        )
        self.outbound = FlowWindow(limits.outbound_messages, limits.outbound_bytes)
        self._writer = writer
        self._stall_s = limits.stall_s
        asked = connect.keep_alive_s or limits.keep_alive_s
        self._silence_s = 1.5 * min(asked, limits.keep_alive_s)  # MQTT 3.1.2.10
        self._heard_at = self._moved_at = time.monotonic()
        self._waiting_bytes = 0
        self._refused_once = False

    def heard(self) -> None:
        """Note that bytes came in."""
        self._heard_at = time.monotonic()

    async def ready(self) -> None:
        """Wait until the client may be read from.

        A device waits while its inbound window is full, or while it leaves our answers unread. A
        backend is always read, because others wait for its acknowledgements.

        Raises: OSError once the connection is lost.
        """
        if self.inbound is not None:
            await self.inbound.wait()
            await self._writer.drain()

    def refuse(self, what: str, topic: str) -> None:
        """Log a refusal: the first one of a connection as a warning, the others for debugging."""
        level = logging.DEBUG if self._refused_once else logging.WARNING
        self._refused_once = True
        logger.log(level, "client=%s may not %s %.200r", self.client_id, what, topic)

    def cut(self, why: str) -> None:
        """Close the socket now, with bytes still unsent, and log the reason."""
        if not self._writer.transport.is_closing():
            logger.info("client=%s cut: %s", self.client_id, why)
        self.abort()

    def abort(self) -> None:
        """Close the socket now and log nothing."""
        self._writer.transport.abort()

    def sweep(self, now: float) -> None:
        """Cut the connection if it has been silent or stuck for too long."""
        if self.inbound is not None and not self.inbound.open:
            self._heard_at = now  # we are not reading, so silence says nothing
        waiting = self._writer.transport.get_write_buffer_size()
        if not waiting or waiting < self._waiting_bytes:
            self._moved_at = now
        self._waiting_bytes = waiting
        if now - self._heard_at > self._silence_s:
            self.cut(f"nothing heard for {self._silence_s:.1f} s")
        elif now - self._moved_at > self._stall_s:
            self.cut(f"took no byte for {self._stall_s:.0f} s while {waiting} waited")


class PacketReader:
    """The stream that the broker reads: whole packets of one client, each one checked first.

    It has the methods of amqtt's ReaderAdapter. After a fault the socket is cut and every read
    returns no bytes, which ends the broker's side too; after an exception amqtt would read on.
    """

    def __init__(
        self, stream: asyncio.StreamReader, connection: ClientConnection, first: bytes, at_most: int
    ) -> None:
        self._stream = stream
        self._connection = connection
        self._packet = first
        self._at = 0
        self._packet_bytes = at_most
        self._eof = False

    async def read(self, n: int) -> bytes:
        """The next `n` bytes of the current packet, or b"" once the connection has ended."""
        if self._at == len(self._packet) and n > 0:
            self._packet, self._at = await self._next(), 0
        if n > len(self._packet) - self._at:
            if self._packet:
                self._connection.cut(f"a packet that ends {n} bytes too early")
            self._packet, self._at, self._eof = b"", 0, True
            return b""
        self._at += n
        return self._packet[self._at - n : self._at]

    def feed_eof(self) -> None:
        """End the stream."""
        self._eof = True

    async def _next(self) -> bytes:
        inbound = self._connection.inbound
        if self._eof or self._connection.left:
            return await self._over()
        try:
            await self._connection.ready()
            first, head, body = await read_packet(
                self._stream, self._packet_bytes, self._connection.heard
            )
            kind = packets.check_packet(first, body)
        except FrameError as err:
            self._connection.cut(str(err))
            return await self._over()
        except (asyncio.IncompleteReadError, OSError):
            return await self._over()
        if kind is PacketType.PUBLISH and inbound is not None:
            inbound.take(len(body))
        self._connection.left = kind is PacketType.DISCONNECT
        return head + body

    @staticmethod
    async def _over() -> bytes:
        """No bytes, once amqtt has handled what came before: at the end it drops the rest."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        return b""


async def read_packet(
    stream: asyncio.StreamReader, at_most: int, heard: Callable[[], None] = lambda: None
) -> tuple[int, bytes, bytes]:
    """First byte, fixed header and body of the next packet.

    Args:
        at_most: longest packet in bytes.
        heard: called whenever bytes come in, because a long packet takes a while.
    Raises: FrameError, FrameTooLargeError before anything is allocated for the packet;
        asyncio.IncompleteReadError, OSError at the end of the stream.
    """
    head = await stream.readexactly(2)
    while (length := packets.decode_length(head[1:])) is None:
        head += await stream.readexactly(1)
    heard()
    if len(head) + length > at_most:
        raise FrameTooLargeError(f"packet: at most {at_most} bytes, got {len(head) + length}")
    if length <= _CHUNK_BYTES:
        body = await stream.readexactly(length)
        heard()
        return head[0], head, body
    chunks = bytearray()
    while len(chunks) < length:
        chunks += await stream.readexactly(min(_CHUNK_BYTES, length - len(chunks)))
        heard()
    return head[0], head, bytes(chunks)
