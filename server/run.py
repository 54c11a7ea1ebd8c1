"""A server's run: start the services and HTTP, stop both on a signal."""

from __future__ import annotations

import contextlib
import logging
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from edge_sdk.durable import write_atomic
from edge_sdk.errors import ConfigurationError, StorageError
from edge_sdk.service.listening import listen
from edge_sdk.session import available_providers
from edge_sdk.state import StateLock
from edge_sdk.systemd.notify import Notifier
from edge_sdk.wire.address import Address
from edge_sdk.wire.broker_address import BrokerAddress
from server.app import create_app
from server.backend.provider import provider_of
from server.dashboard.links import first_link, keep_page_url, page_url
from server.discovery.announcement import announcing
from server.every_role.answering import answer_until_stopped
from server.http_server import HttpServer
from server.routes.host_names import checked, own_names
from server.routes.v2.direct import DirectQueries
from server.services import Services
from server.settings import (
    AUTO,
    ENROLMENTS,
    MQTT_PORT_DEFAULT,
    NEW_VERSIONS,
    BrokerProgram,
    ServerSettings,
    check_certificate,
    parse_broker,
)
from server.state import check_not_a_device
from server.stopping import Stopping

logger = logging.getLogger(__name__)

ADDRESSES_NAME: Final = "addresses.json"
PORTS_TRIED: Final = 10
ENROLMENT_NAME: Final = "enrolment"
# Python hands its lock on after 5 ms, which the engine's thread waits for several times a batch
# while requests keep the event loop busy. At three times the peak over HTTP (ResNet-18, 96 x 96, a
# busy machine) the answers in time were 0 to 70 % of the peak in eight runs, median 22 %; with
# this, 56 and 70 % in two.
SWITCH_INTERVAL_S: Final = 5e-4
NEW_VERSIONS_NAME: Final = "new-versions"


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses at which a server listens and that it tells its devices, kept for its next start.

    Attributes:
        mqtt_public: the broker's URL as devices reach it, or None.
        allocation: the rule; another rule would give the whole fleet other depths.
        tls_cert: path of the certificate, which `server doctor` looks at; the next start is told
            its own.
        role: of the process that ran, `all` or `api`.
    """

    http: str
    mqtt: str
    mqtt_public: str | None = None
    allocation: str | None = None
    tls_cert: str | None = None
    role: str = "all"

    @classmethod
    def load(cls, state: Path) -> Addresses | None:
        """Read the addresses of the last start, or None."""
        with contextlib.suppress(OSError, orjson.JSONDecodeError, KeyError, TypeError):
            data = orjson.loads((state / ADDRESSES_NAME).read_bytes())
            return cls(
                str(data["http"]),
                str(data["mqtt"]),
                data.get("mqtt_public"),  # files of the first releases lack these four
                data.get("allocation"),
                data.get("tls_cert"),
                data.get("role", "all"),
            )
        return None

    def save(self, state: Path) -> None:
        """Write them for the next start."""
        write_atomic(state / ADDRESSES_NAME, orjson.dumps(self))


def choose_broker(
    text: str | None, last: Addresses | None
) -> tuple[BrokerProgram, Address | BrokerAddress]:
    """The program and the address of the broker: as `--mqtt` says, else as last time, else `auto`.

    A broker of our own stays at the address of last time, which the devices know. The first time it
    takes the usual port, or one of the next if that is taken: Debian starts a Mosquitto there.

    Raises: ConfigurationError.
    """
    program, address = parse_broker(text or (last.mqtt if last else AUTO))
    if program is None and isinstance(address, BrokerAddress):
        return AUTO, address
    if address is None and last is not None:
        address = parse_broker(last.mqtt)[1]
    if not isinstance(address, Address):
        address = _first_free(MQTT_PORT_DEFAULT)
    return program or AUTO, address


def last_enrolment(state: Path) -> str:
    """The enrolment of the last start; "token" if there was none."""
    return _last(state / ENROLMENT_NAME, ENROLMENTS[0])


def last_new_versions(state: Path) -> str:
    """The rule of the last start for new versions; "all" if there was none."""
    return _last(state / NEW_VERSIONS_NAME, NEW_VERSIONS[0])


def _last(file: Path, default: str) -> str:
    """The word that a start left for the next one."""
    try:
        return file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return default


def serve(
    settings: ServerSettings,
    stopping: Stopping,
    announce: Callable[[str, str, str | None], None],
    notifier: Notifier,
) -> None:
    """Run a server until a signal ends it, and stop it in order.

    Args:
        stopping: made when the command began, so that signals count from there on.
        announce: called with the HTTP and MQTT URLs once both take requests, and with a link that
            signs in to the dashboard; None without a dashboard.
        notifier: to the service manager, if there is one.
    Raises: ConfigurationError if an address is taken, if the certificate or its key cannot be
        used, or if the state folder is a device's; StateInUseError if another server runs on it.
    """
    check_not_a_device(settings.state)
    provider_of(settings.provider, available_providers())  # refused before anything is written
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if settings.tls_cert is not None and settings.tls_key is not None:
        check_certificate(settings.tls_cert, settings.tls_key)
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
        if settings.enrolment != last_enrolment(settings.state):
            write_atomic(settings.state / ENROLMENT_NAME, settings.enrolment.encode())
        if settings.new_versions != last_new_versions(settings.state):
            # forgotten, a version that waits would go to all devices at the next start
            write_atomic(settings.state / NEW_VERSIONS_NAME, settings.new_versions.encode())
        names = own_names(listener.address, settings.tls_cert, settings.host_names)
        server = HttpServer(
            checked(create_app(services), names),
            listener,
            settings.tls_cert,
            settings.tls_key,
            direct=DirectQueries(
                services.inference,
                names,
                loopback=settings.local,
                logins=services.recent_logins,
            ),
        )
        services.listener_certificate = server.certificate_ends

        def started() -> None:
            announce(server.url, mqtt, _dashboard(services, server.url, notifier))
            notifier.ready(f"{server.url} (API), {mqtt} (broker)")

        stack.enter_context(announcing(listener.address, settings.tls_cert, settings.announce))
        answer_until_stopped(server, services.hangs, stopping, notifier, started)


def _dashboard(services: Services, api: str, notifier: Notifier) -> str | None:
    """Text to print about the dashboard: a link, or the command for one.

    What a service prints is kept in a journal, where others than the operator may read it.
    """
    settings = services.settings
    if not settings.dashboard:
        return None
    page = page_url(api, settings.tls_cert, settings.host_names)
    if notifier.managed:
        with contextlib.suppress(StorageError):  # a full disk stops no server
            keep_page_url(settings.state, page)
        state = shlex.quote(str(settings.state.absolute()))
        return f"{page} (splitedge server dashboard-link --state {state} prints a sign-in link)"
    link = first_link(settings.state, services.registry, page)
    return None if link is None else f"{link} (signs in one person, once, within 15 minutes)"


def _first_free(port: int) -> Address:
    for candidate in range(port, port + PORTS_TRIED):
        address = Address("127.0.0.1", candidate)
        with contextlib.suppress(ConfigurationError):
            listen(address, "--mqtt").close()
            if candidate != port:
                logger.info("port %d is taken, the broker takes %d", port, candidate)
            return address
    return Address("127.0.0.1", port)  # its own error says what to do


def _remember(settings: ServerSettings, http: Address, mqtt: str) -> None:
    if isinstance(settings.broker, Address):
        mqtt = f"{settings.broker_program}:{mqtt.partition('://')[2]}"
    elif settings.broker.username is not None:
        return
    cert = None if settings.tls_cert is None else str(settings.tls_cert.absolute())
    used = Addresses(
        str(http), mqtt, settings.mqtt_public, settings.allocation, cert, settings.role
    )
    if used == Addresses.load(settings.state):
        return
    try:
        used.save(settings.state)
    except StorageError as err:  # a full disk stops no server
        logger.warning("%s; the next start may take other addresses", err)
