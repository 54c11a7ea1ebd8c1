"""Health conditions of a roll-out: read from text, and judged by counts of answers. Pure.

fallback<5%         share of the queries to the server that got no answer in time
offload<40%         share of answers that came from the server
exit>60%            share of answers that the device gave by itself
agreement>0.97      share of audited exits for which the server gave the same label
latency<80ms        95th percentile of all answers' latency
fallback<1.2x       in comparison with the devices that stayed at their version
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from edge_sdk.answers.tally import LATENCY_BINS, fallback_share, latency_quantile_ms
from server.errors import BadRequestError

Metric = Literal["fallback", "offload", "exit", "agreement", "latency"]
Verdict = Literal["good", "worse", "unknown"]

METRICS: Final[Mapping[Metric, str]] = {
    "fallback": "5%",
    "offload": "40%",
    "exit": "60%",
    "agreement": "0.97",
    "latency": "80ms",
}
LATENCY_SHARE: Final = 0.95
# a comparison allows this much beyond its factor
SLACK: Final = 0.01
SLACK_FALLBACK: Final = 0.04  # one lost answer of thirty queries is no change
SLACK_MS: Final = 1.0
# audits are a small share of the answers: fewer say nothing
AUDITS_MIN: Final = 30
# a share that asked fewer queries is judged as if it had asked so many
QUESTIONS_MIN: Final = 30
CONDITIONS_MOST: Final = 10
_CONDITION: Final = re.compile(r"(\w+)\s*([<>])\s*(\d+(?:\.\d+)?)\s*(%|x|ms|)")


class Point(Protocol):
    """A device in one span of time, as its history has it."""

    @property
    def at(self) -> float:
        """End of the span, UTC seconds since 1970."""

    @property
    def span_s(self) -> float:
        """Length of the span."""

    @property
    def bundle(self) -> str:
        """Bundle that ran at the end."""

    @property
    def exits(self) -> int:
        """Answers of the device."""

    @property
    def offloads(self) -> int:
        """Answers of the server."""

    @property
    def fallbacks(self) -> int:
        """Answers of the device in the server's place."""

    @property
    def latency(self) -> Mapping[str, tuple[int, ...]]:
        """Answers by latency, for each source."""

    @property
    def audits(self) -> int | None:
        """Exits that were audited, as the controller counts them at the end of the span."""

    @property
    def disagreements(self) -> int | None:
        """Audited exits for which the server gave another label."""

    @property
    def offloading(self) -> bool:
        """False where the device asked no server in some of the span, because its user said so."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Behaviour of some devices in some time.

    Attributes:
        latency: answers by latency, LATENCY_BINS counts; empty if it is not told.
        audits, disagreements: exits that were audited, and those with another label.
    """

    exits: int = 0
    offloads: int = 0
    fallbacks: int = 0
    latency: tuple[int, ...] = ()
    audits: int = 0
    disagreements: int = 0

    @property
    def answers(self) -> int:
        """All answers."""
        return self.exits + self.offloads + self.fallbacks

    def value(self, metric: Metric) -> float | None:
        """The value of a metric: a share, or milliseconds; None if it is not known."""
        if metric == "agreement":
            known = self.audits >= AUDITS_MIN
            return 1.0 - self.disagreements / self.audits if known else None
        if metric == "latency":
            return latency_quantile_ms(self.latency, LATENCY_SHARE)
        if not self.answers:
            return None
        if metric == "fallback":  # nobody waits in vain who asks nothing
            return fallback_share(self.offloads, self.fallbacks, least=QUESTIONS_MIN) or 0.0
        counts = {"exit": self.exits, "offload": self.offloads}
        return counts[metric] / self.answers

    def __add__(self, other: Behaviour) -> Behaviour:
        longest = max(len(self.latency), len(other.latency))
        pair = (self.latency or (0,) * longest, other.latency or (0,) * longest)
        return Behaviour(
            self.exits + other.exits,
            self.offloads + other.offloads,
            self.fallbacks + other.fallbacks,
            tuple(a + b for a, b in zip(*pair, strict=True)),
            self.audits + other.audits,
            self.disagreements + other.disagreements,
        )


