"""Simulated devices: heartbeats as an agent sends them, with counts that grow, and no agent."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from edge_sdk.answers.prediction import DEVICE, FALLBACK, SERVER
from edge_sdk.answers.tally import LATENCY_BINS, LATENCY_EDGES_MS, SOURCES, UNCERTAINTY_BINS

LARGEST: Final = math.log(10)  # of entropy, in nats, for ten classes


@dataclass
class SimulatedDevice:
    """One device, whose answers are drawn.

    Attributes:
        rate: answers a second. doubt: mean uncertainty, as a share of the largest.
        threshold: of its gate, in nats. fallback: share of the uncertain answers without a reply.
        device_ms, server_ms: median latencies. memory_bytes: free on it.
        held_out: thresholds and exit rates of a bundle's curve, ascending: its answers are as sure
            as the held-out samples were, and `doubt` counts no more.
    """

    name: str
    bundle: str
    seed: int
    rate: float = 4.0
    doubt: float = 0.16
    threshold: float = 0.55
    fallback: float = 0.02
    device_ms: float = 0.9
    server_ms: float = 9.0
    memory_bytes: int = 300_000_000
    held_out: tuple[tuple[float, float], ...] = ()
    _counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    _uncertainty: list[int] = field(default_factory=lambda: [0] * UNCERTAINTY_BINS)
    _latency: dict[str, list[int]] = field(
        default_factory=lambda: {source: [0] * LATENCY_BINS for source in SOURCES}
    )
    _uptime_s: float = 0.0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def heartbeat(self, span_s: float) -> dict[str, Any]:
        """The content of the next heartbeat, `span_s` after the one before."""
        draw = self._random
        self._uptime_s += span_s
        many = int(draw.poisson(self.rate * span_s))
        shares = draw.beta(1.1, 1.1 / self.doubt - 1.1, many)
        if self.held_out:
            at, below = zip((0.0, 0.0), *self.held_out, (LARGEST, 1.0), strict=True)
            shares = np.interp(draw.random(many), below, at) / LARGEST
        exits = shares * LARGEST <= self.threshold
        bins = np.minimum(np.sqrt(shares) * UNCERTAINTY_BINS, UNCERTAINTY_BINS - 1).astype(int)
        for index in bins:
            self._uncertainty[index] += 1
        offloads = int(many - exits.sum())
        falls = int(draw.binomial(offloads, self.fallback))
        self._answer(DEVICE, int(exits.sum()), self.device_ms)
        self._answer(SERVER, offloads - falls, self.server_ms)
        self._answer(FALLBACK, falls, 60.0)
        return {
            "run": f"{self.seed:08x}",
            "uptime_s": self._uptime_s,
            "device": self.name,
            "bundle": self.bundle,
            "presence": "present",
            "threshold": self.threshold,
            "counters": dict(self._counts),
            "bytes_up": 1_800 * self._counts[SERVER],
            "bytes_down": 120 * self._counts[SERVER],
            "answers": {
                "since": f"{self.seed:08x}",
                "largest": LARGEST,
                "uncertainty": list(self._uncertainty),
                "latency": {source: list(found) for source, found in self._latency.items()},
            },
            "link": {"round_trip_ms": float(self.server_ms * draw.uniform(0.4, 0.7))},
            "memory": {
                "resident_bytes": 71_000_000,
                "available_bytes": int(self.memory_bytes * draw.uniform(0.92, 1.0)),
            },
        }

    def _answer(self, source: str, many: int, median_ms: float) -> None:
        self._counts[source] += many
        taken_ms = median_ms * self._random.lognormal(0.0, 0.35, many)
        for index in np.searchsorted(LATENCY_EDGES_MS, taken_ms, side="right"):
            self._latency[source][index] += 1
