"""Metrics of the server's state at the time of a scrape: queue, devices, ends of validity."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, Final, Protocol

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from edge_sdk.errors import SplitedgeError
from server.backend.inference import Inference
from server.deployment.presence import presence_of
from server.errors import ServerError
from server.listening.certificate import CertificateEnds
from server.registry.alerts.alert import KINDS, LEVELS
from server.registry.database import Registry
from server.registry.records import Device
from server.registry.telemetry.history import LastReading
from server.settings import ServerSettings
from server.signing.artifacts import ArtifactRepository
from server.tracing.query_traces import QueryTraces

logger = logging.getLogger(__name__)

# reading signed metadata and certificates takes some milliseconds, and they change once an hour
VALIDITY_S: Final = 60.0

Gauges = Mapping[tuple[str, ...], float]


class QueueServices(Protocol):
    """The part of a process that answers queries."""

    @property
    def settings(self) -> ServerSettings:
        """The limits of the queue."""

    @property
    def inference(self) -> Inference:
        """The queue and the accounts of senders."""

    @property
    def traces(self) -> QueryTraces | None:
        """The traces of queries, if there are any."""

    @property
    def malformed(self) -> int:
        """Number of messages over MQTT that were no queries."""

    @property
    def connected(self) -> bool:
        """Whether the link to the broker is up."""


class StateServices(QueueServices, Protocol):
    """The part of the server that is looked at."""

    @property
    def registry(self) -> Registry:
        """The devices."""

    @property
    def artifacts(self) -> ArtifactRepository:
        """The signed metadata."""

    def certificate_ends(self) -> CertificateEnds | None:
        """The ends of the TLS certificate; None without TLS."""


class QueueMetrics(Collector):
    """Metrics of the queue, the link and the traces; collects when Prometheus asks."""

    def __init__(self, services: QueueServices) -> None:
        self._services = services

    def collect(self) -> Iterator[Metric]:
        """The metrics."""
        yield from self._queue()
        yield from self._traces()
        yield _gauge(
            "splitedge_broker_up", "1 if the broker takes messages.", self._services.connected
        )

    def _traces(self) -> Iterator[Metric]:
        traces = self._services.traces
        if traces is None:
            return
        text = "Spans of traces, by outcome: sent, or dropped because no collector took them."
        family = CounterMetricFamily("splitedge_trace_spans", text, labels=("outcome",))
        for outcome, count in traces.report().items():
            family.add_metric((outcome,), count)
        yield family

    def _queue(self) -> Iterator[Metric]:
        inference = self._services.inference
        batcher, limits = inference.batcher, self._services.settings
        yield _gauge("splitedge_queue_queries", "Queries that wait.", batcher.waiting)
        yield _gauge(
            "splitedge_queue_bytes", "Bytes of the queries that wait.", batcher.waiting_bytes
        )
        yield _gauge("splitedge_queue_limit_queries", "Most that may wait.", limits.queue_max)
        yield _gauge("splitedge_queue_limit_bytes", "Most bytes that may wait.", limits.queue_bytes)
        refusals = CounterMetricFamily(
            "splitedge_refusals",
            "Queries without an answer, by reason: limit (of their sender), overloaded, expired,"
            " failed, malformed.",
            labels=("reason",),
        )
        totals = inference.senders.totals()
        for reason, count in (
            ("limit", totals.limited),
            ("overloaded", totals.refused),
            ("expired", totals.expired),
            ("failed", totals.failed),
            ("malformed", self._services.malformed),
        ):
            refusals.add_metric((reason,), count)
        yield refusals
        received = CounterMetricFamily("splitedge_query_received_bytes", "Bytes of queries.")
        received.add_metric((), totals.bytes)
        yield received


class StateMetrics(Collector):
    """Collects when Prometheus asks; nothing is counted in between.

    Args:
        clock: UTC seconds since 1970.
    """

    def __init__(self, services: StateServices, *, clock: Callable[[], float] = time.time) -> None:
        self._services = services
        self._clock = clock
        self._validity: dict[str, float] = {}
        self._validity_read = -VALIDITY_S

    def collect(self) -> Iterator[Metric]:
        """The metrics; those of the registry are missing while it cannot be read."""
        try:
            fleet = list(self._devices())
        except ServerError as err:
            logger.debug("metrics without the registry: %s", err)
            fleet = []
        yield _gauge("splitedge_registry_up", "1 if the registry can be read.", bool(fleet))
        yield from fleet
        text = "End of a certificate's or a signature's validity, as seconds since 1970."
        family = GaugeMetricFamily("splitedge_expiry_timestamp_seconds", text, labels=("what",))
        for what, end in self._expiries().items():
            family.add_metric((what,), end)
        yield family

    def _devices(self) -> Iterator[Metric]:
        """Raises: ServerError if the registry cannot be read."""
        registry, now = self._services.registry, self._clock()
        devices = registry.devices(profiles=False)
        last = registry.telemetry.last()
        states = Counter((device.fleet, _state(device, now)) for device in devices)
        text = "Devices by state: online, silent, waiting (for approval), revoked."
        yield _gauges("splitedge_devices", text, ("fleet", "state"), states)
        active = {
            device.id: device for device in devices if _state(device, now) in ("online", "silent")
        }
        running: Counter[tuple[str, ...]] = Counter()
        for report in registry.reports.all().values():
            if report.device in active and report.running:
                running[(*report.running.split("/")[:2],)] += 1
        alerts = dict.fromkeys(product(KINDS, LEVELS), 0) | Counter(
            (alert.kind, alert.level) for alert in registry.alerts.open()
        )
        text = "Open alerts, those that were silenced included."
        yield _gauges("splitedge_alerts", text, ("kind", "level"), alerts)
        text = "Devices that run a version of a model."
        yield _gauges("splitedge_devices_running", text, ("model", "version"), running)
        yield from _bounds(
            {name: (active[name].fleet, last[name]) for name in last.keys() & active}
        )

    def _expiries(self) -> dict[str, float]:
        if time.monotonic() - self._validity_read >= VALIDITY_S:
            found = {}
            try:
                signed = self._services.artifacts.expiries()
                found = {role: end.timestamp() for role, end in signed.items()}
            except SplitedgeError as err:
                logger.debug("metrics without signing: %s", err)
            ends = self._services.certificate_ends()
            if ends is not None:
                found["certificate"] = ends.served
            self._validity, self._validity_read = found, time.monotonic()
        return self._validity


def _bounds(last: Mapping[str, tuple[str, LastReading]]) -> Iterator[Metric]:
    """Bounds of the devices that keep to an agreement with the server."""
    worst: dict[tuple[str, ...], float] = defaultdict(float)
    without: Counter[tuple[str, ...]] = Counter()
    for fleet, reading in last.values():
        gauges = reading.reading.gauges
        if "agreement_delta" not in gauges:
            continue
        without[fleet,] += "agreement_bound" not in gauges
        if "agreement_bound" in gauges:
            worst[fleet,] = max(worst[fleet,], gauges["agreement_bound"])
    text = "The largest bound of the disagreement among exits that a device of the fleet holds."
    yield _gauges("splitedge_device_disagreement_bound_ratio", text, ("fleet",), worst)
    text = "Devices with an agreement to keep that hold no bound now, and so offload everything."
    yield _gauges("splitedge_devices_without_bound", text, ("fleet",), without)


def _state(device: Device, now: float) -> str:
    presence = presence_of(device, now)
    return "silent" if presence in ("offline", "never") else presence


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(name, about, value=float(value))


def _gauges(name: str, about: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Metric:
    family = GaugeMetricFamily(name, about, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key, value)
    return family
