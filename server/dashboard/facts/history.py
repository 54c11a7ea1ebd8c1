"""Facts of a device's history: its answers over time and their uncertainty, as charts have them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from edge_sdk.answers.prediction import DEVICE, SERVER
from edge_sdk.gate.gate import largest_uncertainty
from edge_sdk.manifest import BundleManifest, GatePoint
from server.dashboard.facts.models import bundle_manifest
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
    """Histogram of the uncertainty of answers with one bundle.

    Attributes:
        edges: of the bins, one more than `counts`.
        since: when the bundle began to run, UTC seconds since 1970; None if it ran all the time.
        held_out: share of the held-out samples in each bin; None if the bundle's curve is not
            known, or the device has another gate.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    bundle: str
    since: float | None
    held_out: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class HistoryFacts:
    """A device in a stretch of time.

    Attributes:
        uncertainty: of the answers with the bundle that ran last; None if no agent told it.
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


def history_facts(registry: Registry, models: Path, device_id: str, since_s: float) -> HistoryFacts:
    """The history of a device in the last `since_s` seconds.

    Args:
        models: folder of the exports.
    Raises: UnknownDeviceError.
    """
    registry.device(device_id)
    points = registry.telemetry.of(device_id, since_s=since_s, points_max=POINTS_MOST)
    return summed_up(points, partial(bundle_manifest, models))


def summed_up(
    points: Sequence[TelemetryPoint], manifest_of: Callable[[str], BundleManifest | None]
) -> HistoryFacts:
    """The facts of points that follow each other, oldest first.

    Args:
        manifest_of: of a bundle by its name, if the server has it.
    """
    if not points:
        return HistoryFacts([])
    whole = merged(points)
    return HistoryFacts(
        points=[_point(one) for one in points],
        uncertainty=_uncertainty(points, whole, manifest_of),
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


def held_out_shares(curve: Sequence[GatePoint], edges: Sequence[float]) -> tuple[float, ...] | None:
    """Share of the held-out samples in each bin of a histogram; None for too few points.

    Between two thresholds of the operating curve, where only the share of both together is known,
    the samples count as spread evenly.

    Args:
        edges: of the bins, from 0 to the largest uncertainty of the gate.
    """
    inside = sorted(
        (one.threshold, one.exit_rate) for one in curve if 0 < one.threshold < edges[-1]
    )
    if len(inside) < 3:
        return None
    at, below = zip((0.0, 0.0), *inside, (edges[-1], 1.0), strict=True)
    return tuple(np.diff(np.interp(edges, at, below)).tolist())


def _uncertainty(
    points: Sequence[TelemetryPoint],
    whole: TelemetryPoint,
    manifest_of: Callable[[str], BundleManifest | None],
) -> Uncertainty | None:
    if not whole.uncertainty:
        return None
    others = [index for index, one in enumerate(points) if one.bundle != whole.bundle]
    first = None if not others else points[others[-1] + 1]
    edges, manifest = whole.uncertainty_edges, manifest_of(whole.bundle)
    held_out = None
    if manifest is not None:
        largest = largest_uncertainty(manifest.gate.policy, len(manifest.class_names))
        if math.isclose(largest, edges[-1], rel_tol=1e-6):
            held_out = held_out_shares(manifest.gate.curve, edges)
    return Uncertainty(
        edges,
        whole.uncertainty,
        bundle=whole.bundle,
        since=None if first is None else first.at - first.span_s,
        held_out=held_out,
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
