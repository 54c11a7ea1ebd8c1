"""MQTT 3.1.1 packets of a client, checked as bytes before the broker reads them. Pure: no I/O.

Section numbers are those of the OASIS standard "MQTT Version 3.1.1".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from edge_sdk.errors import FrameError

LEVEL: Final = 4  # protocol level of MQTT 3.1.1
PUBLISH_OVERHEAD_BYTES: Final = 300  # topic, its length, packet id; ours are at most 153


class PacketType(IntEnum):
    """Types of the packets that a client sends (2.2.1)."""

    CONNECT = 1
    PUBLISH = 3
    PUBACK = 4
    SUBSCRIBE = 8
    UNSUBSCRIBE = 10
    PINGREQ = 12
    DISCONNECT = 14


class ReturnCode(IntEnum):
    """Return codes of a CONNACK that refuses (3.2.2.3)."""

    WRONG_LEVEL = 1
    NOT_AUTHORISED = 5


# Flags each packet must carry (2.2.2); PUBLISH has its own.
_FLAGS: Final = {
    PacketType.CONNECT: 0,
    PacketType.PUBACK: 0,
    PacketType.SUBSCRIBE: 2,
    PacketType.UNSUBSCRIBE: 2,
    PacketType.PINGREQ: 0,
    PacketType.DISCONNECT: 0,
}
_LENGTHS: Final = {PacketType.PUBACK: 2, PacketType.PINGREQ: 0, PacketType.DISCONNECT: 0}


@dataclass(frozen=True, slots=True)
class Will:
    """The message that the broker publishes when the connection breaks."""

    topic: str
    payload: bytes
    qos: int
    retain: bool


@dataclass(frozen=True, slots=True)
class Connect:
    """A CONNECT packet (3.1). `keep_alive_s` 0 means none; a missing user or password is empty."""

    client_id: str
    username: str
    password: bytes
    keep_alive_s: int
    will: Will | None = None


def decode_length(encoded: bytes) -> int | None:
    """The remaining length (2.2.3), or None while more bytes must follow.

    Raises: FrameError if four bytes do not end it.
    """
    if encoded[-1] & 0x80:
        if len(encoded) == 4:
            raise FrameError("packet: its length does not end within 4 bytes")
        return None
    return sum((byte & 0x7F) << (7 * place) for place, byte in enumerate(encoded))


def encode_length(length: int) -> bytes:
    """The remaining length of a packet (2.2.3)."""
    encoded = bytearray()
    while True:
        length, digit = divmod(length, 128)
        encoded.append(digit | (0x80 if length else 0))
        if not length:
            return bytes(encoded)


def connack(code: ReturnCode) -> bytes:
    """A CONNACK that refuses the login."""
    return bytes((0x20, 2, 0, code))


def connect_level(body: bytes) -> int:
    """The protocol level of a CONNECT's body: 4 for MQTT 3.1.1, 5 for MQTT 5.

    Raises: FrameError if the body is no CONNECT of any MQTT version.
    """
    fields = _Fields(body)
    if fields.text("protocol name") not in ("MQTT", "MQIsdp"):
        raise FrameError("CONNECT: unknown protocol name")
    return fields.byte("protocol level")


def parse_connect(body: bytes) -> Connect:
    """Read the body of a CONNECT at level 4.

    Raises: FrameError for anything that 3.1 forbids.
    """
    fields = _Fields(body)
    fields.text("protocol name")
    fields.byte("protocol level")
    flags = fields.byte("flags")
    if flags & 0x01 or flags & 0xC0 == 0x40:
        raise FrameError("CONNECT: the reserved flag is set, or a password has no user name")
    keep_alive_s = fields.number("keep alive")
    client_id = fields.text("client id")
    will = _will(flags, fields)
    username = fields.text("user name") if flags & 0x80 else ""
    password = fields.binary("password") if flags & 0x40 else b""
    fields.end("CONNECT")
    return Connect(client_id, username, password, keep_alive_s, will)


def encode_connect(connect: Connect) -> bytes:
    """The CONNECT that the broker behind the acceptor reads.

    The session is always a clean session. The password is left out, because it has been checked,
    and so is the keep-alive, because the acceptor watches it.
    """
    flags = 0x02 | 0x80
    will = b""
    if connect.will is not None:
        flags |= 0x04 | connect.will.qos << 3 | (0x20 if connect.will.retain else 0)
        will = _prefixed(connect.will.topic.encode()) + _prefixed(connect.will.payload)
    body = b"".join(
        (
            _prefixed(b"MQTT"),
            bytes((LEVEL, flags, 0, 0)),
            _prefixed(connect.client_id.encode()),
            will,
            _prefixed(connect.username.encode()),
        )
    )
    return bytes((PacketType.CONNECT << 4,)) + encode_length(len(body)) + body


def check_packet(first: int, body: bytes) -> PacketType:
    """The type of a packet that a client may send after login.

    Args:
        first: the packet's first byte: type and flags.
        body: all bytes after the length.
    Raises: FrameError for anything malformed, a second CONNECT, QoS 2 (which no part of splitedge
        uses, and with which a client can pile up state), or a topic that no client may name.
    """
    try:
        kind = PacketType(first >> 4)
    except ValueError:
        raise FrameError(f"packet: type {first >> 4} is not one that a client sends") from None
    flags = first & 0x0F
    if kind is PacketType.CONNECT:
        raise FrameError("packet: a second CONNECT")
    if kind is PacketType.PUBLISH:
        _check_publish(flags, body)
        return kind
    if flags != _FLAGS[kind]:
        raise FrameError(f"{kind.name}: expected flags {_FLAGS[kind]}, got {flags}")
    if kind in _LENGTHS and len(body) != _LENGTHS[kind]:
        raise FrameError(f"{kind.name}: expected {_LENGTHS[kind]} bytes, got {len(body)}")
    if kind in (PacketType.SUBSCRIBE, PacketType.UNSUBSCRIBE):
        _check_filters(kind, body)
    return kind


class _Fields:
    """Reads the fields of a packet's body in order."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def byte(self, what: str) -> int:
        return self._take(1, what)[0]

    def number(self, what: str) -> int:
        return int.from_bytes(self._take(2, what), "big")

    def binary(self, what: str) -> bytes:
        return self._take(self.number(what), what)

    def text(self, what: str) -> str:
        try:
            text = self.binary(what).decode()
        except UnicodeDecodeError as err:
            raise FrameError(f"packet: {what} is not UTF-8") from err
        if "\0" in text:
            raise FrameError(f"packet: {what} holds a NUL")
        return text

    @property
    def left(self) -> int:
        return len(self._body) - self._at

    def end(self, what: str) -> None:
        if self.left:
            raise FrameError(f"{what}: {self.left} bytes after its last field")

    def _take(self, count: int, what: str) -> bytes:
        if count > self.left:
            raise FrameError(f"packet: {what} needs {count} bytes, {self.left} are left")
        self._at += count
        return self._body[self._at - count : self._at]


