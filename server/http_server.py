"""The trainer's HTTP server: in a thread of its process, while the engine has the main one."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import uvicorn
from fastapi import FastAPI

from edge_sdk.errors import ConfigurationError, LinkError
from server.settings import Address

START_S: Final = 10.0
STOP_S: Final = 3


class Listener:
    """Serves an application from `__enter__` to `__exit__`.

    Attributes:
        url: where, once entered; port 0 became a free one.
    """

    def __init__(
        self, app: FastAPI, address: Address, cert: Path | None = None, key: Path | None = None
    ) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            ssl_certfile=cert,
            ssl_keyfile=key,
            timeout_graceful_shutdown=STOP_S,
        )
        self._up = threading.Event()
        self._server = _Announcing(config, self._up)
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            self._socket = socket.create_server((address.host, address.port), family=family)
        except OSError as err:
            raise ConfigurationError(
                f"--http {address}: cannot listen there ({err.strerror}); choose another port"
            ) from err
        # taken over by accepted connections: a step is a small question and a small answer
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listening = Address(address.host, int(self._socket.getsockname()[1]))
        self.url = f"{'http' if cert is None else 'https'}://{listening}"
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )

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
        log.addFilter(_of_no_long_poll)
        try:
            self._server.should_exit = True
            self._thread.join()
        finally:
            log.removeFilter(_of_no_long_poll)
        self._socket.close()


class _Announcing(uvicorn.Server):
    """uvicorn, telling once when it takes requests."""

    def __init__(self, config: uvicorn.Config, up: threading.Event) -> None:
        super().__init__(config)
        self._up = up

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._up.set()


def _of_no_long_poll(record: logging.LogRecord) -> bool:
    """False for what uvicorn says of requests cut off at the end: idle devices ask again."""
    cut_off = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not cut_off and "timeout graceful shutdown exceeded" not in str(record.msg)
