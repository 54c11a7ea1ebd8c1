"""Latency and bandwidth of a link, measured through a function that echoes bytes.

No I/O here: the caller passes the transport, so one measurement serves MQTT, HTTP and tests.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from profiles.checks import number, whole
from profiles.errors import MeasurementError
from profiles.fields import check_fields, check_value

SMALL_BYTES = 64
LARGE_BYTES = 256 * 1024  # well above one window of slow start, well below a broker's frame limit
LEAST_DIFFERENCE = 0.1  # share of the latency; a smaller difference of the payloads is jitter


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """Latency and bandwidth of a link.

    Attributes:
        latency_ms: round trip of a small message, ms.
        bandwidth_mbps: 10**6 bits a second, the mean of both directions.
    """

    latency_ms: float
    bandwidth_mbps: float

    def __post_init__(self) -> None:
        check_fields(self, "link", latency_ms=number(least=0), bandwidth_mbps=number(above=0))

    def round_trip_ms(self, size_bytes: int) -> float:
        """Time to send `size_bytes` and to receive as many, ms."""
        return self.latency_ms + 2 * size_bytes * 8 / (self.bandwidth_mbps * 1e3)


def measure_link(
    ping: Callable[[bytes], object],
    *,
    small_bytes: int = SMALL_BYTES,
    large_bytes: int = LARGE_BYTES,
    repeats: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> LinkProfile:
    """Measure a link by echoing a small and a large payload over it.

    `latency_ms` is the median round trip of the small one. The large one crosses the link twice,
    so bandwidth is `2 * 8 * large_bytes` bits over its median time less the latency. On a link so
    fast that the two times differ by less than a tenth of the latency, the large one's whole time
    is taken: a lower bound of the bandwidth.

    Args:
        ping: sends the bytes and returns when all of them are back; its errors reach the caller.
        small_bytes, large_bytes: payload sizes.
        repeats: measurements of each size, after a first ping that opens connections.
        clock: seconds, monotonic.
    Raises: MeasurementError if the clock did not move; InvalidProfileError for a bad argument.
    """
    check_value("measure_link", "small_bytes", small_bytes, whole(1))
    check_value("measure_link", "large_bytes", large_bytes, whole(small_bytes + 1))
    check_value("measure_link", "repeats", repeats, whole(1))
    ping(bytes(small_bytes))
    latency_s = _median_s(ping, bytes(small_bytes), repeats, clock)
    large_s = _median_s(ping, bytes(large_bytes), repeats, clock)
    transfer_s = large_s - latency_s
    if transfer_s < LEAST_DIFFERENCE * latency_s:
        transfer_s = large_s
    if transfer_s <= 0:
        raise MeasurementError(
            f"link: expected {large_bytes} bytes to take time, got {transfer_s} s; "
            "pass a larger large_bytes or a finer clock"
        )
    bits = 2 * 8 * large_bytes
    return LinkProfile(latency_ms=latency_s * 1e3, bandwidth_mbps=bits / transfer_s / 1e6)


def _median_s(
    ping: Callable[[bytes], object], payload: bytes, repeats: int, clock: Callable[[], float]
) -> float:
    times = []
    for _ in range(repeats):
        start = clock()
        ping(payload)
        times.append(clock() - start)
    return statistics.median(times)
