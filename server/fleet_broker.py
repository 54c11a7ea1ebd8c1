"""The fleet's broker: started or joined, its logins kept as the registry says.

An installed Mosquitto or the embedded broker runs as a child process; in the API's own loop the
embedded broker's p99 is ten times as high at 900 messages a second.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from edge_sdk.errors import ConfigurationError, LinkError, SplitedgeError, StorageError
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.wire.address import Address, is_loopback
from edge_sdk.wire.broker_address import BrokerAddress
from server.broker.child import BrokerChild, ListenSettings
from server.broker.config import BACKEND_FILE, read_or_make_password
from server.broker.mosquitto import MosquittoAdmin
from server.broker.mosquitto_child import MosquittoChild, installed, reached_at
from server.broker.mosquitto_files import BACKEND
from server.broker.policy import Principal, credential_sha256
from server.registry.database import Registry
from server.registry.records import Device
from server.settings import ServerSettings

MOSQUITTO_FOLDER: Final = "mosquitto"

logger = logging.getLogger(__name__)


class FleetBroker:
    """The broker of all devices, and the devices that may log in there.

    Every method may be called from any thread.

    Args:
        on_event: called with each login and refusal that the broker tells (server.broker.child).
    """

    def __init__(
        self,
        settings: ServerSettings,
        registry: Registry,
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self._settings = settings
        self._on_event = on_event
        self._registry = registry
        self._child: BrokerChild | MosquittoChild | None = None
        self._admin: MosquittoAdmin | None = None
        self._changing = threading.Lock()
        self._admitted: dict[str, Device] = {}  # by id, as the broker knows them
        self._strangers: set[str] = set()  # whom the broker lets in, and no registry knows

    def start(self) -> MqttLink:
        """Start a broker of our own, or join the one by URL.

        Returns: the server's own link to it, not started.
        Raises: ConfigurationError or LinkError saying what to change.
        """
        if isinstance(self._settings.broker, Address):
            return self._start_own(self._settings.broker)
        return self._join(self._settings.broker)

    def stop(self) -> None:
        """Stop what `start` started."""
        for part in (self._admin, self._child):
            if part is not None:
                part.stop()

    @property
    def address(self) -> BrokerAddress:
        """Address at which this server reaches the broker."""
        if isinstance(self._settings.broker, BrokerAddress):
            return self._settings.broker
        port = self._settings.broker.port if self._child is None else self._child.port
        return BrokerAddress(self._settings.broker.host, port, self._settings.tls)

    @property
    def public_url(self) -> str:
        """Address at which devices reach the broker."""
        return self._settings.mqtt_public or self.address.url

    @property
    def devices(self) -> list[Device]:
        """Devices that may log in."""
        with self._changing:
            return list(self._admitted.values())

    def admit(self, device: Device, credential: str) -> None:
        """Let a new device log in, unless it has been shut out meanwhile.

        Raises: LinkError or ConfigurationError if the broker did not take it.
        """
        with self._changing:
            if self._registry.device(device.id).active:
                self._admit(device, credential)

    def logged_in(self, device: Device, credential: str) -> None:
        """Let a device log in at a running Mosquitto that waited to be told its credential."""
        child = self._child
        if not isinstance(child, MosquittoChild) or device.id not in child.waiting:
            return
        with self._changing:
            if device.id not in child.waiting:
                return
            try:
                child.set_principal(_principal(device), credential)
            except LinkError as err:
                logger.warning("device=%s is not let in yet: %s", device.id, err)

    def expel(self, device_id: str) -> None:
        """Refuse a device from now on, and cut its connection.

        Raises: LinkError or ConfigurationError if the broker did not do it.
        """
        with self._changing:
            self._expel(device_id)

    def sync(self) -> None:
        """Bring the broker's logins in line with the registry, which another process may change.

        Raises: LinkError naming the devices for which that failed; all the others are done.
        """
        with self._changing:
            devices = self._registry.devices(profiles=False)
            current = {device.id: device for device in devices if device.active}
            failed = []
            for device_id in sorted((set(self._admitted) | self._strangers) - set(current)):
                try:
                    self._expel(device_id)
                except SplitedgeError as err:
                    failed.append(f"{device_id} is not shut out yet: {err}")
            for device in current.values():
                try:
                    self._admit(device)
                except SplitedgeError as err:
                    failed.append(f"{device.id} is not let in yet: {err}")
        if failed:
            raise LinkError("; ".join(failed))

    def warn_of_loopback(self) -> None:
        """Log a warning if devices of other machines are told an address of this machine alone."""
        told = BrokerAddress.parse(self.public_url)
        if not is_loopback(told.host) or (
            self._settings.http.loopback and not self._settings.insecure
        ):
            return
        if self._settings.mqtt_public is not None:
            logger.warning(
                "devices on other machines cannot reach the broker: they are told %s, an address of"
                " this machine alone, as --mqtt-public of this start or an earlier one says; give "
                "--mqtt-public mqtt[s]://HOST:PORT as they reach it, or --mqtt-public '' to tell "
                "them the address of --mqtt",
                told.url,
            )
        else:
            logger.warning(
                "devices on other machines cannot reach the broker: they are told %s, which is an "
                "address of this machine alone; give --mqtt-public mqtt[s]://HOST:PORT as they "
                "reach it, or let the server's own broker listen with --mqtt auto:0.0.0.0:%d",
                told.url,
                told.port,
            )

    def _start_own(self, address: Address) -> MqttLink:
        program = self._settings.broker_program
        if program == "mosquitto" or (program == "auto" and _says_installed()):
            try:
                return self._start_mosquitto(address)
            except (LinkError, StorageError) as err:
                if program == "mosquitto":
                    raise
                logger.warning("%s; the embedded broker runs in its place", err)
        password = secrets.token_urlsafe(32)
        child = BrokerChild(self._listening(address), self._on_event)
        child.set_principal(Principal(BACKEND, "backend", None, credential_sha256(password)))
        return self._start_child(child, address, password)

    def _start_mosquitto(self, address: Address) -> MqttLink:
        folder = self._settings.state / MOSQUITTO_FOLDER
        password = read_or_make_password(folder / BACKEND_FILE)
        child = MosquittoChild(
            folder, self._listening(address), credential=password, on_event=self._on_event
        )
        return self._start_child(child, address, password)

    def _start_child(
        self, child: BrokerChild | MosquittoChild, address: Address, password: str
    ) -> MqttLink:
        self._child = child
        self._admitted.clear()
        self.sync()  # before it listens: a device that comes back at once is let in
        try:
            child.start()
        except ConfigurationError as err:
            raise ConfigurationError(f"{err}{_remedy(address)}") from err
        if isinstance(child, MosquittoChild):
            logger.info("Mosquitto runs: pid=%s port=%d", child.pid, child.port)
        settings = self._settings
        local = BrokerAddress(reached_at(address.host), child.port, settings.tls)
        # the certificate names the host that devices know, not loopback
        return link_to(settings, local.with_login(BACKEND, password), pinned=settings.tls_cert)

    def _listening(self, address: Address) -> ListenSettings:
        return ListenSettings(
            host=address.host,
            port=address.port,
            packet_bytes=self._settings.max_packet_bytes,
            certificate=self._settings.tls_cert,
            key=self._settings.tls_key,
        )

    def _join(self, address: BrokerAddress) -> MqttLink:
        if address.username is None or address.password is None:
            logger.warning(
                "%s: no login in the URL, so devices cannot be kept apart on this broker; "
                "`splitedge server broker-config` writes a configuration that does",
                address.url,
            )
            return link_to(self._settings, address)
        if address.username == BACKEND:  # as `server broker-config` writes it
            self._admin = MosquittoAdmin(
                address,
                credential=address.password,
                ca=_ca(self._settings),
                insecure=self._settings.insecure,
            )
            self._admin.start()
            # devices revoked while this server was down may still be let in there
            devices = self._registry.devices(profiles=False)
            self._admitted = {device.id: device for device in devices if not device.active}
            self._strangers = self._let_in_there() - {device.id for device in devices}
        return link_to(self._settings, address)

    def _let_in_there(self) -> set[str]:
        """Devices that the broker of the operator's own lets in; none if it does not tell."""
        assert self._admin is not None
        try:
            return set(self._admin.devices())
        except (LinkError, ConfigurationError) as err:
            logger.warning(
                "devices that were removed while this server was down may still log in at the"
                " broker: it does not list its logins (%s)",
                err,
            )
            return set()

    def _admit(self, device: Device, credential: str | None = None) -> None:
        known = self._admitted.get(device.id)
        if known is not None and _login(known) == _login(device) and credential is None:
            return
        # noted first: should its enrolment be undone, the next `sync` removes what the broker may
        # have taken in spite of an error
        self._admitted[device.id] = device
        if isinstance(self._child, MosquittoChild):
            self._child.set_principal(_principal(device), credential)
        elif self._child is not None:
            self._child.set_principal(replace(_principal(device), mosquitto_hash=None))
        elif self._admin is not None and credential is not None:
            self._admin.set_device(device.fleet, device.id, credential)

    def _expel(self, device_id: str) -> None:
        if self._child is not None:
            self._child.remove_principal(device_id)
        if self._admin is not None:
            known = self._admitted.get(device_id)
            self._admin.remove_device(device_id, None if known is None else known.fleet)
        self._admitted.pop(device_id, None)
        self._strangers.discard(device_id)


