"""A reading of a device: what is kept of one heartbeat.

A heartbeat comes from outside, and from agents of any release. Whatever is missing, or is not what
it should be, is left out; a reading has bounded size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self, cast

from edge_sdk.answers.tally import LATENCY_BINS, SOURCES, UNCERTAINTY_BINS
from edge_sdk.errors import ManifestError
from edge_sdk.manifest import check_bundle_name
from profiles.checks import is_whole

# every count stays exact in a double, and sums of a million of them in the database's integers
COUNT_MOST: Final = 2**43
PRESENCES: Final = ("present", "away", "unknown")
# whole numbers that only grow while an agent runs; here by their names in `Reading.counts`
_COUNTERS: Final = {
    "exits": ("counters", "device"),
    "offloads": ("counters", "server"),
    "fallbacks": ("counters", "fallback"),
    "late_lost": ("counters", "late_lost"),
    "bytes_up": ("bytes_up",),
    "bytes_down": ("bytes_down",),
}
# numbers that also only grow
_AMOUNTS: Final = {
    "spent": ("budget", "spent"),
    "earned": ("budget", "earned"),
    "joules": ("energy", "joules"),
}
# the state at the time of the heartbeat
_GAUGES: Final = {
    "threshold": ("threshold",),
    "round_trip_ms": ("link", "round_trip_ms"),
    "memory_bytes": ("memory", "resident_bytes"),
    "memory_available_bytes": ("memory", "available_bytes"),
    "late_waiting": ("counters", "late_waiting"),
    "agreement_bound": ("agreement", "bound"),
    "agreement_delta": ("agreement", "delta"),
    "audits": ("agreement", "exits"),
    "disagreements": ("agreement", "disagreements"),
}


@dataclass(frozen=True, slots=True)
class Reading:
    """Counts since the start of an agent, or since its bundle was loaded, and its present state.

    Attributes:
        run: id of this run of the agent; "" from an agent of an older release.
        uptime_s: age of the run; None from an agent of an older release.
        counts: `exits`, `offloads`, `fallbacks` and others, since the start.
        amounts: `spent`, `earned`, `joules`, since the start; only those that are known.
        since: id of the histograms' counts; "" without histograms.
        largest: the gate's largest uncertainty; 0 without histograms.
        uncertainty: counts in the bins of edge_sdk.answers.tally; empty without histograms.
        latency: likewise, by source. latency_ms: their sums.
        gauges: the present state; only what is known.
        offloading: False where a user of the device switched its offloading off.
    """

    run: str = ""
    uptime_s: float | None = None
    bundle: str = ""
    presence: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    amounts: Mapping[str, float] = field(default_factory=dict)
    since: str = ""
    largest: float = 0.0
    uncertainty: tuple[int, ...] = ()
    latency: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    latency_ms: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    offloading: bool = True

    @classmethod
    def from_heartbeat(cls, content: Mapping[str, Any]) -> Self:
        """Read the content of a heartbeat; it never raises."""
        answers = _object(content.get("answers"))
        largest = _number(answers.get("largest")) or 0.0
        uncertainty = _counts(answers.get("uncertainty"), UNCERTAINTY_BINS)
        whole = largest > 0 and bool(uncertainty)
        latency, sums_ms = _object(answers.get("latency")), _object(answers.get("latency_ms"))
        by_source = {source: _counts(latency.get(source), LATENCY_BINS) for source in SOURCES}
        counts = {name: _count(_at(content, path)) for name, path in _COUNTERS.items()}
        amounts = {name: _number(_at(content, path)) for name, path in _AMOUNTS.items()}
        gauges = {name: _number(_at(content, path)) for name, path in _GAUGES.items()}
        presence = content.get("presence")
        return cls(
            run=_id(content.get("run")),
            uptime_s=_number(content.get("uptime_s")),
            bundle=_bundle(content.get("bundle")),
            presence=presence if presence in PRESENCES else "",
            counts={name: value for name, value in counts.items() if value is not None},
            amounts={name: value for name, value in amounts.items() if value is not None},
            since=_id(answers.get("since")) if whole else "",
            largest=largest if whole else 0.0,
            uncertainty=uncertainty if whole else (),
            latency={source: found for source, found in by_source.items() if found},
            latency_ms={
                source: sums_ms[source] for source in SOURCES if _number(sums_ms.get(source))
            },
            gauges={name: value for name, value in gauges.items() if value is not None},
            offloading=content.get("offloading") is not False,
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON has them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote."""
        latency = {source: tuple(counts) for source, counts in data["latency"].items()}
        return cls(**{**data, "uncertainty": tuple(data["uncertainty"]), "latency": latency})


def _at(content: Mapping[str, Any], path: tuple[str, ...]) -> object:
    """The value at a path of keys; None if there is none."""
    found: object = content
    for key in path:
        found = _object(found).get(key)
    return found


def _object(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _count(value: object) -> int | None:
    if is_whole(value) and 0 <= cast("int", value) <= COUNT_MOST:
        return cast("int", value)
    return None


def _counts(value: object, bins: int) -> tuple[int, ...]:
    """Counts of that many bins; empty if the value is anything else."""
    if not isinstance(value, list) or len(value) != bins:
        return ()
    counts = tuple(_count(one) for one in value)
    return () if None in counts else cast("tuple[int, ...]", counts)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) and abs(value) <= 1e18 else None


def _id(value: object) -> str:
    """A short hexadecimal id; "" if it is anything else."""
    if isinstance(value, str) and len(value) <= 32 and set(value) <= set("0123456789abcdef"):
        return value
    return ""


def _bundle(value: object) -> str:
    try:
        return check_bundle_name(value) if isinstance(value, str) else ""
    except ManifestError:
        return ""
