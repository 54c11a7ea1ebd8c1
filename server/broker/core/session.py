"""A client's session: its subscriptions, and the messages on their way to it. Pure: no I/O.

The state of 3.1.2.4. It outlives the connection where the client asked for that.
"""

from __future__ import annotations

from typing import Final

from server.broker.core.connection import Connection
from server.broker.core.limits import BrokerLimits, FlowWindow
from server.broker.core.packets import PacketType, acknowledgement, publish_head
from server.broker.core.rights import Rights

_PACKET_IDS: Final = 65_535
_TRUSTED_MESSAGES: Final = 60_000  # below the number of packet ids


class Message:
    """A message under way; it leaves its sender's window when nobody is left to take it.

    Attributes:
        waiting: receivers that are there and have not acknowledged it.
    """

    __slots__ = ("payload", "qos", "size_bytes", "topic", "topic_bytes", "waiting", "window")

    def __init__(
        self, topic: str, payload: bytes, qos: int, window: FlowWindow | None = None
    ) -> None:
        self.topic = topic
        self.topic_bytes = topic.encode()
        self.payload = payload
        self.qos = qos
        self.size_bytes = len(payload) + len(self.topic_bytes)
        self.window = window
        self.waiting = 0

    def head(self, qos: int, packet_id: int, *, retain: bool, duplicate: bool = False) -> bytes:
        """All of its PUBLISH before the payload."""
        return publish_head(
            self.topic_bytes,
            len(self.payload),
            qos,
            packet_id,
            retain=retain,
            duplicate=duplicate,
        )

    def taken(self) -> None:
        """Count one receiver less."""
        self.waiting -= 1
        if not self.waiting and self.window is not None:
            self.window.give(self.size_bytes)


class Delivery:
    """A message of QoS 1 or 2 on its way to one client.

    Attributes:
        counted: it holds its sender's window.
        sent: the client may have it already.
        released: QoS 2: the client has it, and PUBREL is next.
    """

    __slots__ = ("counted", "message", "qos", "released", "retain", "sent")

    def __init__(self, message: Message, qos: int, *, retain: bool, counted: bool) -> None:
        self.message = message
        self.qos = qos
        self.retain = retain
        self.counted = counted
        self.sent = False
        self.released = False

    def uncount(self) -> None:
        """Let go of the sender's window."""
        if self.counted:
            self.counted = False
            self.message.taken()


class Session:
    """The session of one client id.

    Attributes:
        kept: it stays when the connection ends.
        connection: the client's connection; None while it is away.
        subscriptions: QoS by topic filter.
        exchanges: packet ids of QoS 2 that the client has sent and not released.
        left_at: when the connection ended.
        waiting_bytes: size of all messages on their way to the client.
    """

    __slots__ = (
        "_deliveries",
        "_last_id",
        "_limits",
        "client_id",
        "connection",
        "exchanges",
        "kept",
        "left_at",
        "rights",
        "subscription_bytes",
        "subscriptions",
        "waiting_bytes",
    )

    def __init__(self, client_id: str, rights: Rights, limits: BrokerLimits, *, kept: bool) -> None:
        self.client_id = client_id
        self.rights = rights
        self.kept = kept
        self.connection: Connection | None = None
        self.subscriptions: dict[str, int] = {}
        self.subscription_bytes = 0
        self.exchanges: set[int] = set()
        self.left_at = 0.0
        self.waiting_bytes = 0
        self._limits = limits
        self._deliveries: dict[int, Delivery] = {}  # by packet id, oldest first
        self._last_id = 0

    @property
    def waiting(self) -> int:
        """The number of messages on their way to the client."""
        return len(self._deliveries)

    def has_room(self, size_bytes: int) -> bool:
        """Whether another message may wait for the client."""
        if self.rights.trusted and self.connection is not None:
            return len(self._deliveries) < _TRUSTED_MESSAGES
        limits = self._limits
        most = limits.kept_messages if self.connection is None else limits.outbound_messages
        return (
            len(self._deliveries) < most
            and self.waiting_bytes + size_bytes <= limits.outbound_bytes
        )

    def send(self, message: Message, qos: int, *, retain: bool = False) -> None:
        """Send a message, or keep it while the client is away. There is room for it."""
        connection = self.connection
        if not qos:
            if connection is not None:
                connection.write_message(message.head(0, 0, retain=retain), message.payload)
            return
        packet_id = self._next_id()
        delivery = Delivery(message, qos, retain=retain, counted=connection is not None)
        self._deliveries[packet_id] = delivery
        self.waiting_bytes += message.size_bytes
        if connection is not None:
            message.waiting += 1
            delivery.sent = True
            connection.write_message(message.head(qos, packet_id, retain=retain), message.payload)

    def taken(self, packet_id: int) -> None:
        """Take the client's PUBACK; one that fits nothing is passed over."""
        delivery = self._deliveries.get(packet_id)
        if delivery is not None and delivery.qos == 1:
            del self._deliveries[packet_id]
            self._forget(delivery)

    def acknowledged(self, kind: PacketType, packet_id: int) -> None:
        """Take the client's PUBREC or PUBCOMP; one that fits nothing is passed over."""
        delivery = self._deliveries.get(packet_id)
        if kind is PacketType.PUBREC:
            if delivery is not None and delivery.qos == 2 and not delivery.released:
                delivery.released = True
                self._forget(delivery)
            if delivery is None or delivery.qos == 2:
                self._answer(PacketType.PUBREL, packet_id)  # 4.3.3, also for one that is unknown
            return
        if delivery is None:
            return
        if delivery.released:
            del self._deliveries[packet_id]

    def came(self, connection: Connection) -> None:
        """Go on over a new connection."""
        self.connection = connection

    def resume(self) -> None:
        """Send again what the client has not acknowledged (4.4), after its CONNACK."""
        assert self.connection is not None
        for packet_id, delivery in self._deliveries.items():
            if delivery.released:
                self._answer(PacketType.PUBREL, packet_id)
                continue
            message = delivery.message
            head = message.head(
                delivery.qos, packet_id, retain=delivery.retain, duplicate=delivery.sent
            )
            delivery.sent = True
            self.connection.write_message(head, message.payload)

    def went(self, now: float) -> None:
        """Note that the connection has ended: no sender waits for this client any more."""
        self.connection = None
        self.left_at = now
        for delivery in self._deliveries.values():
            delivery.uncount()

    def _forget(self, delivery: Delivery) -> None:
        self.waiting_bytes -= delivery.message.size_bytes
        delivery.uncount()

    def _answer(self, kind: PacketType, packet_id: int) -> None:
        if self.connection is not None:
            self.connection.write(acknowledgement(kind, packet_id))

    def _next_id(self) -> int:
        packet_id = self._last_id % _PACKET_IDS + 1
        while packet_id in self._deliveries:
            packet_id = packet_id % _PACKET_IDS + 1
        self._last_id = packet_id
        return packet_id
