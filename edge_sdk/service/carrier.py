"""Connections to a running agent: accepted, bounded, each answered in a thread of its own.

A thread for each connection answers without a change of threads, which an event loop would need for
every inference. Their number is bounded, and so is each wait, so that a slow or silent client stops
no other: where all places are taken, the connection that has waited longest gives way. Where none
may, because all are being answered or came a moment ago, the new one waits, and others behind it in
the listener's queue.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, Self

from edge_sdk.service.exchange import HEAD_S, Exchange, Head
from edge_sdk.service.messages import (
    Request,
    RequestError,
    Response,
    error_response,
)
from edge_sdk.service.stream import Stream

logger = logging.getLogger(__name__)

# bodies of all requests that are being read or answered
BODIES_BYTES: Final = 32_000_000
# after an accept that failed for want of descriptors
PAUSE_S: Final = 0.2
# a connection keeps its place for so long while it waits: less would cut off a client that is
# sending its request, or reading its answer, as fast as it can
GRACE_S: Final = 0.2
# for answers under way when the carrier closes
CLOSE_S: Final = 5.0

Answer = Callable[[Request], Response]


class BodyMemory:
    """Memory for the bodies that are held at one time."""

    def __init__(self, limit_bytes: int = BODIES_BYTES) -> None:
        self._left = limit_bytes
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def held(self) -> Iterator[Callable[[int], None]]:
        """Memory for one body until the end of the block.

        Gives a function to call with each number of further bytes.

        Raises: RequestError, in that call, when no memory is left.
        """
        held = 0

        def grow(more: int) -> None:
            nonlocal held
            with self._lock:
                if more > self._left:
                    text = "too many large requests at one time; ask again in 1 s"
                    raise RequestError(429, text, retry_after_s=1)
                self._left -= more
                held += more

        try:
            yield grow
        finally:
            with self._lock:
                self._left += held


class _Connection:
    """One client.

    Attributes:
        idle_since: monotonic seconds; None while a request is answered.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.idle_since: float | None = time.monotonic()

    def cut(self) -> None:
        """End it from another thread; its own thread notices and closes it."""
        with contextlib.suppress(OSError):
            # of the plain socket: TLS would first say goodbye, and its state belongs to the thread
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)


class Carrier:
    """Accepts connections on a listening socket and answers their requests.

        with Carrier(listener, exchange=LocalExchange, check=..., answer=...):
            ...

    Args:
        exchange: makes the HTTP of a connection.
        check: refuses a request by its head: raises RequestError.
        limit: gives the most bytes of a request's body.
        answer: answers a request; it raises nothing.
        connections: most connections at one time.
        tls: for https; None for http.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        exchange: Callable[[Stream], Exchange],
        check: Callable[[Head], None],
        limit: Callable[[Head], int],
        answer: Answer,
        connections: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._listener = listener
        self._exchange = exchange
        self._check = check
        self._limit = limit
        self._answer = answer
        self._most = connections
        self._tls = tls
        self._memory = BodyMemory()
        self._open: dict[_Connection, threading.Thread] = {}
        self._changing = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="splitedge-accept", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accept
        with self._changing:
            self._changing.notify_all()  # wakes it where it waits for a place
        self._thread.join()
        self._listener.close()
        with self._changing:
            left = dict(self._open)
        for connection in left:
            if connection.idle_since is not None:
                connection.cut()
        end = time.monotonic() + CLOSE_S
        for connection, thread in left.items():
            thread.join(max(end - time.monotonic(), 0))
            connection.cut()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                accepted, _ = self._listener.accept()
            except OSError as err:
                if not self._closing.is_set():
                    logger.warning("a connection was not accepted: %s", err.strerror)
                    self._closing.wait(PAUSE_S)
                continue
            self._admit(_Connection(accepted))

    def _admit(self, connection: _Connection) -> None:
        """Give a connection a place, as soon as there is one."""
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="splitedge-serve", daemon=True
        )
        with self._changing:
            self._free_a_place()
            if self._closing.is_set():
                connection.socket.close()
                return
            connection.idle_since = time.monotonic()
            self._open[connection] = thread
        try:
            thread.start()
        except RuntimeError as err:  # the machine has no room for one more thread
            logger.warning("a connection was refused: %s", err)
            self._leave(connection)

    def _free_a_place(self) -> None:
        """Wait until a place is free, or take that of the connection that has waited longest.

        Call it with the lock. It returns without a place when the carrier closes.
        """
        while len(self._open) >= self._most and not self._closing.is_set():
            waiting = {since: each for each in self._open if (since := each.idle_since) is not None}
            left_s = min(waiting) + GRACE_S - time.monotonic() if waiting else None
            if left_s is not None and left_s <= 0:
                longest = waiting[min(waiting)]
                del self._open[longest]
                longest.cut()
            else:
                self._changing.wait(left_s)

    def _leave(self, connection: _Connection) -> None:
        """Give up a connection's place, and close it."""
        with self._changing:
            self._open.pop(connection, None)
            self._changing.notify()
            connection.socket.close()

    def _serve(self, connection: _Connection) -> None:
        try:
            self._secure(connection)
            stream = Stream(connection.socket)
            exchange = self._exchange(stream)
            while self._serve_one(connection, exchange) and not self._closing.is_set():
                pass
            stream.drain()
        except (OSError, ValueError) as err:  # TimeoutError and SSLError too; ValueError: cut off
            logger.debug("a connection ended: %s", err)
        except Exception:  # outermost loop of this thread: the log gets the traceback
            logger.exception("a connection failed")
        finally:
            self._leave(connection)

    def _secure(self, connection: _Connection) -> None:
        if self._tls is None:
            return
        plain = connection.socket
        plain.settimeout(HEAD_S)
        with self._changing:
            connection.socket = self._tls.wrap_socket(
                plain, server_side=True, do_handshake_on_connect=False
            )
        connection.socket.do_handshake()

    def _serve_one(self, connection: _Connection, exchange: Exchange) -> bool:
        """Answer one request.

        Returns: whether another one may follow.
        """
        keep = False
        try:
            head = exchange.read_head()
            if head is None:
                return False
            self._check(head)
            with self._memory.held() as grown:
                body = exchange.read_body(self._limit(head), grown)
                connection.idle_since = None
                keep = head.keep
                response = self._answer(Request(head.method, head.path, head.headers, body))
        except RequestError as err:
            response = error_response(err)  # the body is not read: nothing can follow
        # from here on it may give way: its client may be one that does not read
        with self._changing:
            connection.idle_since = time.monotonic()
            self._changing.notify()
        exchange.respond(response, keep=keep)
        return keep
