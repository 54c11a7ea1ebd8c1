"""The server as one value: its state, its parts, and how they start and stop.

The API lives in this process; in the role "all" it takes the queries over MQTT too, in the role
"api" backends take them (`server.roles`). A housekeeping thread follows changes of other processes
on disk: exported models, revoked devices, timestamps that expire.
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
from edge_sdk.errors import ConfigurationError
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.wire.topics import Kind, Topic
from server.access.recent_logins import RecentLogins
from server.alerts.limits import AlertLimits
from server.alerts.senders import open_senders
from server.alerts.trainings import running_trainings
from server.alerts.watch import AlertWatch, manifest_reader
from server.allocation import Choice, is_shallower
from server.audit.broker_events import read_broker_event
from server.audit.log import AuditLog
from server.backend.worker import MqttWorker
from server.deployment.assignment import Assigner
from server.deployment.calls import UpdateCalls
from server.deployment.heartbeats import Heartbeats, News, hear_devices
from server.deployment.publisher import ModelPublisher
from server.errors import ArtifactError
from server.every_role.duties import Duties
from server.every_role.serving import Serving
from server.fleet_broker import FleetBroker
from server.listening.certificate import CertificateEnds
from server.membership.calls import OrderCalls
from server.metrics.server_metrics import ServerMetrics
from server.registry.credentials import mosquitto_hash
from server.registry.database import open_registry
from server.registry.location import settle
from server.registry.operator import load_or_create_operator_secret
from server.registry.records import Device
from server.registry.writer.lock import take_writer_lock
from server.rollouts.runner import RolloutRunner
from server.settings import ServerSettings
from server.signing.artifacts import ArtifactRepository, SignedFiles
from server.signing.clock import Clock, utc_now
from server.signing.keys import read_passphrase
from server.signing.report import ExpiryWarnings, problems
from server.store.files import StoredFiles
from server.store.upload import StoreUpload
from server.telemetry.recorder import TelemetryRecorder

logger = logging.getLogger(__name__)

HOUSEKEEPING_S: Final = 1.0
FULL_CHECK_S: Final = 30.0  # of everything, changed or not
TIMESTAMP_S: Final = 3600.0
BROKER_WAIT_S: Final = 5.0


class Services:
    """Everything behind the routes.

    Args:
        settings: where the state is, and the limits.
        clock: the time to sign by.
    Raises: StateInUseError if another server writes to the registry; at `start`, ConfigurationError
        or LinkError saying what to change.
    """

    def __init__(self, settings: ServerSettings, *, clock: Clock = utc_now) -> None:
        self.settings = settings
        make_folder(settings.state, mode=0o700)
        location = settle(settings.state, settings.registry)
        # before the registry is opened, which may bring its tables up to date
        self._writer = take_writer_lock(location)
        self.registry = open_registry(settings.state, location)
        self._registry_location = location
        self.artifacts = ArtifactRepository(
            settings.state,
            passphrase=read_passphrase(settings.key_passphrase_file),
            root_keys=settings.root_keys,
            clock=clock,
        )
        self.signed = SignedFiles.of(settings.state)
        catalogue = self.registry.catalogue
        serving = Serving.open(settings, catalogue)
        self.models, self.batcher = serving.models, serving.batcher
        self.inference, self.traces = serving.inference, serving.traces
        self.recent_logins = RecentLogins(self.registry.keys.count_use, self.seen)
        self.audit = AuditLog(
            self.registry.trail, rows=settings.audit_rows, age_s=86_400 * settings.audit_days
        )
        self.broker = FleetBroker(settings, self.registry, self._note_broker_event)
        self.publisher = ModelPublisher(
            self.models, self.artifacts, catalogue, hold=settings.new_versions == "hold"
        )
        self._upload = None
        if settings.artifacts is not None:
            files = StoredFiles(settings.artifacts)
            self._upload = StoreUpload(files, settings.state, self.publisher.folders)
        self.rollouts = RolloutRunner(self.registry, self.registry.telemetry, time.monotonic)
        self.assigner = Assigner(
            self.registry,
            wanted=self.publisher.wanted,
            published=self.publisher.published,
            rule=settings.allocation,
        )
        self.operator_sha256 = ""
        self._link: MqttLink | None = None
        self._worker: MqttWorker | None = None
        self._heartbeats = Heartbeats()
        self.metrics = ServerMetrics(self)
        self.telemetry = TelemetryRecorder(
            self.registry.telemetry,
            points_most=settings.telemetry_points,
            recorded=self.metrics.devices.add,
        )
        self.listener_certificate: Callable[[], CertificateEnds | None] = lambda: None
        limits = AlertLimits.load(settings.state)
        for path in limits.open_secrets(settings.state):
            logger.warning("%s: other users can read this secret; run `chmod go= %s`", path, path)
        self.alerts = AlertWatch(
            self.registry,
            limits,
            open_senders(limits, settings.state),
            manifests=manifest_reader(settings.state / "models"),
            signing=partial(problems, self.artifacts),
            certificate=self.certificate_ends,
            trainings=partial(running_trainings, settings.state / "training"),
        )
        self._calls = UpdateCalls()
        self._orders = OrderCalls()
        self._devices: list[Device] = []
        self._devices_read = -1  # the registry's last change that they show
        self._followed = -1  # the registry's last change that the broker's logins show
        self._next_full_check = 0.0
        self._new_hashes: dict[tuple[str, str], str] = {}  # of devices that lack Mosquitto's
        self._next_signing = 0.0
        self._expiry = ExpiryWarnings(clock)
        self._duties = Duties()
        self._turned_at = time.monotonic()  # housekeeping
        self._stopping = threading.Event()
        self._housekeeper = threading.Thread(target=self._housekeeping, daemon=True)

    def start(self) -> None:
        """Open the state, publish the models on disk, start the broker and serve its queries."""
        duties, state = self._duties, self.settings.state
        duties.do("registry's place", partial(self._registry_location.save, state))
        duties.do("signing", self._keep_signed, fatal=(ArtifactError, ConfigurationError))
        secret = load_or_create_operator_secret(state)
        self.operator_sha256 = hashlib.sha256(secret.encode()).hexdigest()
        self.publisher.refresh()
        self._copy_artifacts()
        link = self._link = self.broker.start()
        duties.do("devices", self.broker.sync)
        duties.do("calls to devices", self._call_devices)  # later turns see what has changed since
        self.broker.warn_of_loopback()
        hear_devices(link, self._heartbeats.note_message)
        if self.settings.role == "all":
            self._worker = MqttWorker(link, self.inference, seen=self._heartbeats.note)
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
        self._duties.do("audit log", partial(self.audit.write, last=True))
        self._duties.do("uses of keys", self.registry.keys.write_uses)
        self.telemetry.note(self._heartbeats.take().heartbeats)
        self._duties.do("history", partial(self.telemetry.write, last=True))
        self._duties.do("alerts", self.alerts.close)
        if self.traces is not None:
            self.traces.close()
        self.registry.checkpoint()
        self.registry.close()
        self._writer.release()

    def hangs(self, limit_s: float) -> str:
        """Why the server does not do its work; empty while it does.

        Args:
            limit_s: time that a batch, or a turn of housekeeping, may take.
        """
        silent_s = time.monotonic() - self._turned_at
        if self._housekeeper.is_alive() and silent_s > limit_s:
            return f"housekeeping has not come back for {silent_s:.0f} s"
        return self.batcher.hangs(limit_s)

    # for the metrics

    def certificate_ends(self) -> CertificateEnds | None:
        """Ends of the certificate that the listener shows; None without TLS, or without one."""
        return self.listener_certificate()

    @property
    def connected(self) -> bool:
        """Whether the link to the broker is up."""
        return self._link is not None and self._link.connected

    @property
    def malformed(self) -> int:
        """Number of messages over MQTT that were no queries."""
        return 0 if self._worker is None else self._worker.malformed

    # for the management routes

    @property
    def approves_devices(self) -> bool:
        """Whether every new device waits for the operator's approval."""
        return self.settings.enrolment == "approve"

    def root_bytes(self, fingerprint: str = "") -> bytes:
        """The TUF root that a new device is given: that of its token, or the newest.

        Raises: ClockError, NotReadyError while no device can enrol.
        """
        return self.artifacts.root_for_enrolment(fingerprint)

    def broker_address(self) -> dict[str, Any]:
        """The broker's `url` and `max_packet_bytes`, as devices are told."""
        return {"url": self.broker.public_url, "max_packet_bytes": self.settings.max_packet_bytes}

    def seen(self, device_id: str) -> None:
        """Note that a device was heard; housekeeping writes it down."""
        self._heartbeats.note(device_id)

    def admit(self, device: Device, credential: str) -> None:
        """Let a new device log in at the broker.

        Raises: LinkError or ConfigurationError if the broker did not take it.
        """
        self.broker.admit(device, credential)

    def logged_in(self, device: Device, credential: str) -> None:
        """Note a login over HTTP: a Mosquitto may have waited to see the credential."""
        key = device.id, device.credential_sha256
        if device.mosquitto_hash is None and key not in self._new_hashes:
            self._new_hashes[key] = mosquitto_hash(credential)
        self.broker.logged_in(device, credential)

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
        if not device.active:
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
        while not self._stopping.wait(HOUSEKEEPING_S):
            self._turned_at = time.monotonic()
            full = time.monotonic() >= self._next_full_check
            if full:
                self._next_full_check = time.monotonic() + FULL_CHECK_S
            # revocations come first; a duty that fails does not stop the next one
            self._duties.do("devices", partial(self._follow_registry, full=full))
            self._duties.do("logins", self._keep_hashes)
            self._duties.do("registry's lock", self._writer.keep)
            if self._writer.lost:
                continue  # another server publishes and signs now
            self._duties.do("models", partial(self.publisher.refresh, again=full))
            self._copy_artifacts()  # before devices are called to run them
            self._duties.do("calls to devices", self._call_devices)
            self._duties.do("roll-outs", self.rollouts.turn)
            self._duties.do("audit log", self.audit.write)
            self._duties.do("history", self.telemetry.write)
            self._duties.do("alerts", self.alerts.turn)
            if full:
                self._duties.do("uses of keys", self.registry.keys.write_uses)
                self._duties.do("bounds", self._keep_bounds)
            self._duties.do("signing", self._keep_signed)

    def _keep_bounds(self) -> None:
        # by a clock that is years off, all that is kept would be too old, or of the future
        by_age = self.artifacts.clock_problem is None
        self._duties.do("bounds of the history", partial(self.telemetry.keep_bounds, by_age=by_age))
        self._duties.do("bounds of the audit log", partial(self.audit.prune, by_age=by_age))
        self._duties.do("bounds of the alerts", partial(self.alerts.keep_bounds, by_age=by_age))

    def _copy_artifacts(self) -> None:
        if self._upload is not None:
            self._duties.do("artifacts", self._upload.refresh)

    def _follow_registry(self, *, full: bool) -> None:
        change = self.registry.last_change()
        if full or change != self._followed:
            self.broker.sync()
            self.assigner.follow_pins(self.reassign)
            self._followed = change  # after a failure it stays, so the next turn tries again

    def _keep_hashes(self) -> None:
        new = dict(self._new_hashes)
        if new:
            self.registry.keep_mosquitto_hashes(new)
            for key in new:
                del self._new_hashes[key]

    def _call_devices(self) -> None:
        """Note what devices report, and call those that should run another version."""
        news = self._heartbeats.take()
        self.telemetry.note(news.heartbeats, news.gone)
        if news.seen:
            self._duties.do("last seen", partial(self.registry.touch, *news.seen))
        if news.gone:
            self._duties.do("devices that went away", partial(self.registry.depart, *news.gone))
        heard_at = {device: at for device, (at, _) in news.heartbeats.items()}
        self.rollouts.heard(news.running, heard_at)
        reports = self.registry.reports.all()
        new = {
            device: bundle
            for device, bundle in news.running.items()
            if device not in reports or reports[device].running != bundle
        }
        if new:
            self._duties.do("reports of devices", partial(self.registry.reports.note_running, new))
            reports = self.registry.reports.all()
        change = self.registry.last_change()
        if change != self._devices_read:  # enrolments, revocations and assignments are changes
            self._devices = [one for one in self.registry.devices() if one.active]
            self._devices_read = change
        devices = self._devices
        targets = self.assigner.versions(devices)
        self._calls.came_back(news.connected)
        pins = self.registry.capabilities.pinned()
        pinned = {device: pin.bundle for device, pin in pins.items() if pin.bundle is not None}
        for device in self._calls.due(devices, targets, reports, news.seen, pinned):
            self.command(device, {"op": "update"})
        self._send_orders(news)

    def _send_orders(self, news: News) -> None:
        """Tell devices what they have been ordered to do, until they have done it."""
        active = {device.id: device for device in self._devices}
        orders = [one for one in self.registry.membership.orders() if one.device in active]
        for order in self._orders.due(orders, news.seen, news.connected):
            command = {"op": order.op, "argument": order.argument}
            self.command(active[order.device], command)

    def _note_broker_event(self, told: Mapping[str, Any]) -> None:
        event = read_broker_event(told)
        if event is not None:
            self.audit.note(event)

    def _keep_signed(self) -> None:
        """Sign a fresh timestamp when it is due, and what could not be signed before."""
        if time.monotonic() < self._next_signing:
            return
        self.artifacts.open_or_create()
        self._next_signing = time.monotonic() + TIMESTAMP_S
        if self._duties.fails("signing"):
            self._next_full_check = 0.0  # models that could not be signed are tried again at once
        self._expiry.log(self.artifacts)
