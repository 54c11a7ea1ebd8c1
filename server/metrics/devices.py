"""Metrics of what devices did, added up by fleet as their points are written.

Devices themselves are no label: a thousand of them would be a thousand series of each metric. The
history of each is in the registry (server.registry.telemetry).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from edge_sdk.answers.tally import LATENCY_BINS, LATENCY_EDGES_MS, UNCERTAINTY_BINS
from server.registry.telemetry.history import Recorded

_LATENCY_LE: Final = (*(f"{edge / 1e3:g}" for edge in LATENCY_EDGES_MS), "+Inf")
_SHARE_LE: Final = (*(f"{((i + 1) / UNCERTAINTY_BINS) ** 2:g}" for i in range(31)), "+Inf")


class DeviceMetrics(Collector):
    """Counts since the server started."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(name, about, ("fleet", *labels), registry=registry)

        self._answers = counter(
            "splitedge_device_answers",
            "Answers of devices by source: device (an exit), server (an offload), fallback.",
            "source",
        )
        self._restarts = counter("splitedge_device_restarts", "Starts of agents.")
        self._bytes = counter(
            "splitedge_device_query_bytes",
            "Payloads of devices' queries (up) and replies (down).",
            "direction",
        )
        self._lost = counter(
            "splitedge_device_late_lost", "Queries for which a device's outbox had no room."
        )
        self._spent = counter(
            "splitedge_device_budget_spent",
            "Cost of offloads, in the unit of the devices' budgets.",
        )
        self._earned = counter(
            "splitedge_device_budget_earned", "What the devices' budgets allowed, in their unit."
        )
        self._joules = counter(
            "splitedge_device_energy_joules", "Energy of the answers of devices that measure it."
        )
        self._latency: dict[tuple[str, str], list[float]] = defaultdict(
            lambda: [0.0] * (LATENCY_BINS + 1)
        )
        self._uncertainty: dict[str, list[int]] = defaultdict(lambda: [0] * UNCERTAINTY_BINS)
        registry.register(self)

    def add(self, recorded: Iterable[Recorded]) -> None:
        """Count points that were written."""
        for one in recorded:
            fleet, point = one.fleet, one.point
            for source, count in (
                ("device", point.exits),
                ("server", point.offloads),
                ("fallback", point.fallbacks),
            ):
                self._answers.labels(fleet, source).inc(count)
            self._restarts.labels(fleet).inc(point.restarts)
            self._bytes.labels(fleet, "up").inc(point.bytes_up)
            self._bytes.labels(fleet, "down").inc(point.bytes_down)
            self._lost.labels(fleet).inc(point.late_lost)
            for counter, value in (
                (self._spent, point.spent),
                (self._earned, point.earned),
                (self._joules, point.joules),
            ):
                if value is not None:
                    counter.labels(fleet).inc(value)
            for source, counts in point.latency.items():
                bins = self._latency[fleet, source]
                for index, count in enumerate(counts):
                    bins[index] += count
                bins[LATENCY_BINS] += point.latency_ms_sum.get(source, 0.0)
            shares = self._uncertainty[fleet]
            for index, count in enumerate(point.uncertainty):
                shares[index] += count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The histograms, whose bins the devices have counted."""
        latency = HistogramMetricFamily(
            "splitedge_device_answer_duration_seconds",
            "Time from a device's call to its answer, by source.",
            labels=("fleet", "source"),
        )
        for key, (*bins, total_ms) in list(self._latency.items()):
            latency.add_metric(key, _buckets(_LATENCY_LE, bins), total_ms / 1e3)
        yield latency
        uncertainty = HistogramMetricFamily(
            "splitedge_device_uncertainty_ratio",
            "Uncertainty of answers, as a share of the largest that the gate can have. The sum is"
            " that of the bins' middles.",
            labels=("fleet",),
        )
        for fleet, counts in list(self._uncertainty.items()):
            middles = ((i * i + (i + 1) ** 2) / 2 / UNCERTAINTY_BINS**2 for i in range(32))
            total = sum(count * middle for count, middle in zip(counts, middles, strict=True))
            uncertainty.add_metric((fleet,), _buckets(_SHARE_LE, counts), total)
        yield uncertainty


def _buckets(edges: Iterable[str], counts: Iterable[float]) -> list[tuple[str, float]]:
    """Running sums, by upper edge."""
    found, below = [], 0.0
    for edge, count in zip(edges, counts, strict=True):
        below += count
        found.append((edge, below))
    return found
