"""Limits of the embedded broker on its clients, and the counters that hold them. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edge_sdk.wire.topics import PAYLOAD_BYTES
from server.broker.core.packets import PUBLISH_OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class BrokerLimits:
    """Limits of the embedded broker on its clients. Sizes in bytes, times in seconds.

    Attributes:
        payload_bytes: longest message.
        control_bytes: longest packet that is no message, such as a SUBSCRIBE.
        connect_bytes, connect_s: size of a login, and how long a socket may take until it has
            logged in, TLS handshake included.
        connections: sockets in all.
        logins, logins_per_address: sockets that have not logged in yet, in all and of one address
            (an IPv6 /64 is one); above it, the one that has been silent for longest is closed.
        handshake_s: silence after which one that has begun a TLS handshake is closed so. While all
            are in the middle of one, a socket above the number is closed, and its client comes
            again.
        handshakes_per_turn: parts of TLS handshakes between two looks at the other sockets.
        keep_alive_s: the longest keep-alive; a client that asks for none gets this one.
        turn_cost: packets of one client that are handled before the others have their turn. Each
            4 KiB and each topic filter counts as one more.
        cost_per_s, cost_burst: the same, per second and at once; a client above it is read slower.
        logins_per_s, login_burst: logins of one principal; above it, they are refused.
        inbound_messages, inbound_bytes: undelivered messages of one device, above which the broker
            stops reading from it.
        fleet_inbound_messages, fleet_inbound_bytes: those of all devices, with the same effect.
        partial_bytes: bytes of packets that are not complete, of all clients together; above it,
            the client whose packet is the oldest is cut.
        outbound_messages, outbound_bytes: messages that wait for a client; above it, the client is
            cut. A device acknowledges a burst of replies late, so they are many.
        stall_s: how long a client may take no byte while some wait for it.
        exchanges: messages of QoS 2 that a client has sent and not released.
        subscriptions, subscription_bytes: topic filters of a client; above it, they are refused.
        kept_sessions, kept_session_s, kept_messages, kept_bytes: sessions of clients that are away,
            how long each is kept, the messages that may wait in one before others are dropped, and
            the bytes of all that wait.
        retained_bytes: longest message that is retained; a longer one is delivered only.
        retained_messages, fleet_retained_messages, fleet_retained_bytes: retained messages of a
            client, and of all.
    """

    payload_bytes: int = PAYLOAD_BYTES
    control_bytes: int = 32_768
    connect_bytes: int = 4_096
    connect_s: float = 5.0
    connections: int = 10_000
    logins: int = 1_000
    logins_per_address: int = 500
    handshake_s: float = 1.0
    handshakes_per_turn: int = 2
    keep_alive_s: int = 300
    turn_cost: int = 32
    cost_per_s: int = 10_000
    cost_burst: int = 10_000
    logins_per_s: int = 100
    login_burst: int = 1_000
    inbound_messages: int = 16
    inbound_bytes: int = 1_000_000
    fleet_inbound_messages: int = 30_000
    fleet_inbound_bytes: int = 32_000_000
    partial_bytes: int = 64_000_000
    outbound_messages: int = 2_048
    outbound_bytes: int = 8_000_000
    stall_s: float = 8.0
    exchanges: int = 64
    subscriptions: int = 256
    subscription_bytes: int = 16_384
    kept_sessions: int = 1_000
    kept_session_s: float = 86_400.0
    kept_messages: int = 256
    kept_bytes: int = 32_000_000
    retained_bytes: int = 16_384
    retained_messages: int = 16
    fleet_retained_messages: int = 10_000
    fleet_retained_bytes: int = 32_000_000

    @property
    def packet_bytes(self) -> int:
        """The longest packet: a message with its topic."""
        return self.payload_bytes + PUBLISH_OVERHEAD_BYTES


class FlowWindow:
    """A count of messages under way; `open` while another one fits here and in the parent.

    Args:
        opened: called when another message fits again.
    """

    __slots__ = ("_left_bytes", "_left_messages", "_opened", "_parent")

    def __init__(
        self,
        messages: int,
        size_bytes: int,
        opened: Callable[[], None],
        parent: FlowWindow | None = None,
    ) -> None:
        self._left_messages = messages
        self._left_bytes = size_bytes
        self._opened = opened
        self._parent = parent

    @property
    def open(self) -> bool:
        """Whether another message fits."""
        if self._left_messages <= 0 or self._left_bytes <= 0:
            return False
        return self._parent is None or self._parent.open

    def take(self, size_bytes: int) -> None:
        """Count a message in, whether or not it fits."""
        self._left_messages -= 1
        self._left_bytes -= size_bytes
        if self._parent is not None:
            self._parent.take(size_bytes)

    def give(self, size_bytes: int) -> None:
        """Count a message out."""
        full = self._left_messages <= 0 or self._left_bytes <= 0
        self._left_messages += 1
        self._left_bytes += size_bytes
        if self._parent is not None:
            self._parent.give(size_bytes)
        if full and self.open:
            self._opened()


class Bucket:
    """A token bucket: so much at once, and so much a second.

    Args:
        rate: tokens that come back per second.
        burst: tokens of a full bucket, which it is at first.
        now: the time in seconds, as `take` gets it.
    """

    __slots__ = ("_at", "_burst", "_left", "_rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._left = burst
        self._at = now

    def take(self, cost: float, now: float) -> None:
        """Take `cost` tokens, whether or not there are so many."""
        self._left = min(self._burst, self._left + (now - self._at) * self._rate) - cost
        self._at = now

    def take_if_there(self, now: float) -> bool:
        """Take a token if there is one."""
        if self.wait_s(now):
            return False
        self.take(1, now)
        return True

    def wait_s(self, now: float) -> float:
        """Seconds until a token is there; 0 if there is one."""
        left = self._left + (now - self._at) * self._rate
        return 0.0 if left > 0 else (1.0 - left) / self._rate

    def full(self, now: float) -> bool:
        """Whether all tokens are back."""
        return self._left + (now - self._at) * self._rate >= self._burst
