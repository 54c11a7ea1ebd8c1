"""Facts of a device's history: its answers over time and their uncertainty, as charts have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from edge_sdk.answers.prediction import DEVICE, SERVER
from server.registry.database import Registry
from server.registry.telemetry.point import TelemetryPoint, merged

POINTS_MOST: Final = 240


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """A device in one span of time that ends at `at`, UTC seconds since 1970.

    Attributes:
        device_ms, device_high_ms: latency of answers of the device itself, median and 95 %.
        server_ms: median latency of answers of the server, as the device saw them.
        memory_bytes: free on the device; the least of the span.
    """

    at: float
    span_s: float
    exits: int
    offloads: int
    fallbacks: int
    device_ms: float | None
    device_high_ms: float | None
    server_ms: float | None
    round_trip_ms: float | None
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """Histogram of the answers' uncertainty; `edges` has one more entry than `counts`."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HistoryFacts:
    """A device in a stretch of time.

    Attributes:
        uncertainty: of all answers since the gate was last another one; None if no agent told it.
        threshold: of the gate now; None if it is not known, or infinite.
        agreement_bound: highest disagreement with the server among exits, with 95 % confidence, and
            its limit; None without that controller.
        audits: exits behind that bound.
        spent, earned: of the budget, in the unit of its cost; None without one.
        restarts: starts of the agent.
    """

    points: list[HistoryPoint]
    uncertainty: Uncertainty | None = None
    threshold: float | None = None
    exits: int = 0
    offloads: int = 0
    fallbacks: int = 0
    restarts: int = 0
    agreement_bound: float | None = None
    agreement_delta: float | None = None
    audits: int | None = None
    spent: float | None = None
    earned: float | None = None


def history_facts(registry: Registry, device_id: str, since_s: float) -> HistoryFacts:
    """The history of a device in the last `since_s` seconds.

    Raises: UnknownDeviceError.
    """
    registry.device(device_id)
    return summed_up(registry.telemetry.of(device_id, since_s=since_s, points_max=POINTS_MOST))


def summed_up(points: Sequence[TelemetryPoint]) -> HistoryFacts:
    """The facts of points that follow each other, oldest first."""
    if not points:
        return HistoryFacts([])
    whole = merged(points)
    return HistoryFacts(
        points=[_point(one) for one in points],
        uncertainty=Uncertainty(whole.uncertainty_edges, whole.uncertainty)
        if whole.uncertainty
        else None,
        threshold=whole.threshold,
        exits=whole.exits,
        offloads=whole.offloads,
        fallbacks=whole.fallbacks,
        restarts=whole.restarts,
        agreement_bound=whole.agreement_bound,
        agreement_delta=whole.agreement_delta,
        audits=whole.audits,
        spent=whole.spent,
        earned=whole.earned,
    )


def _point(one: TelemetryPoint) -> HistoryPoint:
    return HistoryPoint(
        at=one.at,
        span_s=one.span_s,
        exits=one.exits,
        offloads=one.offloads,
        fallbacks=one.fallbacks,
        device_ms=one.latency_ms(DEVICE, 0.5),
        device_high_ms=one.latency_ms(DEVICE, 0.95),
        server_ms=one.latency_ms(SERVER, 0.5),
        round_trip_ms=one.round_trip_ms,
        memory_bytes=one.memory_available_bytes,
    )
