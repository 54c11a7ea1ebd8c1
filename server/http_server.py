"""Serving an application over HTTP: the server's API in the main thread, the trainer's in another.

The only importer of uvicorn.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import uvicorn
from fastapi import FastAPI

from edge_sdk.errors import LinkError
from edge_sdk.service.listening import Listener

START_S: Final = 10.0
STOP_S: Final = 3


class HttpServer:
    """Serves an application, in this thread (`run`) or in one of its own (`with`).

    Args:
        listener: closed where serving ends.
        cert, key: PEM files for https; None for http.
    Attributes:
        url: where it is reached.
    """

    def __init__(
        self, app: FastAPI, listener: Listener, cert: Path | None = None, key: Path | None = None
    ) -> None:
        self._listener = listener
        self._up = threading.Event()
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            ssl_certfile=cert,
            ssl_keyfile=key,
            timeout_graceful_shutdown=STOP_S,
        )
        self._server = _AnnouncingServer(config, self._up.set)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.url = f"{'http' if cert is None else 'https'}://{listener.address}"

    def run(self, announce: Callable[[], None]) -> None:
        """Serve until a signal ends it; call it in the main thread.

        Args:
            announce: called once requests are taken.
        """
        self._server.announce = announce
        self._serve()

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
        log = logging.getLogger("uvicorn.error")
        log.addFilter(_keep_unless_cut_off)
        try:
            self._server.should_exit = True
            self._thread.join()
        finally:
            log.removeFilter(_keep_unless_cut_off)

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._listener.socket])
        finally:
            self._listener.close()


class _AnnouncingServer(uvicorn.Server):
    """uvicorn that calls `announce` once it takes requests."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self.announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.announce()


def _keep_unless_cut_off(record: logging.LogRecord) -> bool:
    """False for lines about requests cut off at the end: devices that poll ask again."""
    cut_off = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not cut_off and "timeout graceful shutdown exceeded" not in str(record.msg)
