"""A point of a device's history: what it did in a span of time, and its state at the end of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any, Final, Self

from edge_sdk.answers.tally import (
    LATENCY_BINS,
    UNCERTAINTY_BINS,
    latency_quantile_ms,
    uncertainty_edges,
)
from server.registry.telemetry.reading import Reading


@dataclass(frozen=True, slots=True)
class TelemetryPoint:
    """A device in one span of time.

    Attributes:
        at: end of the span, UTC seconds since 1970, by the server's clock.
        span_s: length of the span: since the point before, or since the start of the agent.
        exits, offloads, fallbacks: answers in the span, by source: device, server, fallback.
        bytes_up, bytes_down: payloads of queries and replies in the span.
        restarts: starts of the agent in the span.
        late_lost: queries in the span for which the outbox had no room.
        bundle: that ran at the end; "" if unknown.
        presence: of the server at the end, to the device: `present`, `away`, `unknown`; "" if it
            is not known.
        threshold: of the gate at the end; None if it is infinite.
        largest: the largest uncertainty of the gate; 0 without a histogram.
        uncertainty: answers of the span by uncertainty, UNCERTAINTY_BINS counts
            (`uncertainty_edges`); empty without a histogram.
        latency: answers of the span by latency, LATENCY_BINS counts for each source.
        latency_ms_sum: sums of their latencies.
        round_trip_ms: of the link; the longest that a heartbeat of the span told.
        memory_bytes: of the agent; the most. memory_available_bytes: of the device; the least.
        agreement_bound: upper bound of the disagreement among exits, by the `Agreement` controller;
            None while none holds. agreement_delta: its limit; None without that controller.
        audits, disagreements: exits behind that bound, and those with another label.
        spent, earned: of the `Budget` controller in the span, in the unit of its cost; None
            without it.
        joules: in the span; None if they are not measured.
        late_waiting: queries in the outbox at the end.
        offloading: False where offloading was switched off at the beginning or the end of the span:
            the answers of the device are then not only exits, and say nothing of the gate.
    """

    at: float
    span_s: float = 0.0
    exits: int = 0
    offloads: int = 0
    fallbacks: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    restarts: int = 0
    late_lost: int = 0
    bundle: str = ""
    presence: str = ""
    threshold: float | None = None
    largest: float = 0.0
    uncertainty: tuple[int, ...] = ()
    latency: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    latency_ms_sum: Mapping[str, float] = field(default_factory=dict)
    round_trip_ms: float | None = None
    memory_bytes: int | None = None
    memory_available_bytes: int | None = None
    agreement_bound: float | None = None
    agreement_delta: float | None = None
    audits: int | None = None
    disagreements: int | None = None
    spent: float | None = None
    earned: float | None = None
    joules: float | None = None
    late_waiting: int | None = None
    offloading: bool = True

    @property
    def answers(self) -> int:
        """Answers in the span."""
        return self.exits + self.offloads + self.fallbacks

    @property
    def uncertainty_edges(self) -> tuple[float, ...]:
        """The UNCERTAINTY_BINS + 1 edges of the histogram; empty without one."""
        return uncertainty_edges(self.largest) if self.uncertainty else ()

    def latency_ms(self, source: str, share: float) -> float | None:
        """The latency below which that share of the answers of `source` lies; None without any."""
        return latency_quantile_ms(self.latency.get(source, ()), share)

    def to_dict(self) -> dict[str, Any]:
        """Fields as JSON has them; those at their default are left out."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        kept = {name: value for name, value in found.items() if value != _NEUTRAL[name]}
        # most bins are empty, and the last ones nearly always
        if self.uncertainty:
            kept["uncertainty"] = _trimmed(self.uncertainty)
        if self.latency:
            kept["latency"] = {source: _trimmed(counts) for source, counts in self.latency.items()}
        return kept

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote; fields of a later release are ignored."""
        known = {one.name: data[one.name] for one in fields(cls) if one.name in data}
        if "uncertainty" in known:
            known["uncertainty"] = _filled(known["uncertainty"], UNCERTAINTY_BINS)
        if "latency" in known:
            latency = known["latency"].items()
            known["latency"] = {source: _filled(counts, LATENCY_BINS) for source, counts in latency}
        return cls(**known)


_NEUTRAL: Final = {one.name: one.default for one in fields(TelemetryPoint)} | {
    "latency": {},
    "latency_ms_sum": {},
}


def point_between(
    before: Reading | None, now: Reading, *, at: float, span_s: float
) -> TelemetryPoint:
    """The point of a device between two readings.

    Args:
        before: the reading before; None for the first one.
        at: time of `now`. span_s: time since `before`.
    """
    restarted = before is None or _has_restarted(before, now)
    if restarted and now.uptime_s is not None:
        span_s = now.uptime_s if before is None else min(now.uptime_s, span_s)
    # an agent of an older release does not tell how long it has counted already
    first_of_old = before is None and now.uptime_s is None
    old = now if first_of_old else Reading() if before is None or restarted else before
    same = before is not None and before.since == now.since and before.largest == now.largest
    bins = before if before is not None and same else Reading()
    latency = {
        source: _less(counts, bins.latency.get(source, ()))
        for source, counts in now.latency.items()
    }
    gauges: dict[str, Any] = dict(now.gauges)
    for name in (
        "memory_bytes",
        "memory_available_bytes",
        "audits",
        "disagreements",
        "late_waiting",
    ):
        if name in gauges:
            gauges[name] = round(gauges[name])
    amounts = now.amounts.items()
    changes: dict[str, Any] = {
        **{name: max(0, value - old.counts.get(name, 0)) for name, value in now.counts.items()},
        **{name: max(0.0, value - old.amounts.get(name, 0.0)) for name, value in amounts},
    }
    return TelemetryPoint(
        at=at,
        span_s=round(span_s, 3),
        restarts=int(before is not None and restarted),
        bundle=now.bundle,
        presence=now.presence,
        offloading=now.offloading and (before is None or before.offloading),
        largest=now.largest,
        uncertainty=_less(now.uncertainty, bins.uncertainty),
        latency={source: counts for source, counts in latency.items() if any(counts)},
        latency_ms_sum={
            source: round(max(0.0, value - bins.latency_ms.get(source, 0.0)), 3)
            for source, value in now.latency_ms.items()
            if any(latency.get(source, ()))
        },
        **changes,
        **gauges,
    )


def merged(points: Iterable[TelemetryPoint], *, at: float | None = None) -> TelemetryPoint:
    """One point for points that follow each other: counts added up, the state of the last one.

    Histograms of uncertainty with another bundle than the last one, or another largest uncertainty
    of the gate, are left out: they are of another exit head.

    Args:
        at: its time; None takes that of the last one.
    """
    one, *others = sorted(points, key=lambda point: point.at)
    for other in others:
        one = _joined(one, other)
    return one if at is None else replace(one, at=at)


def _joined(first: TelemetryPoint, last: TelemetryPoint) -> TelemetryPoint:
    sources = first.latency.keys() | last.latency.keys()
    alike = first.largest == last.largest or not last.uncertainty
    if alike and first.bundle == last.bundle:
        uncertainty = _sum(first.uncertainty, last.uncertainty)
    else:
        uncertainty = last.uncertainty
    return replace(
        last,
        span_s=round(first.span_s + last.span_s, 3),
        exits=first.exits + last.exits,
        offloads=first.offloads + last.offloads,
        fallbacks=first.fallbacks + last.fallbacks,
        bytes_up=first.bytes_up + last.bytes_up,
        bytes_down=first.bytes_down + last.bytes_down,
        restarts=first.restarts + last.restarts,
        late_lost=first.late_lost + last.late_lost,
        largest=last.largest or first.largest,
        uncertainty=uncertainty,
        latency={
            source: _sum(first.latency.get(source, ()), last.latency.get(source, ()))
            for source in sources
        },
        latency_ms_sum={
            source: first.latency_ms_sum.get(source, 0.0) + last.latency_ms_sum.get(source, 0.0)
            for source in first.latency_ms_sum.keys() | last.latency_ms_sum.keys()
        },
        round_trip_ms=_either(first.round_trip_ms, last.round_trip_ms, max),
        memory_bytes=_either(first.memory_bytes, last.memory_bytes, max),
        memory_available_bytes=_either(
            first.memory_available_bytes, last.memory_available_bytes, min
        ),
        spent=_either(first.spent, last.spent, _add),
        earned=_either(first.earned, last.earned, _add),
        joules=_either(first.joules, last.joules, _add),
        offloading=first.offloading and last.offloading,
    )


def _has_restarted(before: Reading, now: Reading) -> bool:
    if before.run or now.run:
        return before.run != now.run
    # an agent of an older release: its counts never fall while it runs
    return any(now.counts.get(name, 0) < count for name, count in before.counts.items())


def _either(first: Any, last: Any, both: Any) -> Any:
    if first is None or last is None:
        return last if first is None else first
    return both(first, last)


def _add(first: float, last: float) -> float:
    return first + last


def _less(counts: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    return tuple(
        max(0, now - old) for now, old in zip_longest(counts, before[: len(counts)], fillvalue=0)
    )


def _sum(first: Sequence[int], last: Sequence[int]) -> tuple[int, ...]:
    return tuple(one + other for one, other in zip_longest(first, last, fillvalue=0))


def _trimmed(counts: Sequence[int]) -> list[int]:
    """The counts without the zeros at the end."""
    kept = list(counts)
    while kept and kept[-1] == 0:
        kept.pop()
    return kept


def _filled(counts: Sequence[int], bins: int) -> tuple[int, ...]:
    return tuple(counts) + (0,) * (bins - len(counts))