def behaviour_of(points: Iterable[Point]) -> Behaviour:
    """The sum of a device's points; audits are those of the last point."""
    found, audits, disagreements = Behaviour(), 0, 0
    for point in points:
        counts = [0] * LATENCY_BINS
        for of_source in point.latency.values():
            for index, count in enumerate(of_source):
                counts[index] += count
        latency = tuple(counts) if any(counts) else ()
        found += Behaviour(point.exits, point.offloads, point.fallbacks, latency)
        audits, disagreements = point.audits or 0, point.disagreements or 0
    return found + Behaviour(audits=audits, disagreements=disagreements)


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition.

    Attributes:
        limit: a share, milliseconds, or a factor of the other devices' value (`relative`).
        text: as it was written.
    """

    metric: Metric
    below: bool
    limit: float
    relative: bool
    text: str

    def judge(self, share: Behaviour, others: Behaviour, answers_min: int) -> Finding:
        """Whether the devices of a share fulfil the condition.

        Args:
            others: the devices that stayed, for a condition that compares.
            answers_min: answers of either before they are judged.
        """
        value = share.value(self.metric) if share.answers >= answers_min else None
        limit: float | None = self.limit
        if self.relative:
            base = others.value(self.metric) if others.answers >= answers_min else None
            limit = None if base is None else self._around(base)
        if value is None or limit is None:
            return Finding(self, "unknown", value, limit)
        fulfilled = value < limit if self.below else value > limit
        return Finding(self, "good" if fulfilled else "worse", value, limit)

    def _around(self, base: float) -> float:
        slack = {"latency": SLACK_MS, "fallback": SLACK_FALLBACK}.get(self.metric, SLACK)
        if self.below:
            return max(self.limit * base, base + slack)
        return min(self.limit * base, base - slack)

    def shown(self, value: float | None) -> str:
        """A value of the metric in words."""
        if value is None:
            return "not known yet"
        if self.metric == "latency":
            return f"{value:.1f} ms"
        return f"{value:.3f}" if self.metric == "agreement" else f"{100 * value:.1f} %"


@dataclass(frozen=True, slots=True)
class Finding:
    """The judgement of one condition: the value of the share, and the limit for it."""

    condition: Condition
    verdict: Verdict
    value: float | None
    limit: float | None

    def __str__(self) -> str:
        one = self.condition
        than = "below" if one.below else "above"
        limit = "that of the devices that stayed" if self.limit is None else one.shown(self.limit)
        return f"{one.metric} is {one.shown(self.value)}, expected {than} {limit}"


@dataclass(frozen=True, slots=True)
class Health:
    """All conditions of a roll-out; without any, nothing but refusals counts."""

    conditions: tuple[Condition, ...] = field(default=())

    @property
    def compares(self) -> bool:
        """Whether a condition compares with the devices that stayed."""
        return any(one.relative for one in self.conditions)

    def judge(self, share: Behaviour, others: Behaviour, answers_min: int) -> tuple[Finding, ...]:
        """The finding of each condition."""
        return tuple(one.judge(share, others, answers_min) for one in self.conditions)


def parse_health(text: str) -> Health:
    """Read conditions, separated by commas.

    Raises: BadRequestError saying what is wrong, with an example.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if len(parts) > CONDITIONS_MOST:
        raise BadRequestError(f"health: expected at most {CONDITIONS_MOST} conditions")
    return Health(tuple(_condition(part) for part in parts))


def _condition(text: str) -> Condition:
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise BadRequestError(
            f"health: expected conditions such as fallback<5%,agreement>0.97, got {text[:60]!r}"
        )
    name, sign, number, unit = match.groups()
    metric = next((one for one in METRICS if one == name), None)
    if metric is None:
        known = ", ".join(METRICS)
        raise BadRequestError(f"health: {name[:60]} is not known; expected one of {known}")
    below, limit, relative = sign == "<", float(number), unit == "x"
    expected = f"health: {text[:60]}: expected a value such as {METRICS[metric]}"
    if relative and metric == "agreement":
        raise BadRequestError(f"{expected}; agreement is not compared with other devices")
    if not relative and (metric == "latency") != (unit == "ms"):
        raise BadRequestError(expected)
    if metric != "latency" and not relative:
        limit = limit / 100 if unit == "%" else limit
        if not 0.0 <= limit <= 1.0:
            raise BadRequestError(f"{expected}, at most 1 or 100%")
    return Condition(metric, below, limit, relative, text.replace(" ", ""))
