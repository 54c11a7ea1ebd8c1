"""Time and memory of every depth on one device: measured where it ran, scaled where it did not.

The cost table estimates a depth from the machine that exported the model. The device's own
measurements correct it. See docs/decisions/0023-measured-on-the-device.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from profiles.cost import CostTable
from profiles.measured import BundleMeasurement, Conditions

# A session holds the file's weights while it copies them, and packs those of a matrix product once
# more: 28 MB of them took 92 MB at their peak (onnxruntime 1.31). So a tensor byte costs three.
LOADING: Final = 3
# runs of a smaller graph, one by one, take up to three times what they take in a row
TELLING_MS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Taken:
    """Time and memory of one depth on a device.

    Attributes:
        latency_ms: of one sample through prefix and exit head, at the device's present speed.
        memory_bytes: peak of resident memory that loading and running it adds.
    """

    latency_ms: float
    memory_bytes: int


class DepthCosts:
    """Time and memory of every depth on one device.

    A measured depth takes what was measured. Another depth is estimated by the cost table, and the
    estimate is corrected by a line through the measured depths:

        between two of them     straight interpolation, of time over estimated time and of memory
                                over estimated memory
        outside, time           in proportion to the nearest: t = t_i * e / e_i
        outside, memory         deeper: m_i + 3 * (e - e_i); shallower: m_i - (e_i - e), and never
                                less than the estimate e itself

    Time is proportional because a slower processor is slower everywhere. Memory is not: a session's
    own buffers are there at every depth, so only the difference of the tensors is added.

    Args:
        score_gflops: compute score of one core of the device, for estimates without a measurement.
        measured: by depth.
    """

    def __init__(
        self, cost: CostTable, score_gflops: float, measured: Mapping[int, Taken] | None = None
    ) -> None:
        self._cost = cost
        self._score = score_gflops
        self._measured = {
            depth: taken for depth, taken in (measured or {}).items() if depth in cost.exits
        }
        self._times = _line(
            (self._estimated_ms(depth), taken.latency_ms) for depth, taken in self._measured.items()
        )
        self._sizes = _line(
            (self._estimated_bytes(depth), taken.memory_bytes)
            for depth, taken in self._measured.items()
        )

    def latency_ms(self, depth: int) -> float:
        """Time of one sample through prefix and exit head, ms."""
        if depth in self._measured:
            return self._measured[depth].latency_ms
        estimate = self._estimated_ms(depth)
        if not self._times:
            return estimate
        inside = _interpolated(self._times, estimate)
        if inside is not None:
            return inside
        at, taken = self._times[0] if estimate < self._times[0][0] else self._times[-1]
        return taken * estimate / at if at > 0 else taken

    def memory_bytes(self, depth: int) -> int:
        """Peak memory of prefix and exit head, in bytes; tensors alone without a measurement."""
        if depth in self._measured:
            return self._measured[depth].memory_bytes
        estimate = self._estimated_bytes(depth)
        if not self._sizes:
            return estimate
        inside = _interpolated(self._sizes, estimate)
        if inside is not None:
            return round(inside)
        at, taken = self._sizes[0] if estimate < self._sizes[0][0] else self._sizes[-1]
        more = estimate - at
        return max(estimate, round(taken + (LOADING * more if more > 0 else more)))

    def _estimated_ms(self, depth: int) -> float:
        return self._cost.latency_ms(depth, self._score)

    def _estimated_bytes(self, depth: int) -> int:
        return self._cost.prefix(depth).inference_peak_bytes


def at_present_speed(
    measurements: Sequence[BundleMeasurement], conditions: Conditions | None = None
) -> dict[str, Taken]:
    """Time and memory of each measured bundle at the device's present speed, by its name.

        t = t_measured * score_then / score_now

    The running bundle takes what the agent reported, t_live, and tells the present speed:
    score_now = score_then * t_measured / t_live. It does so only if it takes TELLING_MS or more:
    what surrounds a short run, such as cold caches, would count as its slowness. Otherwise the
    present speed is that of the last measurement.

    Args:
        measurements: of one device, oldest first, one a bundle.
    """
    if not measurements:
        return {}
    live_ms = None if conditions is None else conditions.latency_ms
    running = next((m for m in measurements if conditions and m.bundle == conditions.bundle), None)
    now = measurements[-1].score_gflops
    if live_ms and running is not None and running.latency_ms >= TELLING_MS:
        now = running.score_gflops * running.latency_ms / live_ms
    found = {
        each.bundle: Taken(each.latency_ms * each.score_gflops / now, each.memory_bytes)
        for each in measurements
    }
    if live_ms and running is not None:
        found[running.bundle] = Taken(live_ms, running.memory_bytes)
    return found


def _line(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points by x, one for each x: the larger y where two depths have one estimate."""
    line: dict[float, float] = {}
    for x, y in points:
        line[x] = max(y, line.get(x, y))
    return sorted(line.items())


def _interpolated(line: Sequence[tuple[float, float]], x: float) -> float | None:
    """The value at `x` between two points of `line`; None outside of them."""
    if x == line[0][0]:
        return line[0][1]
    for (x0, y0), (x1, y1) in pairwise(line):
        if x0 < x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None
