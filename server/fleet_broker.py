"""The fleet's broker, embedded or by URL: started or joined, its logins kept as the registry says.

The embedded broker is a child process: in the API's own loop its p99 is ten times as high at 900
messages a second.
"""

from __future__ import annotations

import logging
import secrets
import threading
from pathlib import Path

from edge_sdk.errors import ConfigurationError, LinkError, SplitedgeError
from edge_sdk.mqtt import BrokerAddress, MqttLink, loopback
from edge_sdk.wire.address import Address
from server.broker.child import BrokerChild, ListenSettings
from server.broker.mosquitto import BACKEND, MosquittoAdmin
from server.broker.policy import Principal, credential_sha256
from server.registry.database import Registry
from server.registry.records import Device
from server.settings import ServerSettings

logger = logging.getLogger(__name__)


class FleetBroker:
    """The broker of all devices, and the devices that may log in there.

    Every method may be called from any thread.
    """

    def __init__(self, settings: ServerSettings, registry: Registry) -> None:
        self._settings = settings
        self._registry = registry
        self._child: BrokerChild | None = None
        self._admin: MosquittoAdmin | None = None
        self._changing = threading.Lock()
        self._admitted: dict[str, Device] = {}  # by id, as the broker knows them

    def start(self) -> MqttLink:
        """Start the embedded broker, or join the one by URL.

        Returns: the server's own link to it, not started.
        Raises: ConfigurationError or LinkError saying what to change.
        """
        if isinstance(self._settings.broker, Address):
            return self._start_embedded(self._settings.broker)
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
        """Let a new device log in.

        Raises: LinkError or ConfigurationError if the broker did not take it.
        """
        with self._changing:
            if self._admin is not None:
                # noted first: should its enrolment be undone, the next `sync` removes what the
                # broker may have taken in spite of the error
                self._admitted[device.id] = device
                self._admin.set_device(device.fleet, device.id, credential)
            self._admit(device)

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
            current = {
                device.id: device
                for device in self._registry.devices()
                if device.revoked_at is None
            }
            failed = []
            for device_id in sorted(set(self._admitted) - set(current)):
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
        if loopback(told) and (self._settings.insecure or not self._settings.http.loopback):
            logger.warning(
                "devices on other machines cannot reach the broker: they are told %s, which is an "
                "address of this machine alone; give --mqtt-public mqtt[s]://HOST:PORT as they "
                "reach it, or let the embedded broker listen with --mqtt embedded:0.0.0.0:%d",
                told.url,
                told.port,
            )

    def _start_embedded(self, address: Address) -> MqttLink:
        settings = self._settings
        self._child = BrokerChild(
            ListenSettings(
                host=address.host,
                port=address.port,
                packet_bytes=settings.max_packet_bytes,
                certificate=settings.tls_cert,
                key=settings.tls_key,
            )
        )
        password = secrets.token_urlsafe(32)
        self._child.set_principal(Principal(BACKEND, "backend", None, credential_sha256(password)))
        self.sync()  # before it listens: a device that comes back at once is let in
        try:
            self._child.start()
        except ConfigurationError as err:
            raise ConfigurationError(f"{err}{_remedy(address)}") from err
        local = BrokerAddress(_reached_at(address.host), self._child.port, settings.tls)
        # the certificate names the host that devices know, not loopback
        return self._link(local, BACKEND, password, pinned=settings.tls_cert)

    def _join(self, address: BrokerAddress) -> MqttLink:
        if not loopback(address) and not address.tls and not self._settings.insecure:
            raise ConfigurationError(
                f"--mqtt {address.url}: credentials would travel without encryption; use mqtts://, "
                "or --insecure to allow it"
            )
        if address.username is None or address.password is None:
            logger.warning(
                "%s: no login in the URL, so devices cannot be kept apart on this broker; "
                "`splitedge server broker-config` writes a configuration that does",
                address.url,
            )
            return self._link(address, BACKEND, "")
        if address.username == BACKEND:  # as `server broker-config` writes it
            self._admin = MosquittoAdmin(address, credential=address.password, ca=self._ca)
            self._admin.start()
            # devices revoked while this server was down may still be let in there
            revoked = [one for one in self._registry.devices() if one.revoked_at is not None]
            self._admitted = {device.id: device for device in revoked}
        return self._link(address, address.username, address.password)

    def _link(
        self, address: BrokerAddress, username: str, password: str, *, pinned: Path | None = None
    ) -> MqttLink:
        return MqttLink(
            address,
            client_id=f"{username}-{secrets.token_hex(4)}",
            username=username,
            password=password,
            ca=self._ca,
            pinned=None if pinned is None else str(pinned),
            max_packet_bytes=self._settings.max_packet_bytes,
            max_in_flight=1000,
            mqtt5=False,
        )

    @property
    def _ca(self) -> str | None:
        return None if self._settings.mqtt_ca is None else str(self._settings.mqtt_ca)

    def _admit(self, device: Device) -> None:
        known = self._admitted.get(device.id)
        if known is not None and known.credential_sha256 == device.credential_sha256:
            return
        self._admitted[device.id] = device  # the child keeps a principal, even if it fails now
        if self._child is not None:
            self._child.set_principal(
                Principal(device.id, "device", device.fleet, device.credential_sha256)
            )

    def _expel(self, device_id: str) -> None:
        if self._child is not None:
            self._child.remove_principal(device_id)
        if self._admin is not None:
            self._admin.remove_device(device_id)
        self._admitted.pop(device_id, None)


def _remedy(address: Address) -> str:
    """The next step if the embedded broker cannot listen: Debian starts a Mosquitto there."""
    other = Address(address.host, address.port + 1 if address.port < 65_535 else 1884)
    there = BrokerAddress(_reached_at(address.host), address.port)
    return (
        f" with --mqtt embedded:{other}, or use the broker that may run there already "
        f"with --mqtt {there.url}"
    )


def _reached_at(host: str) -> str:
    """The host by which this machine reaches what listens on `host`."""
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104 - compared, not bound
