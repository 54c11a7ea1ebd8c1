"""HTTP/1.1 from the network, read and written by h11. The only importer of h11 (extra `serve`)."""

from __future__ import annotations

from collections.abc import Callable

import h11

from edge_sdk.service.exchange import (
    BODY_S,
    HEAD_BYTES,
    HEAD_S,
    IDLE_S,
    SEND_S,
    Head,
    reason_of,
    response_headers,
    too_long,
)
from edge_sdk.service.messages import RequestError, Response
from edge_sdk.service.stream import Stream


class NetworkExchange:
    """Requests and responses of one connection."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        self._first = True
        self._declared = 0
        self._head_only = False

    def read_head(self) -> Head | None:
        """The next request's head; None if the client has left."""
        if not self._first:
            if self._http.our_state is not h11.DONE:  # the request had ended HTTP, by its headers
                return None
            self._http.start_next_cycle()
        self._stream.allow(HEAD_S if self._first else IDLE_S)
        self._first = self._head_only = False
        waiting = True
        while (event := self._next()) is h11.NEED_DATA:
            self._receive()
            if waiting:  # the first bytes are there: now the head has its own limit
                self._stream.allow(HEAD_S)
                waiting = False
        if not isinstance(event, h11.Request):
            return None
        headers: dict[str, str] = {}
        for name, value in event.headers:
            text = value.decode("latin-1")
            key = name.decode()
            headers[key] = f"{headers[key]}, {text}" if key in headers else text
        self._head_only = event.method == b"HEAD"
        self._declared = int(headers.get("content-length", "0"))  # h11 takes nothing but digits
        path = event.target.decode("latin-1").partition("?")[0]
        keep = event.http_version == b"1.1" and headers.get("connection", "").lower() != "close"
        return Head(event.method.decode(), path, headers, keep)

    def read_body(self, limit_bytes: int, grown: Callable[[int], None]) -> bytes:
        """The body of that request."""
        if self._declared > limit_bytes:
            raise too_long(limit_bytes)
        self._stream.allow(BODY_S)
        if self._http.they_are_waiting_for_100_continue:
            ready = h11.InformationalResponse(status_code=100, headers=[])
            self._stream.send(self._http.send(ready) or b"")
        chunks: list[bytes] = []
        size = 0
        while not isinstance(event := self._next(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                size += len(event.data)
                if size > limit_bytes:
                    raise too_long(limit_bytes)
                grown(len(event.data))
                chunks.append(bytes(event.data))
            elif event is h11.NEED_DATA:
                self._receive()
            else:
                raise ConnectionResetError
        return b"".join(chunks)

    def respond(self, response: Response, *, keep: bool) -> None:
        """Answer that request; one of HEAD gets the headers alone."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            raise ConnectionResetError
        start = h11.Response(
            status_code=response.status,
            headers=response_headers(response, keep=keep),
            reason=reason_of(response.status),
        )
        body = () if self._head_only else (h11.Data(data=response.body),)
        events = (start, *body, h11.EndOfMessage())
        self._stream.allow(SEND_S)
        self._stream.send(b"".join(self._http.send(event) or b"" for event in events))

    def _next(self) -> type[h11.NEED_DATA | h11.PAUSED] | h11.Event:
        try:
            return self._http.next_event()
        except h11.RemoteProtocolError as err:
            raise RequestError(err.error_status_hint, f"expected HTTP/1.1 ({err})") from err

    def _receive(self) -> None:
        self._http.receive_data(self._stream.receive())
