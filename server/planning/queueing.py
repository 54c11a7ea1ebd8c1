"""Formulas of queueing theory: Poisson arrivals at one place, served in the order of arrival.

    M/M/c   exponential service times, c servers: Erlang's C
    M/D/1   one server, service times that are all the same: Pollaczek and Khinchine

They know no batches, and batches make a server faster: what they say is on the safe side.
"""

from __future__ import annotations

import math
from typing import Final

SERVERS_MOST: Final = 1_000_000


def erlang_c(servers: int, load: float) -> float:
    """The share of arrivals that have to wait, M/M/c.

    C = B / (1 - (a/c)(1 - B)), where B is Erlang's B by B(0) = 1, B(k) = a B(k-1) / (k + a B(k-1)).

    Args:
        servers: c, at least 1.
        load: a = arrivals a second times seconds of service, in erlang.
    Returns: 1 if the servers cannot keep up. With one server it is the load itself.
    """
    if load >= servers:
        return 1.0
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = load * blocked / (number + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def wait_share(servers: int, rate: float, service_s: float, wait_s: float) -> float:
    """The share of arrivals that wait longer than `wait_s`, M/M/c.

    P(W > t) = C exp(-(c/s - r) t)

    Args:
        rate: r, arrivals a second. service_s: s, mean seconds of service.
    """
    spare = servers / service_s - rate
    if spare <= 0:
        return 1.0
    return erlang_c(servers, rate * service_s) * math.exp(-spare * wait_s)


def mean_wait_s(servers: int, rate: float, service_s: float) -> float:
    """Mean seconds of waiting, M/M/c: C / (c/s - r); infinite if the servers cannot keep up."""
    spare = servers / service_s - rate
    return erlang_c(servers, rate * service_s) / spare if spare > 0 else math.inf


def mean_wait_of_equal_s(rate: float, service_s: float) -> float:
    """Mean seconds of waiting, M/D/1: half of that of M/M/1."""
    load = rate * service_s
    return load * service_s / (2 * (1 - load)) if load < 1 else math.inf


def servers_needed(
    rate: float, service_s: float, *, busy_most: float, wait_s: float, late_most: float
) -> int:
    """The least servers that are busy at most so much, with at most so many late arrivals.

    Args:
        busy_most: share of the time, below 1. wait_s: an arrival that waits longer is late.
        late_most: share of the arrivals.
    """
    servers = max(1, math.ceil(rate * service_s / busy_most))
    while (
        wait_share(servers, rate, service_s, wait_s) > late_most and servers < SERVERS_MOST
    ):  # each server more makes it less
        servers += 1
    return servers
