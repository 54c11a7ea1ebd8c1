"""Latency against offered load: an open loop, in which nobody waits for a server that is slow.

Each server gets loads that grow, until one is not served wholly. The knee is the highest load that
is served wholly with a p99 of at most KNEE times that at the lowest load.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure

from benchmarks.peers.servers import Running

# requests a second
LOADS: Final = (200, 400, 600, 800, 1_200, 1_600, 2_000, 2_500, 3_000, 4_000, 5_000, 6_000, 8_000)
CONNECTIONS: Final = 64
SECONDS: Final = 1.0
# a p99 needs some requests; a low load goes on for longer until it has so many
REQUESTS_LEAST: Final = 300
# requests that had no answer at the end, as a share of all; a machine with other work loses some
LEFT_MOST: Final = 0.01
KNEE: Final = 5.0


@dataclass(frozen=True, slots=True)
class Point:
    """One server under one offered load in one round.

    Attributes:
        offered, rate: requests, and answers, a second. p50_us, p99_us: of the answers' latencies.
        whole: whether all was served.
    """

    server: str
    offered: int
    rate: float
    p50_us: float
    p99_us: float
    whole: bool


# applies a load to a server: requests a second, and seconds; gives the load's tally
Apply = Callable[[Running, int, float], dict[str, Any]]


def points_of(side: Running, apply: Apply, *, quick: bool = False) -> list[Point]:
    """The points of one server in one round, up to the first load that it does not serve."""
    points: list[Point] = []
    for offered in LOADS[:2] if quick else LOADS:
        seconds = SECONDS / 4 if quick else max(SECONDS, REQUESTS_LEAST / offered)
        tally = apply(side, offered, seconds)
        latencies, left = tally["latencies_us"], tally["left"]
        if not latencies:
            break
        whole = left <= LEFT_MOST * (left + len(latencies))
        rate = len(latencies) / max(seconds, tally["seconds"])
        p50, p99 = np.quantile(latencies, [0.5, 0.99])
        points.append(Point(side.name, offered, rate, float(p50), float(p99), whole))
        if not whole:
            break
    return points


@dataclass(frozen=True, slots=True)
class Line:
    """One server over all rounds: at each load that all rounds served wholly, the medians.

    Attributes:
        loads, p50_us, p99_us: of the points. knee: the load of the knee.
    """

    server: str
    loads: tuple[int, ...]
    p50_us: tuple[float, ...]
    p99_us: tuple[float, ...]
    knee: int

    def p99_at(self, load: int) -> float:
        """The p99 at a load, in microseconds."""
        return self.p99_us[self.loads.index(load)]


def lines_of(points: Sequence[Point]) -> list[Line]:
    """The line of each server that served the lowest load in most rounds."""
    lines = []
    for server in dict.fromkeys(point.server for point in points):
        own = [point for point in points if point.server == server]
        by_load: dict[int, list[Point]] = {}
        for point in own:
            by_load.setdefault(point.offered, []).append(point)
        rounds = len(by_load[min(by_load)])
        served = []
        for load in sorted(by_load):
            whole = [point for point in by_load[load] if point.whole]
            if 2 * len(whole) <= rounds:
                break
            p50 = statistics.median(point.p50_us for point in whole)
            served.append((load, p50, statistics.median(point.p99_us for point in whole)))
        if served:
            loads, p50s, p99s = zip(*served, strict=True)
            lines.append(Line(server, loads, p50s, p99s, _knee(loads, p99s)))
    return lines


def _knee(loads: Sequence[int], p99_us: Sequence[float]) -> int:
    """The highest load whose p99 is at most KNEE times the first one."""
    near = [load for load, p99 in zip(loads, p99_us, strict=True) if p99 <= KNEE * p99_us[0]]
    return near[-1]


def table(lines: Sequence[Line]) -> str:
    """The knees, the p99 there, and the highest loads that were served wholly."""
    rows = [
        "| server | knee, requests/s | p99 at the lowest load, us | there, us | most served |",
        "| --- | --- | --- | --- | --- |",
    ]
    for line in lines:
        cells = (
            line.server,
            f"{line.knee:,}",
            f"{line.p99_us[0]:,.0f}",
            f"{line.p99_at(line.knee):,.0f}",
            f"{line.loads[-1]:,}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def picture(lines: Sequence[Line]) -> bytes:
    """p99 against offered load as PNG, with the knees as stars."""
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for number, line in enumerate(lines):
        colour = f"C{number}"
        p99_ms = [p99 / 1e3 for p99 in line.p99_us]
        axes.plot(line.loads, p99_ms, "o-", color=colour, label=line.server, markersize=3)
        axes.plot([line.knee], [line.p99_at(line.knee) / 1e3], "*", color=colour, markersize=14)
    axes.set(xscale="log", yscale="log", xlabel="offered load, requests/s", ylabel="p99, ms")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120, metadata={"Software": None})
    return out.getvalue()
