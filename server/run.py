"""A server's run: start the services and HTTP, stop both on a signal."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from edge_sdk.durable import write_atomic
from edge_sdk.service.listening import listen
from edge_sdk.state import StateLock
from edge_sdk.wire.address import Address
from server.app import create_app
from server.http_server import HttpServer
from server.services import Services
from server.settings import ServerSettings
from server.state import check_not_a_device

logger = logging.getLogger(__name__)

ADDRESSES_NAME: Final = "addresses.json"


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses at which a server listens and that it tells its devices, kept for its next start.

    Attributes:
        mqtt_public: the broker's URL as devices reach it, or None.
        allocation: the rule; another rule would give the whole fleet other depths.
    """

    http: str
    mqtt: str
    mqtt_public: str | None = None
    allocation: str | None = None

    @classmethod
    def load(cls, state: Path) -> Addresses | None:
        """Read the addresses of the last start, or None."""
        with contextlib.suppress(OSError, orjson.JSONDecodeError, KeyError, TypeError):
            data = orjson.loads((state / ADDRESSES_NAME).read_bytes())
            return cls(
                str(data["http"]),
                str(data["mqtt"]),
                data.get("mqtt_public"),  # files of the first releases lack these two
                data.get("allocation"),
            )
        return None

    def save(self, state: Path) -> None:
        """Write them for the next start."""
        write_atomic(state / ADDRESSES_NAME, orjson.dumps(self))


def serve(settings: ServerSettings, announce: Callable[[str, str], None]) -> None:
    """Run a server until a signal ends it.

    Args:
        announce: called with the HTTP and MQTT URLs once both take requests.
    Raises: ConfigurationError if an address is taken, or if the state folder is a device's;
        StateInUseError if another server runs on it.
    """
    check_not_a_device(settings.state)
    with contextlib.ExitStack() as stack:
        # the lock comes first: a second server would otherwise report that its port is taken
        stack.callback(StateLock(settings.state, "server").release)
        listener = listen(settings.http)
        stack.callback(listener.close)
        services = Services(settings)
        stack.callback(services.stop)
        services.start()
        mqtt = services.broker.address.url
        _remember(settings, listener.address, mqtt)
        server = HttpServer(create_app(services), listener, settings.tls_cert, settings.tls_key)
        server.run(lambda: announce(server.url, mqtt))


def _remember(settings: ServerSettings, http: Address, mqtt: str) -> None:
    if isinstance(settings.broker, Address):
        mqtt = f"embedded:{mqtt.partition('://')[2]}"
    elif settings.broker.username is not None:
        return
    Addresses(str(http), mqtt, settings.mqtt_public, settings.allocation).save(settings.state)
