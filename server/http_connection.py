"""One HTTP connection: uvicorn's, with limits of its waits and with a place among the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from server.listening.direct_request import Answer, DirectRequest, DirectRequests
from server.listening.guarded import GuardedProtocol
from server.listening.places import Place, Places
from server.listening.proof import PROVE

# in seconds: for a whole head; for the next request of a connection
HEAD_S: Final = 8  # silent sockets are to be gone within 10 s, and a tick takes one
IDLE_S: Final = 5
# in seconds: for a body, longer by one for each BODY_BYTES that have come, up to BODY_MOST_S: at
# that rate alone, 64 MB could hold their place for 18 hours; so they need 0.3 Mbit/s
BODY_S: Final = 10
BODY_BYTES: Final = 1_000
BODY_MOST_S: Final = 1_800
# in seconds: for the peer to read at least SEND_BYTES of a response that waits for it
SEND_S: Final = 60
SEND_BYTES: Final = 1_000


# A head, the frame of a chunk, and what follows the last chunk are at most so long, in bytes. The
# parser itself, httptools, has no such limit, and keeps what is not whole yet.
HEAD_BYTES: Final = 65_536
# Requests that may wait behind the one that is being answered. Hardly any client sends ahead at
# all, and one read of 64 KiB holds a thousand short requests, from a peer without a login.
PIPELINED_MOST: Final = 16


class HttpConnection(HttpToolsProtocol, GuardedProtocol):
    """HTTP/1.1 of one client.

    Args:
        config, server_state, app_state: uvicorn's.
        places, place: where the connection counts, and as what.
        direct: knows the requests that are answered without a task of the application.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        places: Places,
        place: Place,
        direct: DirectRequests | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, PROVE: self._logged_in})
        self._places = places
        self._place = place
        self._direct = direct
        # answered now, or the last one answered
        self._running: RequestResponseCycle | _DirectCycle | None = None
        # the request of the counts below
        self._counted: RequestResponseCycle | _DirectCycle | None = None
        self._received = 0
        self._waited = 0
        self._blocked = 0
        self._unread_bytes = 0
        self._read_on = False
        self._head_bytes = 0  # of the fields of this request, trailers too
        self._unparsed = 0  # bytes since the last ones that were a whole head, or of a body
        self._in_head = False
        self._may_answer = False  # here, a request of this read

    def tick(self) -> None:
        """Cut the connection off if its peer is overdue."""
        must_read, has_read = self._peer_must_read(), self._peer_has_read()
        self._blocked = self._blocked + 1 if must_read and not has_read else 0
        self._waited += self._waits_for_peer() and not (must_read and self._at_head())
        limit = HEAD_S
        if not self._at_head():
            limit = min(BODY_S + self._received // BODY_BYTES, BODY_MOST_S)
        if self._waited > limit or self._blocked > SEND_S:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read on."""
        self._places.busy(self._place)
        self._received += len(data)
        self._unparsed += len(data)
        self._may_answer = True
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._parse(data)
        except httptools.HttpParserError:
            self._refuse("Invalid HTTP request received.")
            return
        if self._unparsed > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(f"expected a head of at most {HEAD_BYTES} bytes")
        if self.cycle is not self._counted:  # a head is whole: now its body has a limit of its own
            self._counted = self.cycle
            self._received = self._waited = 0

    def on_message_begin(self) -> None:
        """Begin a request; what uvicorn makes of one waits until its head says whose it is."""
        self._places.busy(self._place)
        self._head_bytes = 0
        self._in_head = True
        self.url = b""
        self.headers = []
        self.expect_100_continue = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field of the head; those behind a body are counted, and dropped.

        Raises: ValueError, which the parser answers with 400, as in `on_headers_complete`.
        """
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > HEAD_BYTES:
            raise ValueError(f"expected a head of at most {HEAD_BYTES} bytes")
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request.

        Raises: ValueError for a head without its one `Host`, which the standard refuses, and for
            more requests ahead than may wait.
        """
        self._in_head = False
        self._unparsed = 0
        if self.parser.should_upgrade():
            return
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            raise ValueError(f"Host: expected it once, got it {hosts} times")
        if len(self.pipeline) >= PIPELINED_MOST:
            raise ValueError(f"expected at most {PIPELINED_MOST} requests to wait for an answer")
        if self.cycle is not None and self.transport.is_closing():
            return  # it is behind the last one that is answered
        request = self._admitted()
        if request is None:
            self._begin_for_application()
        else:
            last = self.parser.get_http_version() == "1.0" or not self.parser.should_keep_alive()
            cycle = _DirectCycle(self, request, keep_alive=not last)
            self.cycle = cycle  # type: ignore[assignment]  # it has all that uvicorn asks it for
            self._running = cycle

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        self._unparsed = 0
        if self.parser.should_upgrade():
            return
        if self.cycle.response_complete:  # it was refused before its body had come
            self.cycle.more_body = False
            self._received = self._waited = 0
            self._places.idle(self._place)
        super().on_message_complete()
        running = self._running
        if running is self.cycle and isinstance(running, _DirectCycle):
            running.serve()

    def on_response_complete(self) -> None:
        """Wait for the next request, if it has not come already."""
        self._places.prove(self._place)
        self._received = self._waited = 0
        answered = self._running
        super().on_response_complete()
        if self._running is answered:
            self._places.idle(self._place)

    def resume_writing(self) -> None:
        """Send on: the peer has read."""
        self._read_on = True
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """End, and tell the request that is being answered; uvicorn tells the newest one alone."""
        self.pipeline.clear()
        running = self._unanswered()
        if running is not None:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)
        self.on_lost()

    def _parse(self, data: bytes) -> bytes:
        """Parse bytes of the peer.

        The parser stops at the offer of another protocol, and takes no body for what follows. No
        offer is taken up, so that head is parsed again without it.

        Returns: bytes that are to be parsed next.
        Raises: HttpParserError.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            if method == b"CONNECT":
                raise httptools.HttpParserError("CONNECT") from offer
            lines = [b"%b %b HTTP/%b" % (method, self.url, version), *_without_offer(self.headers)]
            self.parser = self._new_parser()
            return b"\r\n".join([*lines, b"", b""]) + data[offer.args[0] :]
        return b""

    def _new_parser(self) -> httptools.HttpRequestParser:
        """A parser with the settings of the one that uvicorn makes."""
        parser = httptools.HttpRequestParser(self)
        with contextlib.suppress(AttributeError):  # httptools before 0.6.3
            parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _admitted(self) -> DirectRequest | None:
        """The request whose head has come, if it is answered here."""
        if self._direct is None or self.flow.write_paused or not self._may_answer:
            return None
        self._may_answer = False  # one read may hold a thousand: the others wait for their turns
        if self.cycle is not None and not self.cycle.response_complete:
            return None  # it waits for the answer before its own
        return self._direct.admit(self.parser.get_method(), self.url, self.headers, self.client)

    def _begin_for_application(self) -> None:
        """Let uvicorn make what it makes of a request, and start it or let it wait."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers  # the scope has this very list
        super().on_headers_complete()

    def send_answer(self, cycle: _DirectCycle, answer: Answer) -> None:
        """Send an answer, as uvicorn sends those of the application."""
        if cycle.disconnected:
            return
        lines = [STATUS_LINE[answer.status]]
        for name, value in (*self.server_state.default_headers, *answer.fields):
            lines += (name, b": ", value, b"\r\n")
        if not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        lines += (b"\r\n", answer.body)
        self.transport.write(b"".join(lines))
        cycle.response_complete = True
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _refuse(self, why: str) -> None:
        """End the connection with status 400.

        Where requests wait for an answer, there is none: the peer would take it for theirs.
        """
        self.logger.warning(why)
        if self.pipeline or self._unanswered() is not None:
            self.transport.close()
        else:
            self.send_400_response(why)

    def _unanswered(self) -> RequestResponseCycle | _DirectCycle | None:
        """The request that is being answered, if there is one."""
        running = self._running
        return None if running is None or running.response_complete else running

    def _at_head(self) -> bool:
        """Whether no request is being read or answered."""
        return self.cycle is None or (self.cycle.response_complete and not self.cycle.more_body)

    def _waits_for_peer(self) -> bool:
        """Whether it is the peer's turn to send."""
        if self._at_head():
            return True
        return (
            self.cycle.more_body
            and not self.flow.read_paused
            and not self.cycle.waiting_for_100_continue
        )

    def _peer_must_read(self) -> bool:
        """Whether what we send waits for the peer; the application may have written it all."""
        return self.transport.get_write_buffer_size() > 0 or self.transport.is_closing()

    def _peer_has_read(self) -> bool:
        """Whether the peer has read since the last call.

        More may have been written meanwhile, so what waits alone does not tell.
        """
        before, self._unread_bytes = self._unread_bytes, self.transport.get_write_buffer_size()
        read_on, self._read_on = self._read_on, False
        return read_on or before - self._unread_bytes >= SEND_BYTES

    def _logged_in(self) -> None:
        self.loop.call_soon_threadsafe(self._places.prove, self._place)


class _Nobody:
    """In place of the event that a task of the application would wait for."""

    def set(self) -> None:
        """Tell nobody."""


class _DirectCycle:
    """A request that is answered here; with what uvicorn looks at of its own ones.

    Attributes:
        keep_alive: whether another request may follow.
        body: what has come of it. more_body: whether more comes.
        response_complete, disconnected: whether it is answered, and whether its peer has gone.
    """

    __slots__ = (
        "_connection",
        "_request",
        "body",
        "disconnected",
        "keep_alive",
        "more_body",
        "response_complete",
    )
    message_event: Final = _Nobody()
    waiting_for_100_continue: Final = False

    def __init__(
        self, connection: HttpConnection, request: DirectRequest, *, keep_alive: bool
    ) -> None:
        self._connection = connection
        self._request: DirectRequest | None = request
        self.keep_alive = keep_alive
        self.body = bytearray()
        self.more_body = True
        self.response_complete = False
        self.disconnected = False

    def serve(self) -> None:
        """Answer, now that all has come; an idle connection keeps nothing of it."""
        request, body = self._request, bytes(self.body)
        self._request, self.body = None, bytearray()
        if request is not None:
            request.serve(body, self._answered)

    def _answered(self, answer: Answer) -> None:
        self._connection.send_answer(self, answer)


def _without_offer(headers: list[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """The lines of a head without those that offer another protocol."""
    for name, value in headers:
        if name == b"connection":
            tokens = [token.strip() for token in value.split(b",")]
            yield b"connection: " + b", ".join(one for one in tokens if one.lower() != b"upgrade")
        elif name not in {b"upgrade", b"http2-settings"}:
            yield name + b": " + value
