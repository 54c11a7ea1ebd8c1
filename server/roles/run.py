"""A backend's run: find the registry and the broker, answer, and stop on a signal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from edge_sdk.errors import ConfigurationError
from edge_sdk.service.listening import listen
from edge_sdk.session import available_providers
from edge_sdk.systemd.notify import Notifier
from edge_sdk.wire.address import Address
from edge_sdk.wire.broker_address import BrokerAddress
from server.backend.provider import provider_of
from server.broker.config import BACKEND_FILE, read_password
from server.broker.mosquitto_child import reached_at
from server.broker.mosquitto_files import BACKEND
from server.every_role.answering import answer_until_stopped
from server.every_role.query_routes import query_app
from server.fleet_broker import MOSQUITTO_FOLDER
from server.http_server import HttpServer
from server.registry.location import RegistryLocation, check_made, has_registry
from server.roles.backend import Backend
from server.routes.host_names import checked, own_names
from server.routes.v2.direct import DirectQueries
from server.run import SWITCH_INTERVAL_S, Addresses
from server.settings import ServerSettings, check_certificate, parse_broker
from server.state import check_not_a_device
from server.stopping import Stopping


def broker_for(
    text: str | None, password_file: Path | None, state: Path
) -> tuple[BrokerAddress, Path | None]:
    """The broker that a backend joins: by URL, or the Mosquitto of the API on this state folder.

    Returns: its address, with the login, and the certificate that it must present; None for one
        that the system's certificates or --mqtt-ca verify.
    Raises: ConfigurationError.
    """
    last = None if text else Addresses.load(state)
    program, address = parse_broker(text or (last.mqtt if last else "auto"))
    if isinstance(address, BrokerAddress):
        if password_file is None:
            return address, None
        if address.username is None or address.password:
            raise ConfigurationError(
                "--mqtt-password-file needs --mqtt mqtt://USER@HOST:PORT; give both, or neither"
            )
        return replace(address, password=read_password(password_file)), None
    if program == "embedded":
        raise ConfigurationError(
            f"{text or state}: the embedded broker has no shared subscriptions, by which backends"
            " share the queries; start `splitedge server api --mqtt mosquitto`"
        )
    file = state / MOSQUITTO_FOLDER / BACKEND_FILE
    if text or not isinstance(address, Address) or not file.exists():
        raise ConfigurationError(
            f"--mqtt{f' {text}' if text else ''}: a backend joins a Mosquitto or an EMQX that runs;"
            " give mqtt[s]://USER@HOST:PORT, or the --state of an API on this machine that was"
            " started with `splitedge server api --mqtt mosquitto`"
        )
    pinned = None if last is None or last.tls_cert is None else Path(last.tls_cert)
    there = BrokerAddress(reached_at(address.host), address.port, pinned is not None)
    return there.with_login(BACKEND, read_password(file)), pinned


def registry_for(
    given: RegistryLocation | None, state: Path, *, settled_elsewhere: bool = False
) -> RegistryLocation:
    """The registry that a backend reads: the one that is given, else that of the state folder.

    Args:
        settled_elsewhere: whether its models come from a store, into a folder of its own.
    Raises: ConfigurationError, also where the API has not made it, or not for this release.
    """
    if settled_elsewhere and has_registry(state):
        raise ConfigurationError(
            f"{state}: an API runs on this folder, and --artifacts would replace its models; give"
            " the backend a folder of its own by --state, or leave --artifacts out"
        )
    if given is None and not has_registry(state):
        raise ConfigurationError(
            f"{state}: no server has run there; give a backend the --state of an API on this"
            " machine, or --registry postgresql://USER@HOST/NAME and --artifacts URL"
        )
    last = Addresses.load(state)
    if given is None and last is not None and last.role != "api":
        raise ConfigurationError(
            f"{state}: `splitedge server run` answers all queries there by itself; start"
            " `splitedge server api` in its place, with the same options, then the backends"
        )
    location = given or RegistryLocation.of(state)
    check_made(location)
    return location


def serve_backend(
    settings: ServerSettings,
    *,
    location: RegistryLocation,
    pinned: Path | None,
    stopping: Stopping,
    announce: Callable[[str, Backend], None],
    notifier: Notifier,
) -> None:
    """Run a backend until a signal ends it, and stop it in order.

    Args:
        pinned: certificate that the broker must present, see `broker_for`.
        announce: called with its URL once it takes requests.
    Raises: ConfigurationError; LinkError if the broker cannot be reached.
    """
    check_not_a_device(settings.state)
    provider_of(settings.provider, available_providers())  # refused before anything is written
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if settings.tls_cert is not None and settings.tls_key is not None:
        check_certificate(settings.tls_cert, settings.tls_key)
    with contextlib.ExitStack() as stack:
        listener = listen(settings.http)
        stack.callback(listener.close)
        backend = Backend(settings, location, pinned)
        stack.callback(backend.stop)
        backend.start()
        names = own_names(listener.address, settings.tls_cert, settings.host_names)
        server = HttpServer(
            checked(query_app(backend), names),
            listener,
            settings.tls_cert,
            settings.tls_key,
            direct=DirectQueries(
                backend.inference,
                names,
                loopback=settings.local,
                logins=backend.recent_logins,
            ),
        )

        def started() -> None:
            announce(server.url, backend)
            notifier.ready(f"{server.url} (HTTP), {backend.broker_url} (broker)")

        answer_until_stopped(server, backend.hangs, stopping, notifier, started)
