"""The formulas of queueing theory, against scipy's distributions and numbers from tables."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from server.planning.queueing import (
    erlang_c,
    mean_wait_of_equal_s,
    mean_wait_s,
    servers_needed,
    wait_share,
)


@given(servers=st.integers(1, 200), share=st.floats(0.01, 0.99))
def test_erlang_c_is_that_of_the_poisson_distribution(servers: int, share: float) -> None:
    """C = p(c) / (p(c) + (1 - a/c) P(c - 1)), with p and P of a Poisson variable of mean a."""
    load = share * servers
    own = stats.poisson.pmf(servers, load)
    below = stats.poisson.cdf(servers - 1, load)
    expected = own / (own + (1 - share) * below)
    assert erlang_c(servers, load) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_erlang_c_of_two_servers_with_one_erlang_is_a_third() -> None:
    # by hand: 1/2 * 2/(2-1) over 1 + 1 + 1/2 * 2 = 1/3
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)


def test_one_server_makes_as_many_wait_as_it_is_busy() -> None:
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    # M/M/1: mean wait rho s / (1 - rho) = 0.7 * 10 ms / 0.3
    assert mean_wait_s(1, 70.0, 0.01) == pytest.approx(0.7 * 0.01 / 0.3)


@given(servers=st.integers(1, 20), share=st.floats(0.05, 0.95))
def test_the_mean_wait_is_the_area_below_the_tail(servers: int, share: float) -> None:
    service_s = 0.02
    rate = share * servers / service_s
    fade_s = 1 / (servers / service_s - rate)
    area, _ = integrate.quad(
        lambda wait: wait_share(servers, rate, service_s, wait), 0, 60 * fade_s, limit=200
    )
    assert mean_wait_s(servers, rate, service_s) == pytest.approx(area, rel=1e-6)


def test_equal_service_times_halve_the_wait_of_one_server() -> None:
    # Pollaczek and Khinchine: rho s (1 + cv^2) / (2 (1 - rho)), cv = 0
    assert mean_wait_of_equal_s(50.0, 0.01) == pytest.approx(0.005)
    assert mean_wait_of_equal_s(50.0, 0.01) == pytest.approx(mean_wait_s(1, 50.0, 0.01) / 2)


def test_servers_that_cannot_keep_up_make_everybody_wait() -> None:
    assert erlang_c(2, 2.0) == 1.0
    assert wait_share(2, 300.0, 0.01, 1.0) == 1.0
    assert mean_wait_s(2, 300.0, 0.01) == math.inf
    assert mean_wait_of_equal_s(100.0, 0.01) == math.inf


@pytest.mark.parametrize("rate", [1.0, 40.0, 4_000.0])
@pytest.mark.parametrize("wait_s", [0.001, 0.5])
def test_one_server_less_would_be_too_few(rate: float, wait_s: float) -> None:
    needed = servers_needed(rate, 0.01, busy_most=0.6, wait_s=wait_s, late_most=0.001)

    def enough(servers: int) -> bool:
        busy = rate * 0.01 / servers
        return busy <= 0.6 and wait_share(servers, rate, 0.01, wait_s) <= 0.001

    assert enough(needed)
    assert needed == 1 or not enough(needed - 1)
