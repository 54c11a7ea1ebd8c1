"""A queue of queries, simulated: arrivals, servers, and service times with batches or without.

Arrival times are drawn first, then one pass serves them. It knows nothing of formulas, so formulas
judge it (tests/serving/planning).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from server.backend.ladder import padded

Times = NDArray[np.float64]
#: seconds of a batch of so many queries
Service = Callable[[int], float]


def poisson(rate: float, seconds: float, random: np.random.Generator) -> Times:
    """Arrival times of a Poisson process, ascending."""
    many = random.poisson(rate * seconds)
    return np.sort(random.uniform(0.0, seconds, many))


def switching(
    rate: float,
    seconds: float,
    random: np.random.Generator,
    *,
    times: float,
    share: float,
    burst_s: float,
) -> Times:
    """Arrival times of a Poisson process whose rate switches between two (an MMPP).

    Args:
        rate: mean. times: the rate in a burst over that in the calm.
        share: of the time that is in bursts. burst_s: mean length of a burst.
    """
    calm = rate / (1 - share + share * times)
    lengths_s = burst_s * (1 - share) / share, burst_s
    at, in_burst, found = 0.0, False, []
    while at < seconds:
        length = random.exponential(lengths_s[in_burst])
        own = calm * (times if in_burst else 1.0)
        found.append(at + poisson(own, length, random))
        at, in_burst = at + length, not in_burst
    arrivals = np.concatenate(found)
    return arrivals[arrivals < seconds]


def together(
    rate: float, seconds: float, random: np.random.Generator, *, many: int, within_s: float
) -> Times:
    """Arrival times of devices that see the same: groups come as a Poisson process.

    Args:
        rate: mean. many: mean queries of a group, drawn by Poisson. within_s: they come, evenly
            spread, within so long.
    """
    begins = poisson(rate / many, seconds, random)
    sizes = random.poisson(many, len(begins))
    arrivals = np.repeat(begins, sizes) + random.uniform(0.0, within_s, int(sizes.sum()))
    return np.sort(arrivals)


def batch_times(
    quantiles: Mapping[int, Sequence[float]], around_s: float, random: np.random.Generator
) -> Service:
    """Measured seconds of the engine, drawn by their quantiles, and the server's work around it.

    Args:
        quantiles: at evenly spaced shares from 0 to 1, by the rows of a batch. A batch runs at the
            next larger size that was measured.
        around_s: seconds of the server's own process for each query.
    """
    sizes = sorted(quantiles)
    times = {rows: np.asarray(quantiles[rows]) for rows in sizes}
    shares = {rows: np.linspace(0, 1, len(times[rows])) for rows in sizes}

    def seconds(queries: int) -> float:
        rows = next((size for size in sizes if size >= padded(queries)), sizes[-1])
        drawn = np.interp(random.random(), shares[rows], times[rows])
        return float(drawn) + queries * around_s

    return seconds


def waits(arrivals: Times, service: Service, *, servers: int = 1, batch_most: int = 1) -> Times:
    """Seconds from each arrival until its service begins.

    A server that is free takes up to `batch_most` of the queries that wait, oldest first, and
    starts at once: as server/backend/batcher.py does.

    Args:
        arrivals: ascending.
    """
    return served(arrivals, service, servers=servers, batch_most=batch_most)[0]


def served(
    arrivals: Times, service: Service, *, servers: int = 1, batch_most: int = 1
) -> tuple[Times, Times]:
    """Seconds from each arrival until its service begins, and until it ends."""
    free = [0.0] * servers
    begins, ends = np.empty(len(arrivals)), np.empty(len(arrivals))
    at = 0
    while at < len(arrivals):
        begin = max(heapq.heappop(free), arrivals[at])
        last = min(at + batch_most, int(np.searchsorted(arrivals, begin, side="right")))
        last = max(last, at + 1)
        end = begin + service(last - at)
        begins[at:last], ends[at:last] = begin, end
        heapq.heappush(free, end)
        at = last
    return begins - arrivals, ends - arrivals
