"""A certificate, and servers whose seconds are short."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from fastapi import FastAPI

from benchmarks.mqtt.certificates import self_signed
from edge_sdk.service.listening import listen
from edge_sdk.wire.address import Address
from server.http_server import HttpServer


@dataclass(frozen=True)
class Certificate:
    """A certificate for localhost and 127.0.0.1, which is its own authority."""

    cert: Path
    key: Path

    @property
    def context(self) -> ssl.SSLContext:
        """Of a client that trusts it."""
        return ssl.create_default_context(cafile=str(self.cert))


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """A certificate of this session."""
    return Certificate(*self_signed(tmp_path_factory.mktemp("certificate")))


@pytest.fixture
def serving(certificate: Certificate) -> Iterator[Callable[..., HttpServer]]:
    """Serves applications in threads: `serving(app, tls=True)`; a second lasts `TICK_S`."""
    with ExitStack() as stack:

        def serve(app: FastAPI, *, tls: bool = False) -> HttpServer:
            files = (certificate.cert, certificate.key) if tls else (None, None)
            server = HttpServer(app, listen(Address("127.0.0.1", 0)), *files, tick_s=0.05)
            return stack.enter_context(server)

        yield serve
