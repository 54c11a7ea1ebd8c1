"""A bare MQTT 3.1.1 client without threads: a socket, its TLS, and the packets of a device.

2,000 of them fit into one process, which 2,000 clients of paho, a thread each, do not.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

CHUNK_BYTES: Final = 65_536
KEEP_ALIVE_S: Final = 300  # longer than a measurement, so that nobody pings
PORT_IDS: Final = 65_535
CONNACK, PUBLISH, PUBACK, SUBACK = 2, 3, 4, 9


class State(Enum):
    """State of a connection."""

    DOWN = 0
    CONNECTING = 1
    HANDSHAKE = 2
    LOGIN = 3
    SUBSCRIBING = 4
    UP = 5


@dataclass(frozen=True, slots=True)
class Login:
    """A client's name, password and subscriptions."""

    client_id: str
    username: str
    password: str
    filters: Sequence[str]


class Client:
    """One connection; its owner calls `start`, and `ready` whenever the selector says so.

    Attributes:
        state: changes are told to `changed`.
        due: when the queries under way were due, oldest first.
        failures: attempts since it was last up.
    """

    __slots__ = (
        "_changed",
        "_inbox",
        "_login",
        "_outbox",
        "_packet_id",
        "_received",
        "_selector",
        "_sock",
        "_tls",
        "due",
        "failures",
        "state",
    )

    def __init__(
        self,
        login: Login,
        selector: selectors.BaseSelector,
        tls: ssl.SSLContext | None,
        *,
        received: Callable[[Client, bytes, bytes], None],
        changed: Callable[[Client], None],
    ) -> None:
        self.state = State.DOWN
        self.due: deque[float] = deque()
        self.failures = 0
        self._login = login
        self._selector = selector
        self._tls = tls
        self._received = received
        self._changed = changed
        self._sock: socket.socket | None = None
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._packet_id = 0

    def start(self, port: int) -> None:
        """Begin to connect to a port of loopback."""
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.connect_ex(("127.0.0.1", port))
        self._sock = sock
        self._selector.register(sock, selectors.EVENT_WRITE, self)
        self._become(State.CONNECTING)

    def ready(self) -> None:
        """Do what can be done without waiting."""
        try:
            if self.state is State.CONNECTING:
                self._connected()
            elif self.state is State.HANDSHAKE:
                self._shake()
            else:
                self._flush()
                self._read()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            pass
        except OSError:
            self.drop()

    def publish(self, topic: str, payload: bytes, qos: int = 1) -> None:
        """Publish with QoS 0 or 1."""
        if qos == 0:
            self._send(0x30, text(topic) + payload)
            return
        self._packet_id = self._packet_id % PORT_IDS + 1
        self._send(0x32, text(topic) + self._packet_id.to_bytes(2, "big") + payload)

    def drop(self) -> None:
        """Close the connection."""
        if self._sock is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._sock)
            self._sock.close()
            self._sock = None
        self._inbox.clear()
        self._outbox.clear()
        self.due.clear()
        self.failures += 1
        self._become(State.DOWN)

    def _become(self, state: State) -> None:
        self.state = state
        self._changed(self)

    def _connected(self) -> None:
        assert self._sock is not None
        error = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, "connect")
        if self._tls is None:
            self._log_in()
            return
        plain = self._sock
        self._selector.unregister(plain)
        self._sock = self._tls.wrap_socket(
            plain, server_hostname="127.0.0.1", do_handshake_on_connect=False
        )
        self._selector.register(self._sock, selectors.EVENT_READ, self)
        self._become(State.HANDSHAKE)
        self._shake()

    def _shake(self) -> None:
        assert isinstance(self._sock, ssl.SSLSocket)
        self._sock.do_handshake()
        self._log_in()

    def _log_in(self) -> None:
        login = self._login
        body = b"\x00\x04MQTT\x04\xc2" + KEEP_ALIVE_S.to_bytes(2, "big")
        body += text(login.client_id) + text(login.username) + text(login.password)
        self._become(State.LOGIN)
        self._send(0x10, body)

    def _send(self, first: int, body: bytes) -> None:
        self._outbox += bytes((first,)) + _length(len(body)) + body
        with contextlib.suppress(BlockingIOError, ssl.SSLWantWriteError):
            self._flush()

    def _flush(self) -> None:
        if self._sock is None:
            return
        while self._outbox:
            try:
                sent = self._sock.send(self._outbox)
            except (BlockingIOError, ssl.SSLWantWriteError):
                self._watch(selectors.EVENT_READ | selectors.EVENT_WRITE)
                raise
            del self._outbox[:sent]
        self._watch(selectors.EVENT_READ)

    def _watch(self, events: int) -> None:
        assert self._sock is not None
        if self._selector.get_key(self._sock).events != events:
            self._selector.modify(self._sock, events, self)

    def _read(self) -> None:
        while self._sock is not None:
            part = self._sock.recv(CHUNK_BYTES)
            if not part:
                self.drop()
                return
            self._inbox += part
            while (packet := _take(self._inbox)) is not None:
                self._handle(*packet)

    def _handle(self, first: int, body: bytes) -> None:
        kind = first >> 4
        if kind == PUBLISH:
            end = 2 + int.from_bytes(body[:2], "big")
            if first & 0x06:
                self._send(0x40, body[end : end + 2])
            self._received(self, body[2:end], body[end + (2 if first & 0x06 else 0) :])
        elif kind == CONNACK:
            if body[1]:
                raise OSError(f"refused with {body[1]}")
            filters = b"".join(text(name) + b"\x01" for name in self._login.filters)
            self._become(State.SUBSCRIBING)
            self._send(0x82, b"\x00\x01" + filters)
        elif kind == SUBACK:
            self.failures = 0
            self._become(State.UP)


def text(value: str) -> bytes:
    """A string as MQTT writes it."""
    raw = value.encode()
    return len(raw).to_bytes(2, "big") + raw


def _length(size: int) -> bytes:
    digits = bytearray()
    while size >= 128:
        digits.append(size & 127 | 128)
        size >>= 7
    digits.append(size)
    return bytes(digits)


def _take(inbox: bytearray) -> tuple[int, bytes] | None:
    """The next packet: its first byte and its body; None while it is not whole."""
    size = shift = 0
    for at in range(1, min(len(inbox), 5)):
        size |= (inbox[at] & 127) << shift
        shift += 7
        if inbox[at] < 128:
            end = at + 1 + size
            if len(inbox) < end:
                return None
            first, body = inbox[0], bytes(inbox[at + 1 : end])
            del inbox[:end]
            return first, body
    return None