def link_to(
    settings: ServerSettings,
    address: BrokerAddress,
    *,
    pinned: Path | None = None,
    keepalive_s: int = 30,
) -> MqttLink:
    """The link of a process of the server to the broker there, not started.

    Args:
        address: with the login, which is `backend` without a password where it has none.
        pinned: PEM file of the certificate that the broker must present.
        keepalive_s: so often a silent link says that it lives.
    """
    username = address.username or BACKEND
    return MqttLink(
        address,
        client_id=f"{username}-{secrets.token_hex(4)}",
        username=username,
        password=address.password or "",
        ca=_ca(settings),
        pinned=None if pinned is None else str(pinned),
        keepalive_s=keepalive_s,
        max_packet_bytes=settings.max_packet_bytes,
        max_in_flight=1000,
        mqtt5=False,
        # what is our own is this machine, by whatever name; the settings judge the others
        insecure=True,
    )


def _ca(settings: ServerSettings) -> str | None:
    return None if settings.mqtt_ca is None else str(settings.mqtt_ca)


def _principal(device: Device) -> Principal:
    return Principal(
        device.id, "device", device.fleet, device.credential_sha256, device.mosquitto_hash
    )


def _says_installed() -> bool:
    """Whether Mosquitto is installed; if it is not, a log line says so."""
    try:
        installed()
    except ConfigurationError as err:
        logger.info("the embedded broker runs: %s", err)
        return False
    return True


def _login(device: Device) -> tuple[str, str | None]:
    return device.credential_sha256, device.mosquitto_hash


def _remedy(address: Address) -> str:
    """The next step if our broker cannot listen: Debian starts a Mosquitto there."""
    other = Address(address.host, address.port + 1 if address.port < 65_535 else 1884)
    there = BrokerAddress(reached_at(address.host), address.port)
    return (
        f" with --mqtt auto:{other}, or use the broker that may run there already "
        f"with --mqtt {there.url}"
    )
