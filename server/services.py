"""The server as one value: what it keeps, what it runs, and how that starts and stops.

`api` and `backend` live in this process; the broker is a child (a broker in the same loop has ten
times the p99 at 900 messages/s). A housekeeping thread follows what others change on disk: models
that were exported, devices that were revoked, timestamps that run out.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import orjson

from edge_sdk.durable import make_folder
from edge_sdk.errors import BundleError, ConfigurationError, LinkError, SplitedgeError
from edge_sdk.mqtt import BrokerAddress, MqttLink, loopback
from edge_sdk.wire.topics import Kind, Topic
from server.allocation import choose_bundle
from server.backend.batcher import Batcher
from server.backend.inference import Inference
from server.backend.models import Files, ModelStore, ServedModel, files_of
from server.backend.worker import MqttWorker
from server.broker.child import BrokerChild, ListenSettings
from server.broker.mosquitto import MosquittoAdmin
from server.broker.policy import Principal, credential_sha256
from server.errors import BadRequestError, NotReadyError, UnknownModelError
from server.registry.artifacts import ArtifactRepository
from server.registry.database import open_registry
from server.registry.operator import load_or_create_operator_secret
from server.registry.records import Device
from server.settings import Address, ServerSettings

logger = logging.getLogger(__name__)

BACKEND: Final = "backend"
HOUSEKEEPING_S: Final = 1.0
FULL_LOOK_S: Final = 30.0  # at everything, whether or not it seems to have changed
TIMESTAMP_S: Final = 3600.0
BROKER_WAIT_S: Final = 5.0


class Services:
    """Everything behind the routes.

    Args:
        settings: where things are kept and how much is taken.
    Raises: at `start`, ConfigurationError or LinkError saying what to change.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        make_folder(settings.state, mode=0o700)
        self.registry = open_registry(settings.state)
        self.artifacts = ArtifactRepository(settings.state)
        self.models = ModelStore(settings.state / "models", threads=settings.threads)
        self.batcher = Batcher(
            batch_max=settings.batch_max,
            queue_max=settings.queue_max,
            queue_bytes=settings.queue_bytes,
        )
        self.inference = Inference(self.models, self.batcher, settings.batch_max)
        self.operator_sha256 = ""
        self._broker: BrokerChild | None = None
        self._admin: MosquittoAdmin | None = None
        self._link: MqttLink | None = None
        self._known: dict[str, Device] = {}
        self._seen: set[str] = set()
        self._published: set[tuple[str, int]] = set()
        self._unpublished: dict[tuple[str, int], tuple[str, Files]] = {}
        self._followed = -1  # the registry's last change that devices and models here show
        self._next_full_look = 0.0
        self._next_timestamp = 0.0
        self._complaints: dict[str, str] = {}
        self._changing = threading.Lock()
        self._stopping = threading.Event()
        self._housekeeper = threading.Thread(target=self._housekeeping, daemon=True)

    def start(self) -> None:
        """Open what is kept, publish the models on disk, start the broker and serve its queries."""
        self.artifacts.open_or_create()
        secret = load_or_create_operator_secret(self.settings.state)
        self.operator_sha256 = hashlib.sha256(secret.encode()).hexdigest()
        self.publish_models()
        link = self._link = self._start_broker()
        self._try("devices", self._sync_devices)
        self._warn_of_loopback()
        MqttWorker(link, self.inference, seen=self._note_seen)
        link.start()
        link.wait_connected(BROKER_WAIT_S)
        self._housekeeper.start()

    def stop(self) -> None:
        """Stop what was started, in the reverse order."""
        self._stopping.set()
        if self._housekeeper.is_alive():
            self._housekeeper.join()
        self.batcher.stop()
        for part in (self._link, self._admin, self._broker):
            if part is not None:
                part.stop()
        self.registry.close()

    # what the management routes ask for

    def root_bytes(self) -> bytes:
        """The TUF root a new device is given."""
        return self.artifacts.root_bytes

    @property
    def broker_url(self) -> str:
        """Where the fleet's broker is, as this server sees it."""
        return self._broker_address().url

    def broker_address(self) -> dict[str, Any]:
        """Where the fleet's broker is, as devices are told."""
        url = self.settings.mqtt_public or self.broker_url
        return {"url": url, "max_packet_bytes": self.settings.max_packet_bytes}

    def enrolled(self, device: Device, credential: str) -> None:
        """Let a new device in at the broker.

        Raises: LinkError or ConfigurationError if the broker did not take it.
        """
        with self._changing:
            if self._admin is not None:
                # known before it is there: should its enrolment be undone, the next look at the
                # registry removes what the broker may have taken in spite of the error
                self._known[device.id] = device
                self._admin.set_device(device.fleet, device.id, credential)
            self._admit(device)

    def revoked(self, device: Device) -> None:
        """Cut a device off at the broker, its live connection included."""
        with self._changing:
            self._expel(device.id)

    def assign(self, device: Device) -> str | None:
        """Decide and note what `device` should run; None while there is no model."""
        model = self._active_model()
        if model is None:
            return None
        fleet = [
            other
            for other in self.registry.devices(device.fleet)
            if other.id != device.id and other.revoked_at is None
        ]
        depth, bundle = choose_bundle(device, model, fleet, self.settings.allocation)
        self.registry.assign(device.id, depth, bundle)
        return bundle

    def command(self, device: Device, command: Mapping[str, Any]) -> bool:
        """Hand a device a command; whether the link to the broker took it."""
        if self._link is None:
            return False
        topic = str(Topic(device.fleet, device.id, Kind.COMMAND))
        return self._link.publish(topic, orjson.dumps(command))

    # models

    def publish_models(self, *, again: bool = False) -> None:
        """Load and sign every model on disk that is not yet; devices are told to look.

        A model whose bundles cannot be signed is served to those who name its version, and to all
        where there is no other. It is tried again when its files change.

        Args:
            again: try what failed before although its files are the same.
        """
        self.models.load(again=again)
        self._follow_active()
        loaded = {self._key(model): model for model in self.models.all()}
        self._published &= set(loaded)
        for key, model in loaded.items():
            if key not in self._published:
                self._publish(key, model, again=again)

    def _publish(self, key: tuple[str, int], model: ServedModel, *, again: bool) -> None:
        said, failed = self._unpublished.get(key, ("", None))
        files = files_of(model.folder)
        if files == failed and not again:
            return
        try:
            self.artifacts.publish_bundles(model.folder)
            if key not in {(record.name, record.version) for record in self.registry.models()}:
                self.registry.publish_model(*key)
                self.registry.activate_model(*key)
        except (BundleError, BadRequestError) as err:
            if said != str(err):
                logger.error("model=%s version=%d bundles are not published: %s", *key, err)  # noqa: TRY400 - no traceback for a bad file
            self._unpublished[key] = str(err), files
            return
        self._unpublished.pop(key, None)
        self._published.add(key)
        self._follow_active()
        self._tell_devices({"op": "update"})

    def _follow_active(self) -> None:
        """Have HTTP serve what the registry notes as active, and devices are assigned."""
        noted = {record.name: record.version for record in self.registry.models() if record.active}
        self.models.activate({name: str(version) for name, version in noted.items()})

    def _active_model(self) -> ServedModel | None:
        """The active version of the name published last, among those that devices can fetch."""
        active = [record for record in self.registry.models() if record.active]
        for record in sorted(active, key=lambda record: record.published_at, reverse=True):
            try:
                model = self.models.get(record.name)
            except (NotReadyError, UnknownModelError):
                continue
            if self._key(model) in self._published:
                return model
        return None

    @staticmethod
    def _key(model: ServedModel) -> tuple[str, int]:
        return model.manifest.name, int(model.manifest.version)

    # broker

    def _broker_address(self) -> BrokerAddress:
        if isinstance(self.settings.broker, BrokerAddress):
            return self.settings.broker
        port = self.settings.broker.port if self._broker is None else self._broker.port
        return BrokerAddress(self.settings.broker.host, port, self.settings.tls)

    def _start_broker(self) -> MqttLink:
        if isinstance(self.settings.broker, Address):
            return self._start_embedded(self.settings.broker)
        return self._join_broker(self.settings.broker)

    def _start_embedded(self, address: Address) -> MqttLink:
        settings = self.settings
        self._broker = BrokerChild(
            ListenSettings(
                host=address.host,
                port=address.port,
                packet_bytes=settings.max_packet_bytes,
                certificate=settings.tls_cert,
                key=settings.tls_key,
            )
        )
        password = secrets.token_urlsafe(32)
        self._broker.set_principal(Principal(BACKEND, "backend", None, credential_sha256(password)))
        self._sync_devices()  # before it listens: a device that is back at once shall be let in
        try:
            self._broker.start()
        except ConfigurationError as err:
            raise ConfigurationError(f"{err}{_remedy(address)}") from err
        local = BrokerAddress(_reached_at(address.host), self._broker.port, settings.tls)
        # its certificate names this host as devices know it, not as loopback
        return self._backend_link(local, BACKEND, password, pinned=settings.tls_cert)

    def _join_broker(self, address: BrokerAddress) -> MqttLink:
        if not loopback(address) and not address.tls and not self.settings.insecure:
            raise ConfigurationError(
                f"--mqtt {address.url}: credentials would travel in the clear; use mqtts://, "
                "or --insecure if you mean it"
            )
        if address.username is None or address.password is None:
            logger.warning(
                "%s: no login in the URL, so devices cannot be kept apart on this broker; "
                "`splitedge server broker-config` writes a configuration that does",
                address.url,
            )
            return self._backend_link(address, BACKEND, "")
        if address.username == BACKEND:  # as `server broker-config` writes it
            ca = None if self.settings.mqtt_ca is None else str(self.settings.mqtt_ca)
            self._admin = MosquittoAdmin(address, credential=address.password, ca=ca)
            self._admin.start()
            # those revoked while this server was down may still be let in there
            gone = [device for device in self.registry.devices() if device.revoked_at is not None]
            self._known = {device.id: device for device in gone}
        return self._backend_link(address, address.username, address.password)

    def _backend_link(
        self, address: BrokerAddress, username: str, password: str, *, pinned: Path | None = None
    ) -> MqttLink:
        return MqttLink(
            address,
            client_id=f"{username}-{secrets.token_hex(4)}",
            username=username,
            password=password,
            ca=None if self.settings.mqtt_ca is None else str(self.settings.mqtt_ca),
            pinned=None if pinned is None else str(pinned),
            max_packet_bytes=self.settings.max_packet_bytes,
            max_in_flight=1000,
            mqtt5=False,
        )

    def _sync_devices(self) -> None:
        """Bring the broker in line with the registry, whoever changed it.

        Raises: LinkError naming the devices for which that failed; all the others are done.
        """
        with self._changing:
            current = {
                device.id: device for device in self.registry.devices() if device.revoked_at is None
            }
            failed = []
            for device_id in sorted(set(self._known) - set(current)):
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

    def _admit(self, device: Device) -> None:
        known = self._known.get(device.id)
        if known is not None and known.credential_sha256 == device.credential_sha256:
            return
        self._known[device.id] = device  # the child keeps what it is told, even if it fails now
        if self._broker is not None:
            self._broker.set_principal(
                Principal(device.id, "device", device.fleet, device.credential_sha256)
            )

    def _expel(self, device_id: str) -> None:
        if self._broker is not None:
            self._broker.remove_principal(device_id)
        if self._admin is not None:
            self._admin.remove_device(device_id)
        self._known.pop(device_id, None)

    def _note_seen(self, device_id: str) -> None:
        self._seen.add(device_id)

    def _tell_devices(self, command: Mapping[str, Any]) -> None:
        with self._changing:
            devices = list(self._known.values())
        for device in devices:
            self.command(device, command)

    # housekeeping

    def _housekeeping(self) -> None:
        self._next_timestamp = time.monotonic() + TIMESTAMP_S
        while not self._stopping.wait(HOUSEKEEPING_S):
            full = time.monotonic() >= self._next_full_look
            if full:
                self._next_full_look = time.monotonic() + FULL_LOOK_S
            # who was revoked comes first, and nothing that fails keeps the next from its turn
            self._try("devices", partial(self._follow_registry, full=full))
            self._try("devices seen", self._keep_seen)
            self._try("models", partial(self.publish_models, again=full))
            self._try("timestamp", self._keep_timestamp)

    def _follow_registry(self, *, full: bool) -> None:
        change = self.registry.last_change()
        if full or change != self._followed:
            self._sync_devices()
            self._followed = change  # not if it failed: then once more

    def _keep_seen(self) -> None:
        seen, self._seen = self._seen, set()
        if seen:
            self.registry.touch(*seen)

    def _keep_timestamp(self) -> None:
        if time.monotonic() >= self._next_timestamp:
            self.artifacts.refresh_timestamp()
            self._next_timestamp = time.monotonic() + TIMESTAMP_S

    def _try(self, duty: str, work: Callable[[], None]) -> None:
        """Do it; what goes wrong is logged, once until it goes well again or wrong otherwise."""
        try:
            work()
        except SplitedgeError as err:
            if self._complaints.get(duty) != str(err):
                logger.warning("%s: %s; it is tried again", duty, err)
            self._complaints[duty] = str(err)
        except Exception:  # outermost loop of this thread: one bad turn must not be the last
            logger.exception("%s: housekeeping failed", duty)
        else:
            self._complaints.pop(duty, None)

    def _warn_of_loopback(self) -> None:
        told = BrokerAddress.parse(str(self.broker_address()["url"]))
        if loopback(told) and (self.settings.insecure or not self.settings.http.loopback):
            logger.warning(
                "devices elsewhere cannot reach their broker: they are told %s, which is this "
                "machine to itself; give --mqtt-public mqtt[s]://HOST:PORT as they reach it, or "
                "have the embedded one listen for them with --mqtt embedded:0.0.0.0:%d",
                told.url,
                told.port,
            )


def _remedy(address: Address) -> str:
    """How to go on where the embedded broker cannot listen: Debian starts a Mosquitto there."""
    other = Address(address.host, address.port + 1 if address.port < 65_535 else 1884)
    there = BrokerAddress(_reached_at(address.host), address.port)
    return (
        f" with --mqtt embedded:{other}, or use the broker that may run there already "
        f"with --mqtt {there.url}"
    )


def _reached_at(host: str) -> str:
    """Where this machine reaches what listens on `host`."""
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104 - compared, not bound
