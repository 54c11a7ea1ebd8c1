"""MQTT 3.1.1 packets: a client's are read and checked, the broker's are written. Pure: no I/O.

Section numbers are those of the OASIS standard "MQTT Version 3.1.1".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Final, NamedTuple

from edge_sdk.errors import FrameError, shown

LEVEL: Final = 4  # protocol level of MQTT 3.1.1
PUBLISH_OVERHEAD_BYTES: Final = 300  # topic, its length, packet id; ours are at most 153
LEVELS: Final = 128  # of a topic or a topic filter; the standard has no limit
REFUSED: Final = 0x80  # return code of a refused topic filter (3.9.3)
PINGRESP: Final = b"\xd0\x00"
_REMEMBERED_BYTES: Final = 160  # a topic of ours has at most 148
_REMEMBERED: Final = 4_096  # topics, and lengths


class PacketType(IntEnum):
    """Types of the packets that a client sends (2.2.1)."""

    CONNECT = 1
    PUBLISH = 3
    PUBACK = 4
    PUBREC = 5
    PUBREL = 6
    PUBCOMP = 7
    SUBSCRIBE = 8
    UNSUBSCRIBE = 10
    PINGREQ = 12
    DISCONNECT = 14


class ReturnCode(IntEnum):
    """Return codes of a CONNACK (3.2.2.3)."""

    ACCEPTED = 0
    WRONG_LEVEL = 1
    CLIENT_ID_REFUSED = 2
    UNAVAILABLE = 3
    NOT_AUTHORISED = 5


# Flags each packet must carry (2.2.2); PUBLISH has its own, which are checked with its body.
_FLAGS: Final = {
    PacketType.CONNECT: 0,
    PacketType.PUBACK: 0,
    PacketType.PUBREC: 0,
    PacketType.PUBREL: 2,
    PacketType.PUBCOMP: 0,
    PacketType.SUBSCRIBE: 2,
    PacketType.UNSUBSCRIBE: 2,
    PacketType.PINGREQ: 0,
    PacketType.DISCONNECT: 0,
}
_LENGTHS: Final = {
    PacketType.PUBACK: 2,
    PacketType.PUBREC: 2,
    PacketType.PUBREL: 2,
    PacketType.PUBCOMP: 2,
    PacketType.PINGREQ: 0,
    PacketType.DISCONNECT: 0,
}
# Type and length of a packet by its first byte; the length is -1 where it varies. The key is no
# PacketType, whose hash is a function of Python.
_BY_FIRST: Final = {
    kind << 4 | flags: (kind, _LENGTHS.get(kind, -1)) for kind, flags in _FLAGS.items()
} | {0x30 | flags: (PacketType.PUBLISH, -1) for flags in range(16)}


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
    clean_session: bool = True


class Publish(NamedTuple):
    """A PUBLISH packet of a client (3.3). `packet_id` is 0 at QoS 0."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    packet_id: int


# The fixed header of a packet: its type, its flags, its own length, the length after it.
Header = tuple[PacketType, int, int, int]


def parse_header(buffer: bytes | bytearray, at: int) -> Header | None:
    """The header that begins at `at`, or None while more bytes must follow (2.2).

    Raises: FrameError for a type or flags that no client sends, a length that does not end, or one
        that this type cannot have.
    """
    have = len(buffer) - at
    if not have:
        return None
    first = buffer[at]
    known = _BY_FIRST.get(first)
    if known is None:
        raise _unknown(first)
    kind, expected = known
    length = shift = 0
    for size in range(2, 6):
        if have < size:
            return None
        digit = buffer[at + size - 1]
        length |= (digit & 0x7F) << shift
        if digit < 0x80:
            break
        shift += 7
    else:
        raise FrameError("packet: its length does not end within 4 bytes")
    if length != expected >= 0:
        raise FrameError(f"{kind.name}: expected {expected} bytes, got {length}")
    return kind, first & 0x0F, size, length


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
    return Connect(client_id, username, password, keep_alive_s, will, bool(flags & 0x02))


def parse_publish(flags: int, body: bytes) -> Publish:
    """Read the body of a PUBLISH; `flags` are those of its header.

    Raises: FrameError for anything that 3.3 forbids.
    """
    qos = flags >> 1 & 0x03
    if qos > 2:
        raise FrameError("PUBLISH: expected QoS 0 to 2, got 3")
    if flags & 0x08 and not qos:
        raise FrameError("PUBLISH: a duplicate at QoS 0")
    have = len(body)
    end = 2 + (body[0] << 8 | body[1]) if have > 1 else 2
    if have < end or end < 3:
        raise FrameError(f"PUBLISH: a topic of {end - 2} bytes in a body of {have}")
    encoded = body[2:end]
    topic = _topic_again(encoded) if len(encoded) <= _REMEMBERED_BYTES else _topic(encoded)
    if not qos:
        return Publish(topic, body[end:], 0, bool(flags & 1), 0)
    packet_id = body[end] << 8 | body[end + 1] if have > end + 1 else 0
    if not packet_id:
        raise FrameError("PUBLISH: packet id 0, or none")
    return Publish(topic, body[end + 2 :], qos, bool(flags & 1), packet_id)


def parse_packet_id(kind: PacketType, body: bytes) -> int:
    """The packet id that is the whole body of an acknowledgement.

    Raises: FrameError for 0.
    """
    packet_id = body[0] << 8 | body[1]
    if not packet_id:
        raise FrameError(f"{kind.name}: packet id 0")
    return packet_id


