"""A backend: it answers queries over MQTT and HTTP, and only reads what the API has written.

Several backends share the queries of all devices by a shared subscription. Each follows the
registry: the versions that are active there are the ones that it serves.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from pathlib import Path
from typing import Final

from edge_sdk.errors import ConfigurationError
from edge_sdk.wire.broker_address import BrokerAddress
from server.access.recent_logins import RecentLogins
from server.backend.worker import MqttWorker
from server.broker.mosquitto_files import SHARED_GROUP
from server.deployment.publisher import follow_active
from server.every_role.duties import Duties
from server.every_role.serving import Serving
from server.fleet_broker import link_to
from server.metrics.server_metrics import BackendMetrics
from server.registry.database import open_registry
from server.registry.location import RegistryLocation
from server.registry.operator import OPERATOR_KEY, load_operator_secret
from server.registry.records import Device
from server.settings import ServerSettings
from server.signing.artifacts import SignedFiles
from server.store.files import StoredFiles
from server.store.mirror import StoreMirror

logger = logging.getLogger(__name__)

TURN_S: Final = 1.0
FULL_CHECK_S: Final = 30.0  # of models that could not be loaded, too
BROKER_WAIT_S: Final = 5.0
# A machine that loses its power says no goodbye. Mosquitto gives up a silent client after one and a
# half of this, and sends it its share of the queries until then.
KEEPALIVE_S: Final = 4
# of queries that the broker had sent before it was told to send no more; with the link's own end
# well within `stopping.DEADLINE_S`
DRAIN_S: Final = 4.0
_DRAIN_POLL_S: Final = 0.01


class Backend:
    """The parts of a backend, and how they start and stop.

    Args:
        location: of the registry, which the API has made.
        pinned: certificate that the broker must present; None for one that is verified.
    Raises: at `start`, ConfigurationError or LinkError saying what to change.
    """

    def __init__(
        self, settings: ServerSettings, location: RegistryLocation, pinned: Path | None = None
    ) -> None:
        assert isinstance(settings.broker, BrokerAddress), "the settings refuse others"
        self.settings = settings
        self.registry = open_registry(settings.state, location)
        serving = Serving.open(settings, self.registry.catalogue)
        self.models, self.batcher = serving.models, serving.batcher
        self.inference, self.traces = serving.inference, serving.traces
        self.recent_logins = RecentLogins(self.registry.keys.count_use, self.seen)
        self._mirror = None
        if settings.artifacts is not None:
            self._mirror = StoreMirror(StoredFiles(settings.artifacts), settings.state)
        self.signed = SignedFiles.of(settings.state)
        self.operator_sha256 = _operator_sha256(settings.state)
        self.metrics = BackendMetrics(self)
        self._link = link_to(settings, settings.broker, pinned=pinned, keepalive_s=KEEPALIVE_S)
        self._worker: MqttWorker | None = None
        self._told = ""  # why the link is down, as it was logged
        self._duties = Duties()
        self._turned_at = time.monotonic()
        self._stopping = threading.Event()
        self._follower = threading.Thread(
            target=self._follow, name="splitedge-registry", daemon=True
        )

    def start(self) -> None:
        """Load the models, and take queries once there is one."""
        self._load(again=False)
        self._link.start()
        self._link.wait_connected(BROKER_WAIT_S)
        if self._link.refused:
            raise ConfigurationError(
                f"--mqtt {self._link.address.url}: the broker refuses the shared subscription, by"
                " which backends share the queries. The embedded broker has none: start the server"
                " with `splitedge server api --mqtt mosquitto`. On a broker of your own, allow the"
                f" user to subscribe to $share/{SHARED_GROUP}/splitedge/v1/+/+/query; `splitedge"
                " server broker-config` writes a configuration that does"
            )
        self._follower.start()

    def stop(self) -> None:
        """Leave the queries that come from now on to the others, answer the rest, and end."""
        self._stopping.set()
        if self._follower.is_alive():
            self._follower.join()
        end = time.monotonic() + DRAIN_S
        if self._worker is not None:
            self._worker.leave(DRAIN_S / 2)
        while not self.batcher.idle and time.monotonic() < end:
            time.sleep(_DRAIN_POLL_S)
        self.batcher.stop()
        self._link.flush(max(0.0, end - time.monotonic()))
        self._link.stop()
        if self.traces is not None:
            self.traces.close()
        self.registry.close()

    def hangs(self, limit_s: float) -> str:
        """Why the backend does not do its work; empty while it does.

        Args:
            limit_s: time that a batch, or a look at the registry, may take.
        """
        silent_s = time.monotonic() - self._turned_at
        if self._follower.is_alive() and silent_s > limit_s:
            return f"the look at the registry has not come back for {silent_s:.0f} s"
        return self.batcher.hangs(limit_s)

    @property
    def broker_url(self) -> str:
        """The broker that it has joined."""
        return self._link.address.url

    @property
    def connected(self) -> bool:
        """Whether the link to the broker is up."""
        return self._link.connected

    @property
    def malformed(self) -> int:
        """Number of messages over MQTT that were no queries."""
        return 0 if self._worker is None else self._worker.malformed

    def logged_in(self, device: Device, credential: str) -> None:
        """Nothing: the API tells the broker of credentials."""

    def seen(self, device_id: str) -> None:
        """Nothing: the API notes who was heard, by the heartbeats."""

    def _follow(self) -> None:
        next_full = time.monotonic() + FULL_CHECK_S
        while not self._stopping.wait(TURN_S):
            self._turned_at = time.monotonic()
            full = self._turned_at >= next_full
            if full:
                next_full = self._turned_at + FULL_CHECK_S
            self._load(again=full)
            self._tell_link()

    def _tell_link(self) -> None:
        """Log once that the broker is away, or refuses the login, and that it is back."""
        lost = "" if self._link.connected else self._link.last_error
        if lost and lost != self._told:
            logger.warning("%s: %s; it takes no queries meanwhile", self.broker_url, lost)
        elif self._told and not lost:
            logger.info("%s: connected again", self.broker_url)
        self._told = lost

    def _load(self, *, again: bool) -> None:
        if self._mirror is not None:
            self._duties.do("artifacts", self._mirror.refresh)
        self._duties.do("models", lambda: self.models.load(again=again))
        self._duties.do("active versions", self._activate)

    def _activate(self) -> None:
        follow_active(self.models, self.registry.catalogue)
        # without a model it would take a share of the queries, and answer none of them
        if self._worker is None and self.models.ready:
            self._worker = MqttWorker(self._link, self.inference, shared=SHARED_GROUP)


def _operator_sha256(state: Path) -> str:
    """The hash of the operator's secret, where the state is the API's; else that of nobody."""
    if not (state / OPERATOR_KEY).exists():
        return ""
    return hashlib.sha256(load_operator_secret(state).encode()).hexdigest()
