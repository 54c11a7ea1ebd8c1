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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import orjson

from edge_sdk.durable import make_folder
from edge_sdk.errors import BundleError, ConfigurationError, SplitedgeError
from edge_sdk.mqtt import BrokerAddress, MqttLink, loopback
from edge_sdk.wire.topics import Kind, Topic
from server.allocation import choose_bundle
from server.backend.admission import Inference
from server.backend.batcher import Batcher
from server.backend.models import Model, ModelStore
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
        self.batcher = Batcher(batch_max=settings.batch_max, queue_max=settings.queue_max)
        self.inference = Inference(self.models, self.batcher, settings.batch_max)
        self.operator_sha256 = ""
        self._broker: BrokerChild | None = None
        self._admin: MosquittoAdmin | None = None
        self._link: MqttLink | None = None
        self._known: dict[str, Device] = {}
        self._seen: set[str] = set()
        self._published: set[tuple[str, int]] = set()
        self._unpublished: dict[tuple[str, int], str] = {}
        self._changing = threading.Lock()
        self._stopping = threading.Event()
        self._housekeeper = threading.Thread(target=self._keep_house, daemon=True)

    def start(self) -> None:
        """Open what is kept, publish the models on disk, start the broker and serve its queries."""
        self.artifacts.open_or_create()
        secret = load_or_create_operator_secret(self.settings.state)
        self.operator_sha256 = hashlib.sha256(secret.encode()).hexdigest()
        self.publish_models()
        link = self._link = self._start_broker()
        self._sync_devices()
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

    def broker_address(self) -> dict[str, Any]:
        """Where the fleet's broker is, as devices are told."""
        broker = self._broker_address()
        return {"url": broker.url, "max_packet_bytes": self.settings.max_packet_bytes}

    def enrolled(self, device: Device, credential: str) -> None:
        """Let a new device in at the broker."""
        with self._changing:
            if self._admin is not None:
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

    def publish_models(self) -> None:
        """Load and sign every model on disk that is not yet; devices are told to look.

        A model whose bundles cannot be signed is served all the same, and tried again next time.
        """
        self.models.load()
        for model in self.models.all():
            key = self._key(model)
            if key in self._published:
                continue
            try:
                self.artifacts.publish_bundles(model.folder)
                if key not in {(record.name, record.version) for record in self.registry.models()}:
                    self.registry.publish_model(*key)
                    self.registry.activate_model(*key)
            except (BundleError, BadRequestError) as err:
                if self._unpublished.get(key) != str(err):
                    logger.error("model=%s version=%d bundles are not published: %s", *key, err)  # noqa: TRY400 - no traceback for a bad file
                self._unpublished[key] = str(err)
                continue
            self._published.add(key)
            self._tell_devices({"op": "update"})

    def _active_model(self) -> Model | None:
        active = [record for record in self.registry.models() if record.active]
        for record in sorted(active, key=lambda record: record.published_at, reverse=True):
            try:
                return self.models.get(record.name, str(record.version))
            except (NotReadyError, UnknownModelError):
                continue
        return None

    @staticmethod
    def _key(model: Model) -> tuple[str, int]:
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
        self._broker.start()
        host = "127.0.0.1" if address.host in ("0.0.0.0", "::") else address.host  # noqa: S104
        local = BrokerAddress(host, self._broker.port, settings.tls)
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
        """Bring the broker in line with the registry, whoever changed it."""
        with self._changing:
            current = {
                device.id: device for device in self.registry.devices() if device.revoked_at is None
            }
            for device_id in set(self._known) - set(current):
                self._expel(device_id)
            for device in current.values():
                self._admit(device)

    def _admit(self, device: Device) -> None:
        known = self._known.get(device.id)
        if known is not None and known.credential_sha256 == device.credential_sha256:
            return
        if self._broker is not None:
            self._broker.set_principal(
                Principal(device.id, "device", device.fleet, device.credential_sha256)
            )
        self._known[device.id] = device

    def _expel(self, device_id: str) -> None:
        if self._broker is not None:
            self._broker.remove_principal(device_id)
        if self._admin is not None:
            self._admin.remove_device(device_id)
        self._known.pop(device_id, None)

    def _note_seen(self, device_id: str) -> None:
        self._seen.add(device_id)

    def _tell_devices(self, command: Mapping[str, Any]) -> None:
        for device in self._known.values():
            self.command(device, command)

    def _keep_house(self) -> None:
        next_timestamp = time.monotonic() + TIMESTAMP_S
        while not self._stopping.wait(HOUSEKEEPING_S):
            try:
                self.publish_models()
                self._sync_devices()
                seen, self._seen = self._seen, set()
                if seen:
                    self.registry.touch(*seen)
                if time.monotonic() >= next_timestamp:
                    self.artifacts.refresh_timestamp()
                    next_timestamp = time.monotonic() + TIMESTAMP_S
            except SplitedgeError as err:
                logger.warning("housekeeping: %s", err)
            except Exception:  # outermost loop of this thread: one bad turn must not be the last
                logger.exception("housekeeping failed")
