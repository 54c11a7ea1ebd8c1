"""Running a server: services up, HTTP up, and both down again on a signal."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson
import uvicorn

from edge_sdk.durable import write_atomic
from edge_sdk.errors import ConfigurationError
from edge_sdk.state import StateLock
from server.app import create_app
from server.services import Services
from server.settings import Address, ServerSettings

logger = logging.getLogger(__name__)

ADDRESSES_NAME: Final = "addresses.json"


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a server listens and what it tells its devices: the next start must do the same.

    Attributes:
        mqtt_public: the broker's URL as devices reach it, or None.
        allocation: the rule; another one would give the whole fleet other depths.
    """

    http: str
    mqtt: str
    mqtt_public: str | None = None
    allocation: str | None = None

    @classmethod
    def load(cls, state: Path) -> Addresses | None:
        """What the last start wrote, or None."""
        with contextlib.suppress(OSError, orjson.JSONDecodeError, KeyError, TypeError):
            data = orjson.loads((state / ADDRESSES_NAME).read_bytes())
            return cls(
                str(data["http"]),
                str(data["mqtt"]),
                data.get("mqtt_public"),  # these two are not in files of the first releases
                data.get("allocation"),
            )
        return None

    def save(self, state: Path) -> None:
        """Keep them for the next start."""
        write_atomic(state / ADDRESSES_NAME, orjson.dumps(self))


def serve(settings: ServerSettings, announce: Callable[[str, str], None]) -> None:
    """Run a server until a signal ends it.

    Args:
        announce: called with the HTTP and MQTT URLs once both take requests.
    Raises: ConfigurationError if an address is taken; StateInUseError if another server runs on
        the state folder.
    """
    with contextlib.ExitStack() as stack:
        # first: a second server on this state would find the port taken, and blame the port
        stack.callback(StateLock(settings.state, "server").release)
        listener = stack.enter_context(_listen(settings.http))
        services = Services(settings)
        stack.callback(services.stop)
        services.start()
        http = _http_url(settings, listener)
        mqtt = services.broker_url
        _remember(settings, listener, mqtt)
        config = uvicorn.Config(
            create_app(services),
            log_config=None,
            access_log=False,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
            timeout_graceful_shutdown=3,
        )
        _Announcing(config, lambda: announce(http, mqtt)).run(sockets=[listener])


class _Announcing(uvicorn.Server):
    """uvicorn, telling once when it takes requests."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._started()


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((address.host, address.port))
        listener.listen()  # two servers can bind one port; only one can listen there
    except OSError as err:
        listener.close()
        raise ConfigurationError(
            f"--http {address}: cannot listen there ({err.strerror}); choose another port"
        ) from err
    return listener


def _http_url(settings: ServerSettings, listener: socket.socket) -> str:
    address = Address(settings.http.host, int(listener.getsockname()[1]))
    return f"{'https' if settings.tls else 'http'}://{address}"


def _remember(settings: ServerSettings, listener: socket.socket, mqtt: str) -> None:
    http = Address(settings.http.host, int(listener.getsockname()[1]))
    if isinstance(settings.broker, Address):
        mqtt = f"embedded:{mqtt.partition('://')[2]}"
    elif settings.broker.username is not None:
        return
    Addresses(str(http), mqtt, settings.mqtt_public, settings.allocation).save(settings.state)