def parse_subscribe(body: bytes) -> tuple[int, list[tuple[str, int]]]:
    """The packet id of a SUBSCRIBE, and its topic filters with the QoS of each (3.8).

    Raises: FrameError.
    """
    fields = _Fields(body)
    packet_id, asked = _packet_id(PacketType.SUBSCRIBE, fields), []
    while fields.left:
        topic_filter = _filter(fields)
        qos = fields.byte("QoS")
        if qos > 2:
            raise FrameError(f"SUBSCRIBE: expected QoS 0 to 2, got {qos}")
        asked.append((topic_filter, qos))
    return packet_id, asked


def parse_unsubscribe(body: bytes) -> tuple[int, list[str]]:
    """The packet id of an UNSUBSCRIBE, and its topic filters (3.10).

    Raises: FrameError.
    """
    fields = _Fields(body)
    packet_id, asked = _packet_id(PacketType.UNSUBSCRIBE, fields), []
    while fields.left:
        asked.append(_filter(fields))
    return packet_id, asked


def connack(code: ReturnCode, *, present: bool = False) -> bytes:
    """A CONNACK; `present` says that a kept session goes on (3.2)."""
    return bytes((0x20, 2, present, code))


def puback(packet_id: int) -> bytes:
    """A PUBACK (3.4)."""
    return b"\x40\x02" + packet_id.to_bytes(2, "big")


def acknowledgement(kind: PacketType, packet_id: int) -> bytes:
    """A PUBACK, PUBREC, PUBREL or PUBCOMP."""
    return bytes((kind << 4 | _FLAGS[kind], 2)) + packet_id.to_bytes(2, "big")


def suback(packet_id: int, codes: Iterable[int]) -> bytes:
    """A SUBACK with the granted QoS of each filter, or `REFUSED` (3.9)."""
    body = packet_id.to_bytes(2, "big") + bytes(codes)
    return b"\x90" + encode_length(len(body)) + body


def unsuback(packet_id: int) -> bytes:
    """An UNSUBACK (3.11)."""
    return b"\xb0\x02" + packet_id.to_bytes(2, "big")


def publish_head(
    topic: bytes, size_bytes: int, qos: int, packet_id: int, *, retain: bool, duplicate: bool
) -> bytes:
    """All of a PUBLISH before its payload of `size_bytes` (3.3)."""
    first = 0x30 | duplicate << 3 | qos << 1 | retain
    number = packet_id.to_bytes(2, "big") if qos else b""
    size = len(topic)
    length = encode_length(2 + size + len(number) + size_bytes)
    return b"%c%b%c%c%b%b" % (first, length, size >> 8, size & 0xFF, topic, number)


@lru_cache(maxsize=_REMEMBERED)
def encode_length(length: int) -> bytes:
    """The remaining length of a packet (2.2.3)."""
    if length < 0x80:
        return bytes((length,))
    encoded = bytearray()
    while True:
        length, digit = divmod(length, 128)
        encoded.append(digit | (0x80 if length else 0))
        if not length:
            return bytes(encoded)


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
        return _decoded(self.binary(what), what)

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


def _unknown(first: int) -> FrameError:
    try:
        kind = PacketType(first >> 4)
    except ValueError:
        return FrameError(f"packet: type {first >> 4} is not one that a client sends")
    return FrameError(f"{kind.name}: expected flags {_FLAGS[kind]}, got {first & 0x0F}")


def _will(flags: int, fields: _Fields) -> Will | None:
    qos = flags >> 3 & 0x03
    retain = bool(flags & 0x20)
    if not flags & 0x04:
        if qos or retain:
            raise FrameError("CONNECT: the flags of a will without a will")
        return None
    if qos > 2:
        raise FrameError("CONNECT: expected a will of QoS 0 to 2, got 3")
    return Will(_topic(fields.binary("topic of the will")), fields.binary("will"), qos, retain)


def _decoded(encoded: bytes, what: str) -> str:
    try:
        text = encoded.decode()
    except UnicodeDecodeError as err:
        raise FrameError(f"packet: {what} is not UTF-8") from err
    if "\0" in text:
        raise FrameError(f"packet: {what} holds a NUL")
    return text


def _topic(encoded: bytes) -> str:
    topic = _decoded(encoded, "topic")
    if not topic or "+" in topic or "#" in topic or topic.count("/") >= LEVELS:
        raise FrameError(f"packet: {shown(topic)} is not a topic that a client may publish to")
    return topic


_topic_again: Final = lru_cache(maxsize=_REMEMBERED)(_topic)  # a client says the same ones again


def _packet_id(kind: PacketType, fields: _Fields) -> int:
    packet_id = fields.number("packet id")
    if not packet_id:
        raise FrameError(f"{kind.name}: packet id 0")
    if not fields.left:
        raise FrameError(f"{kind.name}: no topic filter")
    return packet_id


def _filter(fields: _Fields) -> str:
    """A topic filter whose wildcards stand where they may (4.7.1)."""
    topic_filter = fields.text("topic filter")
    if "+" not in topic_filter and "#" not in topic_filter:
        valid = bool(topic_filter)
    else:
        levels = topic_filter.split("/")
        valid = "#" not in "".join(levels[:-1]) and all(
            level in ("+", "#") or not ("+" in level or "#" in level) for level in levels
        )
    if not valid or topic_filter.count("/") >= LEVELS:
        raise FrameError(f"packet: {shown(topic_filter)} is not a topic filter")
    return topic_filter
