"""Serving an application over HTTP: the server's API in the main thread, the trainer's in another.

uvicorn runs the application; who may connect, and for how long silent, is ours (server.listening).
Only this module and `http_connection` import uvicorn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import uvicorn
from starlette.types import ASGIApp

from edge_sdk.errors import LinkError
from edge_sdk.service.listening import Listener
from server.http_connection import IDLE_S, HttpConnection
from server.listening.certificate import CertificateEnds, end_in_file, end_served
from server.listening.counting_loop import COUNTING_LOOP
from server.listening.descriptors import raise_descriptor_limit
from server.listening.direct_request import DirectRequests
from server.listening.guarded import TICK_S
from server.listening.places import Place, Places
from server.listening.port import Port, places_for
from server.listening.seldom import SeldomFilter

START_S: Final = 10.0
STOP_S: Final = 3


logging.getLogger("uvicorn.error").addFilter(SeldomFilter())


class HttpServer:
    """Serves an application, in this thread (`run`) or in one of its own (`with`).

    It raises the process's limit of descriptors, because each connection takes one.

    Args:
        listener: closed where serving ends.
        cert, key: PEM files for https; None for http.
        tick_s: seconds between two looks at the waits of all connections, which count such turns.
        direct: knows the requests that a connection answers itself; None where there are none.
    Attributes:
        url: where it is reached.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: Listener,
        cert: Path | None = None,
        key: Path | None = None,
        *,
        tick_s: float = TICK_S,
        direct: DirectRequests | None = None,
    ) -> None:
        self._listener = listener
        self._cert = cert
        self._up = threading.Event()
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            ssl_certfile=cert,
            ssl_keyfile=key,
            loop=COUNTING_LOOP,
            ws="none",
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=STOP_S,
        )
        places = places_for(raise_descriptor_limit())
        self._server = _Server(
            config, listener.socket, places, self._up.set, tick_s=tick_s, direct=direct
        )
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.url = f"{'http' if cert is None else 'https'}://{listener.address}"

    def run(self, announce: Callable[[], None]) -> None:
        """Serve until `stop`; call it in the main thread.

        Args:
            announce: called once requests are taken.
        """
        self._server.announce = announce
        self._serve()

    def stop(self) -> None:
        """Let `run` end; for a signal handler or any thread. Requests that run are answered."""
        self._server.should_exit = True

    def hangs(self, limit_s: float) -> str:
        """Why no request is answered; empty while the loop of all connections turns.

        Args:
            limit_s: time that one turn may take.
        """
        loop = self._server.loop
        if loop is None or self._server.should_exit:
            return ""
        turned = threading.Event()
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(turned.set)
        if turned.wait(limit_s) or self._server.should_exit:
            return ""
        return f"{self.url} has answered nothing for {limit_s:.0f} s"

    def certificate_ends(self) -> CertificateEnds | None:
        """Ends of the certificate that is shown, and of the one in its file; None without TLS, and
        until requests are taken.
        """
        served = self._server.certificate_end
        if self._cert is None or served is None:
            return None
        return CertificateEnds(served, end_in_file(self._cert))

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._up.wait(START_S):
            raise LinkError(f"{self.url}: the HTTP server did not start; its log says why")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self._thread.join()

    def _serve(self) -> None:
        log = logging.getLogger("uvicorn.error")
        log.addFilter(_keep_unless_cut_off)
        try:
            self._server.run(sockets=[])  # ours are not uvicorn's to accept on
        finally:
            log.removeFilter(_keep_unless_cut_off)
            self._listener.close()


class _Server(uvicorn.Server):
    """uvicorn behind our own port: it calls `announce` once it takes requests.

    Signals are not its business: it would raise them again when it has ended.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        listening: socket.socket,
        places: Places,
        announce: Callable[[], None],
        *,
        tick_s: float,
        direct: DirectRequests | None,
    ) -> None:
        super().__init__(config)
        self._direct = direct
        self._listening = listening
        self._places = places
        self._tick_s = tick_s
        self._port: Port | None = None
        self.loop: asyncio.AbstractEventLoop | None = None  # once it takes requests
        self.certificate_end: float | None = None  # with TLS, from then on
        self.announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._port = Port(
                self._listening,
                self._places,
                self._connection,
                self.config.ssl,
                tick_s=self._tick_s,
            )
            if self.config.ssl is not None:
                self.certificate_end = end_served(self.config.ssl)
            self.loop = asyncio.get_running_loop()
            self.announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._port is not None:
            self._port.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def _connection(self, place: Place) -> HttpConnection:
        return HttpConnection(
            self.config,
            self.server_state,
            self.lifespan.state,
            places=self._places,
            place=place,
            direct=self._direct,
        )


def _keep_unless_cut_off(record: logging.LogRecord) -> bool:
    """False for lines about requests cut off at the end: devices that poll ask again."""
    cut_off = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not cut_off and "timeout graceful shutdown exceeded" not in str(record.msg)
