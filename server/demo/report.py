"""Figures of the demo, of each device and of the fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_sdk.session import Array

# `predict` answers by its deadline, or at most this much later
GRACE_MS = 250.0


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """Figures of one device over one pass of the test samples, with the server running."""

    name: str
    depth: int
    exit_rate: float
    accuracy: float
    accuracy_on_device: float
    exit_accuracy: float | None
    offload_accuracy: float | None
    fallbacks: int
    p50_ms: float
    p99_ms: float
    bytes_per_offload: float | None


@dataclass(frozen=True, slots=True)
class Outage:
    """The fleet while the server was stopped and started again.

    Attributes:
        predictions: made while the server was away.
        errors: predictions that raised.
        late: predictions answered after their deadline plus 0.25 s.
        recovered_s: from the server's return until it has answered every device that had asked it
            before; None if one of them was not answered again.
    """

    predictions: int
    errors: int
    late: int
    recovered_s: float | None


def device_figures(
    name: str,
    depth: int,
    truth: NDArray[np.int64],
    gated: Mapping[str, Any],
    local: Sequence[int],
) -> DeviceFigures:
    """Figures from a device's answers to `gated` and `local`."""
    right = np.array(gated["labels"]) == truth
    source = np.array(gated["sources"])
    latencies = np.array(gated["latencies_ms"])
    offloads = int((source != "device").sum())
    return DeviceFigures(
        name=name,
        depth=depth,
        exit_rate=float((source == "device").mean()),
        accuracy=float(right.mean()),
        accuracy_on_device=float((np.array(local) == truth).mean()),
        exit_accuracy=_mean(right[source == "device"]),
        offload_accuracy=_mean(right[source == "server"]),
        fallbacks=int((source == "fallback").sum()),
        p50_ms=float(np.percentile(latencies, 50)),
        p99_ms=float(np.percentile(latencies, 99)),
        bytes_per_offload=gated["bytes_up"] / offloads if offloads else None,
    )


def outage(streams: Sequence[Mapping[str, Any]], stopped_at: float, back_at: float) -> Outage:
    """Figures from the devices' streams; times on the machine's monotonic clock."""
    recovered: list[float] = []
    came_back = True
    predictions = late = 0
    for stream in streams:
        for start, _, latency_ms in stream["rows"]:
            if stopped_at <= start < back_at:
                predictions += 1
                late += latency_ms > stream["deadline_ms"] + GRACE_MS
        answered = [start for start, source, _ in stream["rows"] if source == "server"]
        after = [start - back_at for start in answered if start > back_at]
        recovered += after[:1]
        asked_before = any(start < stopped_at for start in answered)
        came_back = came_back and bool(after or not asked_before)
    return Outage(
        predictions=predictions,
        errors=sum(len(stream["errors"]) for stream in streams),
        late=late,
        recovered_s=max(recovered) if came_back and recovered else None,
    )


def _mean(values: Array) -> float | None:
    return float(values.mean()) if len(values) else None
