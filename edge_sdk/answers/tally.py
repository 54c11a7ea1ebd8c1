"""Histograms of an agent's answers: uncertainty, and latency by source.

They have fixed bins, so that a server can add them up over time, devices and versions:

    uncertainty    32 bins; bin i holds largest * (i/32)^2 <= u < largest * ((i+1)/32)^2
    latency        21 bins; bin 0 holds less than 2^-6 ms, bin i from 2^(i-7) to 2^(i-6) ms, and the
                   last one 2^13 ms and more

`largest` is the largest uncertainty that the gate can have (ln N for entropy). Sure networks have
most of their answers near 0, so the bins are narrow there. The last bin also takes nan, at which no
gate exits.

`AnswerTally.count` stands in the path of every prediction; it takes about 0.2 us on one x86 core.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from edge_sdk.answers.prediction import DEVICE, FALLBACK, SERVER, Prediction
from edge_sdk.wire.messages import new_id

UNCERTAINTY_BINS: Final = 32
SOURCES: Final = (DEVICE, SERVER, FALLBACK)
# of two neighbouring bins, in ms
LATENCY_EDGES_MS: Final = tuple(2.0**power for power in range(-6, 14))
LATENCY_BINS: Final = len(LATENCY_EDGES_MS) + 1

# frexp's exponents of what a clock can show, from under a nanosecond to years, without a comparison
_LOWEST: Final = -64
_RANGE: Final = 128


class AnswerTally:
    """Counts of the answers of one bundle since it was loaded. One thread at a time may use it.

    Args:
        largest: the largest uncertainty of the gate, above 0.
    Attributes:
        id: names these counts, which begin at 0.
    """

    __slots__ = ("_latency", "_latency_ms", "_scale", "_sum", "_uncertainty", "id", "largest")

    def __init__(self, largest: float) -> None:
        self.id = new_id()[:8]
        self.largest = largest
        self._scale = UNCERTAINTY_BINS**2 / largest
        # one more bin for the largest value itself, and one for nan
        self._uncertainty = [0] * (UNCERTAINTY_BINS + 2)
        self._sum = 0.0
        self._latency = {source: [0] * _RANGE for source in SOURCES}
        self._latency_ms = dict.fromkeys(SOURCES, 0.0)

    def count(self, answer: Prediction) -> None:
        """Count one answer."""
        uncertainty, latency_ms, source = answer.uncertainty, answer.latency_ms, answer.source
        try:
            self._uncertainty[int(math.sqrt(uncertainty * self._scale))] += 1
            self._sum += uncertainty
        except (ValueError, OverflowError, IndexError):  # nan, inf, above the largest
            self._uncertainty[-1] += 1
        self._latency[source][math.frexp(latency_ms)[1] - _LOWEST] += 1
        self._latency_ms[source] += latency_ms

    def copy(self) -> AnswerTally:
        """The same counts, which stay as they are now."""
        same = AnswerTally(self.largest)
        same.id = self.id
        same._uncertainty, same._sum = list(self._uncertainty), self._sum
        same._latency = {source: list(counts) for source, counts in self._latency.items()}
        same._latency_ms = dict(self._latency_ms)
        return same

    def uncertainty(self) -> list[int]:
        """Answers by uncertainty: UNCERTAINTY_BINS counts."""
        *inner, last, largest, beyond = self._uncertainty
        return [*inner, last + largest + beyond]

    @property
    def uncertainty_sum(self) -> float:
        """Sum of the uncertainties that are numbers up to the largest."""
        return self._sum

    def latency_ms(self) -> dict[str, float]:
        """Sum of the latencies, for each source that has answered."""
        return {source: self._latency_ms[source] for source in self.latency()}

    def latency(self) -> dict[str, list[int]]:
        """Answers by latency, LATENCY_BINS counts for each source that has answered."""
        lowest = -6 - _LOWEST  # index of 2^-7 to 2^-6 ms
        highest = lowest + LATENCY_BINS - 1
        return {
            source: [
                sum(counts[: lowest + 1]),
                *counts[lowest + 1 : highest],
                sum(counts[highest:]),
            ]
            for source, counts in self._latency.items()
            if any(counts)
        }


def uncertainty_edges(largest: float) -> tuple[float, ...]:
    """The UNCERTAINTY_BINS + 1 edges of the bins, from 0 to `largest`."""
    return tuple(largest * (i / UNCERTAINTY_BINS) ** 2 for i in range(UNCERTAINTY_BINS + 1))


def fallback_share(offloads: int, fallbacks: int, *, least: int = 1) -> float | None:
    """Share of the queries to the server that got no answer in time, 0 to 1.

    An exit asks the server nothing, so it does not count.

    Args:
        offloads: answers of the server. fallbacks: answers of the device in the server's place.
        least: fewer queries count as so many, so that one lost answer of a few says little.
    Returns: None if nothing was asked.
    """
    asked = offloads + fallbacks
    return fallbacks / max(asked, least) if asked else None


def latency_quantile_ms(counts: Sequence[int], share: float) -> float | None:
    """The latency below which that share of the answers lies; None without answers.

    Within a bin the logarithm is interpolated: the value is right to within a factor of 2, and for
    a smooth distribution to within a fifth. What is above the last edge counts as twice it.

    Args:
        counts: LATENCY_BINS counts. share: in (0, 1].
    """
    total = sum(counts)
    if total == 0:
        return None
    rank, below = share * total, 0
    for index, count in enumerate(counts):
        if count and below + count >= rank:
            low = LATENCY_EDGES_MS[0] / 2 if index == 0 else LATENCY_EDGES_MS[index - 1]
            return float(low * 2.0 ** ((rank - below) / count))
        below += count
    return 2 * LATENCY_EDGES_MS[-1]
