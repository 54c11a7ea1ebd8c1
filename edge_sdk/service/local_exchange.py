"""HTTP/1.1 for programs of the same user, over the socket in the state folder.

It reads the part of HTTP that clients send to an API: a body has a Content-Length. The base install
has no HTTP library for servers; what comes from the network is read by h11 (network_exchange.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from edge_sdk.service.exchange import (
    BODY_S,
    HEAD_BYTES,
    HEAD_S,
    HEADERS_MAX,
    IDLE_S,
    SEND_S,
    Head,
    reason_of,
    response_headers,
    too_long,
)
from edge_sdk.service.messages import RequestError, Response
from edge_sdk.service.stream import Stream

_REQUEST: Final = re.compile(rb"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.([01])")
_HEADER: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}):([\t -~\x80-\xff]*)")
_END: Final = b"\r\n\r\n"
_ONCE: Final = ("content-length", "host", "transfer-encoding")


class LocalExchange:
    """Requests and responses of one connection."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._received = bytearray()
        self._length = 0
        self._waits = False
        self._head_only = False
        self._first = True

    def read_head(self) -> Head | None:
        """The next request's head; None if the client has left."""
        self._stream.allow(HEAD_S if self._first or self._received else IDLE_S)
        self._first = self._head_only = False
        while (end := self._received.find(_END)) < 0:
            _check_size(len(self._received))
            started = bool(self._received)
            piece = self._stream.receive()
            if not piece:
                return None
            self._received += piece
            if not started:
                self._stream.allow(HEAD_S)
        _check_size(end)
        head = read_head(bytes(self._received[:end]))
        self._head_only = head.method == "HEAD"
        del self._received[: end + len(_END)]
        self._length = _length(head)
        self._waits = head.headers.get("expect", "").lower() == "100-continue"
        return head

    def read_body(self, limit_bytes: int, grown: Callable[[int], None]) -> bytes:
        """The body of that request."""
        if self._length > limit_bytes:
            raise too_long(limit_bytes)
        grown(self._length)
        self._stream.allow(BODY_S)
        if self._waits:
            self._stream.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        while len(self._received) < self._length:
            piece = self._stream.receive()
            if not piece:
                raise ConnectionResetError
            self._received += piece
        body = bytes(self._received[: self._length])
        del self._received[: self._length]
        return body

    def respond(self, response: Response, *, keep: bool) -> None:
        """Answer that request; one of HEAD gets the headers alone."""
        lines = [f"HTTP/1.1 {response.status} {reason_of(response.status)}"]
        lines += [f"{name}: {value}" for name, value in response_headers(response, keep=keep)]
        self._stream.allow(SEND_S)
        body = b"" if self._head_only else response.body
        self._stream.send("\r\n".join([*lines, "", ""]).encode("latin-1") + body)


def read_head(raw: bytes) -> Head:
    """Read the lines before the empty one.

    Raises: RequestError for what is no head of HTTP/1.1 or 1.0.
    """
    first, *lines = raw.split(b"\r\n")
    request = _REQUEST.fullmatch(first)
    if request is None:
        raise RequestError(400, "expected a request line such as GET /v2 HTTP/1.1")
    if len(lines) > HEADERS_MAX:
        raise RequestError(431, f"the head: expected at most {HEADERS_MAX} headers, got more")
    headers: dict[str, str] = {}
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None:
            raise RequestError(400, "expected each header as NAME: VALUE on one line")
        name = header[1].decode().lower()
        if name in _ONCE and name in headers:
            raise RequestError(400, f"expected the header {name} once, got it twice")
        headers[name] = header[2].decode("latin-1").strip(" \t")
    wish = headers.get("connection", "").lower()
    keep = wish == "keep-alive" if request[3] == b"0" else wish != "close"
    return Head(request[1].decode(), request[2].partition(b"?")[0].decode(), headers, keep)


def _check_size(size_bytes: int) -> None:
    if size_bytes > HEAD_BYTES:
        raise RequestError(431, f"the head: expected at most {HEAD_BYTES} bytes, got more")


def _length(head: Head) -> int:
    if "transfer-encoding" in head.headers:
        raise RequestError(411, "expected a body with a Content-Length, got it in chunks")
    text = head.headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise RequestError(400, "Content-Length: expected a number of bytes")
    return int(text)