def _will(flags: int, fields: _Fields) -> Will | None:
    qos = flags >> 3 & 0x03
    retain = bool(flags & 0x20)
    if not flags & 0x04:
        if qos or retain:
            raise FrameError("CONNECT: the flags of a will without a will")
        return None
    if qos > 1:
        raise FrameError(f"CONNECT: expected a will of QoS 0 or 1, got {qos}")
    return Will(_topic(fields), fields.binary("will"), qos, retain)


def _check_publish(flags: int, body: bytes) -> None:
    qos, duplicate = flags >> 1 & 0x03, flags & 0x08
    if qos > 1:
        raise FrameError(f"PUBLISH: expected QoS 0 or 1, got {qos}")
    if duplicate and not qos:
        raise FrameError("PUBLISH: a duplicate at QoS 0")
    fields = _Fields(body)
    _topic(fields)
    if qos and not fields.number("packet id"):
        raise FrameError("PUBLISH: packet id 0")


def _topic(fields: _Fields) -> str:
    topic = fields.text("topic")
    if not topic or topic.startswith("$") or "+" in topic or "#" in topic:
        raise FrameError(f"packet: {topic[:200]!r} is not a topic that a client may publish to")
    return topic


def _check_filters(kind: PacketType, body: bytes) -> None:
    fields = _Fields(body)
    if not fields.number("packet id"):
        raise FrameError(f"{kind.name}: packet id 0")
    if not fields.left:
        raise FrameError(f"{kind.name}: no topic filter")
    while fields.left:
        if not fields.text("topic filter"):
            raise FrameError(f"{kind.name}: an empty topic filter")
        if kind is PacketType.SUBSCRIBE and fields.byte("QoS") > 2:
            raise FrameError("SUBSCRIBE: QoS above 2")


def _prefixed(value: bytes) -> bytes:
    return len(value).to_bytes(2, "big") + value
