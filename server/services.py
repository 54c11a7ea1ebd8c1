"""The server as one value: its state, its parts, and how they start and stop.

The API and the backend live in this process. A housekeeping thread follows changes of other
processes on disk: exported models, revoked devices, timestamps that expire.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import orjson

from edge_sdk.durable import make_folder
from edge_sdk.errors import SplitedgeError
from edge_sdk.mqtt import MqttLink
from edge_sdk.wire.topics import Kind, Topic
from server.allocation import Choice, is_shallower
from server.backend.batcher import Batcher
from server.backend.inference import Inference
from server.backend.models import ModelStore
from server.backend.worker import MqttWorker
from server.deployment.assignment import Assigner
from server.deployment.calls import UpdateCalls
from server.deployment.heartbeats import Heartbeats
from server.deployment.publisher import ModelPublisher, refuse_used_number
from server.fleet_broker import FleetBroker
from server.registry.artifacts import ArtifactRepository
from server.registry.database import open_registry
from server.registry.operator import load_or_create_operator_secret
from server.registry.records import Device
from server.settings import ServerSettings

logger = logging.getLogger(__name__)

HOUSEKEEPING_S: Final = 1.0
FULL_CHECK_S: Final = 30.0  # of everything, changed or not
TIMESTAMP_S: Final = 3600.0
BROKER_WAIT_S: Final = 5.0


class Services:
    """Everything behind the routes.

    Args:
        settings: where the state is, and the limits.
    Raises: at `start`, ConfigurationError or LinkError saying what to change.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        make_folder(settings.state, mode=0o700)
        self.registry = open_registry(settings.state)
        self.artifacts = ArtifactRepository(settings.state)
        catalogue = self.registry.catalogue
        self.models = ModelStore(
            settings.state / "models",
            threads=settings.threads,
            check=partial(refuse_used_number, catalogue),
        )
        self.batcher = Batcher(
            batch_max=settings.batch_max,
            queue_max=settings.queue_max,
            queue_bytes=settings.queue_bytes,
        )
        self.inference = Inference(self.models, self.batcher, settings.batch_max)
        self.broker = FleetBroker(settings, self.registry)
        self.publisher = ModelPublisher(self.models, self.artifacts, catalogue)
        self.assigner = Assigner(
            self.registry,
            wanted=self.publisher.wanted,
            published=self.publisher.published,
            rule=settings.allocation,
        )
        self.operator_sha256 = ""
        self._link: MqttLink | None = None
        self._heartbeats = Heartbeats()
        self._calls = UpdateCalls()
        self._devices: list[Device] = []
        self._devices_read = -1  # the registry's last change that they show
        self._followed = -1  # the registry's last change that the broker's logins show
        self._next_full_check = 0.0
        self._next_timestamp = 0.0
        self._complaints: dict[str, str] = {}
        self._stopping = threading.Event()
        self._housekeeper = threading.Thread(target=self._housekeeping, daemon=True)

    def start(self) -> None:
        """Open the state, publish the models on disk, start the broker and serve its queries."""
        self.artifacts.open_or_create()
        secret = load_or_create_operator_secret(self.settings.state)
        self.operator_sha256 = hashlib.sha256(secret.encode()).hexdigest()
        self.publisher.refresh()
        link = self._link = self.broker.start()
        self._try("devices", self.broker.sync)
        self._call_devices()  # nobody yet: later turns see what has changed since
        self.broker.warn_of_loopback()
        beats = self._heartbeats
        MqttWorker(link, self.inference, seen=beats.note, heard=beats.note_message)
        link.start()
        link.wait_connected(BROKER_WAIT_S)
        self._housekeeper.start()

    def stop(self) -> None:
        """Stop the parts in the reverse order."""
        self._stopping.set()
        if self._housekeeper.is_alive():
            self._housekeeper.join()
        self.batcher.stop()
        if self._link is not None:
            self._link.stop()
        self.broker.stop()
        self.registry.close()

    # for the management routes

    def root_bytes(self) -> bytes:
        """The TUF root that a new device is given."""
        return self.artifacts.root_bytes

    def broker_address(self) -> dict[str, Any]:
        """The broker's `url` and `max_packet_bytes`, as devices are told."""
        return {"url": self.broker.public_url, "max_packet_bytes": self.settings.max_packet_bytes}

    def admit(self, device: Device, credential: str) -> None:
        """Let a new device log in at the broker.

        Raises: LinkError or ConfigurationError if the broker did not take it.
        """
        self.broker.admit(device, credential)

    def expel(self, device: Device) -> None:
        """Refuse a device at the broker from now on, and cut its connection."""
        self.broker.expel(device.id)

    def assign(self, device: Device) -> str | None:
        """Choose and note the bundle that `device` is to run; None while its fleet has no model."""
        choice = self._assign(device)
        return None if choice is None else choice.bundle

    def reassign(self, device_id: str, *, left: bool = False) -> Device:
        """Choose a device's bundle again, and tell the device if it is another one.

        Args:
            left: whether a bundle that gives way to a shallower one, which nobody pinned, is noted
                as left, so that the device does not come back to it at once.
        Returns: the device as it is then.
        """
        device = self.registry.device(device_id)
        before = device.bundle
        if device.revoked_at is not None:
            return device
        choice = self._assign(device)
        if (choice and choice.bundle) != before:
            logger.info("device=%s is given another bundle", device.id)
            self.command(device, {"op": "update"})
        if left and before and choice and not choice.pinned and is_shallower(choice.bundle, before):
            why = "the device got too slow for it, or has too little memory left"
            self.registry.capabilities.failed(device_id, before, why, kind="conditions")
        return self.registry.device(device_id)

    def _assign(self, device: Device) -> Choice | None:
        choice = self.assigner.choose(device)
        if choice is not None:
            self.registry.assign(device.id, choice.depth, choice.bundle)
        return choice

    def command(self, device: Device, command: Mapping[str, Any]) -> bool:
        """Send a device a command; whether the link to the broker took it."""
        if self._link is None:
            return False
        topic = str(Topic(device.fleet, device.id, Kind.COMMAND))
        return self._link.publish(topic, orjson.dumps(command))

    # housekeeping

    def _housekeeping(self) -> None:
        self._next_timestamp = time.monotonic() + TIMESTAMP_S
        while not self._stopping.wait(HOUSEKEEPING_S):
            full = time.monotonic() >= self._next_full_check
            if full:
                self._next_full_check = time.monotonic() + FULL_CHECK_S
            # revocations come first; a duty that fails does not stop the next one
            self._try("devices", partial(self._follow_registry, full=full))
            self._try("models", partial(self.publisher.refresh, again=full))
            self._try("calls to devices", self._call_devices)
            self._try("timestamp", self._keep_timestamp)

    def _follow_registry(self, *, full: bool) -> None:
        change = self.registry.last_change()
        if full or change != self._followed:
            self.broker.sync()
            self.assigner.follow_pins(self.reassign)
            self._followed = change  # after a failure it stays, so the next turn tries again

    def _call_devices(self) -> None:
        """Note what devices report, and call those that should run another version."""
        news = self._heartbeats.take()
        if news.seen:
            self.registry.touch(*news.seen)
        reports = self.registry.reports.all()
        new = {
            device: bundle
            for device, bundle in news.running.items()
            if device not in reports or reports[device].running != bundle
        }
        if new:
            self.registry.reports.note_running(new)
            reports = self.registry.reports.all()
        change = self.registry.last_change()
        if change != self._devices_read:  # enrolments, revocations and assignments are changes
            self._devices = [one for one in self.registry.devices() if one.revoked_at is None]
            self._devices_read = change
        devices = self._devices
        targets = {}
        for fleet in {device.fleet for device in devices}:
            model = self.publisher.wanted(fleet)
            if model is not None:
                targets[fleet] = f"{model.manifest.name}/{model.manifest.version}"
        self._calls.came_back(news.connected)
        pins = self.registry.capabilities.pinned()
        pinned = {device: pin.bundle for device, pin in pins.items() if pin.bundle is not None}
        for device in self._calls.due(devices, targets, reports, news.seen, pinned):
            self.command(device, {"op": "update"})

    def _keep_timestamp(self) -> None:
        if time.monotonic() >= self._next_timestamp:
            self.artifacts.refresh_timestamp()
            self._next_timestamp = time.monotonic() + TIMESTAMP_S

    def _try(self, duty: str, work: Callable[[], None]) -> None:
        """Do a duty; log its failure once, until it succeeds or fails in another way."""
        try:
            work()
        except SplitedgeError as err:
            if self._complaints.get(duty) != str(err):
                logger.warning("%s: %s; it is tried again", duty, err)
            self._complaints[duty] = str(err)
        except Exception:  # outermost loop of this thread: one failed turn must not be the last
            logger.exception("%s: housekeeping failed", duty)
        else:
            self._complaints.pop(duty, None)
