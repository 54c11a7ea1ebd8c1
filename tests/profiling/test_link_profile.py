"""A link measured over a transport that only counts time."""

from __future__ import annotations

import math

import pytest

from profiles.errors import InvalidProfileError, MeasurementError
from profiles.link import LinkProfile, measure_link


class SimulatedLink:
    """Echoes bytes at a fixed latency and rate, on a clock of its own."""

    def __init__(
        self, latency_s: float, bits_per_s: float, extra_s: tuple[float, ...] = ()
    ) -> None:
        self.now = 0.0
        self.calls: list[int] = []
        self._latency_s = latency_s
        self._bits_per_s = bits_per_s
        self._extra_s = extra_s

    def clock(self) -> float:
        return self.now

    def ping(self, payload: bytes) -> None:
        number = len(self.calls)
        self.calls.append(len(payload))
        late = self._extra_s[number] if number < len(self._extra_s) else 0.0
        self.now += self._latency_s + late + 2 * 8 * len(payload) / self._bits_per_s


def test_latency_and_bandwidth_of_a_known_link() -> None:
    link = SimulatedLink(latency_s=0.006, bits_per_s=40e6)
    measured = measure_link(link.ping, clock=link.clock)
    # a round trip of 64 bytes each way at 40 Mbit/s adds 0.0256 ms to the 6 ms
    assert measured.latency_ms == pytest.approx(6.0256)
    # so the large payload's time less the small one's is 64 of 262,144 bytes short
    assert measured.bandwidth_mbps == pytest.approx(40 / (1 - 64 / 262_144))


def test_first_ping_and_single_stalls_do_not_count() -> None:
    quiet = SimulatedLink(0.002, 1e8)
    stalls = SimulatedLink(0.002, 1e8, extra_s=(3.0, 0.0, 0.5, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 2.0))
    with_stalls = measure_link(stalls.ping, repeats=5, clock=stalls.clock)
    without = measure_link(quiet.ping, repeats=5, clock=quiet.clock)
    # the same medians, but for the float rounding of the clocks
    assert with_stalls.latency_ms == pytest.approx(without.latency_ms)
    assert with_stalls.bandwidth_mbps == pytest.approx(without.bandwidth_mbps)
    assert stalls.calls == [64] * 6 + [262_144] * 5


@pytest.mark.parametrize("bits_per_s", [math.inf, 1e12])
def test_link_too_fast_to_tell_gives_a_lower_bound(bits_per_s: float) -> None:
    link = SimulatedLink(latency_s=0.001, bits_per_s=bits_per_s)
    measured = measure_link(link.ping, large_bytes=125_000, clock=link.clock)
    # 2 Mbit in the whole millisecond; at 1 Tbit/s they would add 2 us
    assert measured.latency_ms == pytest.approx(1.0, rel=0.01)
    assert measured.bandwidth_mbps == pytest.approx(2000.0, rel=0.01)


def test_clock_that_stands_still_is_refused() -> None:
    with pytest.raises(MeasurementError, match="larger large_bytes"):
        measure_link(lambda _: None, clock=lambda: 0.0)


def test_errors_of_the_transport_pass_through() -> None:
    def broken(payload: bytes) -> bytes:
        raise ConnectionError(f"lost {len(payload)} bytes")

    with pytest.raises(ConnectionError, match="lost 64 bytes"):
        measure_link(broken)


def test_payloads_must_differ() -> None:
    with pytest.raises(InvalidProfileError, match=r"large_bytes: expected .* at least 65, got 64"):
        measure_link(lambda _: None, large_bytes=64)


def test_round_trip_counts_both_directions() -> None:
    # 5,000 bytes are 40,000 bits: 1 ms at 40 Mbit/s, there and back
    assert LinkProfile(6.0, 40.0).round_trip_ms(5000) == pytest.approx(8.0)
    assert LinkProfile(6.0, 40.0).round_trip_ms(0) == 6.0
