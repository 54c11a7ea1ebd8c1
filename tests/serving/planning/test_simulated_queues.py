"""The simulated queue, against queueing theory and scipy's distributions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from benchmarks.planning.queues import (
    Times,
    batch_times,
    poisson,
    served,
    switching,
    together,
    waits,
)
from server.planning.queueing import mean_wait_of_equal_s, mean_wait_s, wait_share

SERVICE_S = 0.01
SECONDS = 1_500.0


def confidence(values: Times, parts: int = 25) -> tuple[float, float]:
    """Mean and half width of its 99.9 % interval by means of batches, which hardly correlate."""
    means = np.array([part.mean() for part in np.array_split(values, parts)])
    half = stats.t.ppf(0.9995, parts - 1) * stats.sem(means)
    return float(means.mean()), float(half)


@pytest.mark.parametrize(("servers", "share"), [(1, 0.5), (1, 0.8), (3, 0.7)])
def test_exponential_service_waits_as_erlang_says(servers: int, share: float) -> None:
    random = np.random.default_rng([1, servers, int(10 * share)])
    rate = share * servers / SERVICE_S
    arrivals = poisson(rate, SECONDS / servers, random)
    waited = waits(arrivals, lambda _: random.exponential(SERVICE_S), servers=servers)
    mean, half = confidence(waited)
    assert abs(mean - mean_wait_s(servers, rate, SERVICE_S)) < half
    for wait_s in (0.0, SERVICE_S, 3 * SERVICE_S):
        above, half = confidence((waited > wait_s).astype(float))
        assert abs(above - wait_share(servers, rate, SERVICE_S, wait_s)) < half


def test_equal_service_waits_as_pollaczek_and_khinchine_say() -> None:
    random = np.random.default_rng(2)
    rate = 0.8 / SERVICE_S
    waited = waits(poisson(rate, SECONDS, random), lambda _: SERVICE_S)
    mean, half = confidence(waited)
    assert abs(mean - mean_wait_of_equal_s(rate, SERVICE_S)) < half


def test_a_free_server_takes_what_waits_as_one_batch() -> None:
    arrivals = np.array([0.0, 0.1, 0.2, 0.3, 9.0])
    waited, took = served(arrivals, lambda _: 1.0, batch_most=2)
    # by hand: 0 at once until 1; then 0.1 and 0.2 until 2; then 0.3 until 3; 9 at once
    assert waited == pytest.approx([0.0, 0.9, 0.8, 1.7, 0.0])
    assert took == pytest.approx([1.0, 1.9, 1.8, 2.7, 1.0])


def test_batches_hold_a_load_that_single_queries_do_not() -> None:
    random = np.random.default_rng(3)
    arrivals = poisson(1.5 / SERVICE_S, 60.0, random)

    def seconds(queries: int) -> float:
        return SERVICE_S * (0.4 + 0.6 * queries / 2)  # two cost as much as one

    assert waits(arrivals, seconds, batch_most=32).max() < 1.0
    assert waits(arrivals, lambda _: SERVICE_S).max() > 10.0


def test_service_times_have_the_measured_quantiles() -> None:
    times = {1: np.linspace(0.01, 0.03, 101).tolist(), 4: [0.1] * 101}
    seconds = batch_times(times, 0.001, np.random.default_rng(4))
    drawn = np.array([seconds(1) for _ in range(2_000)]) - 0.001
    # a straight line of quantiles is the uniform distribution
    assert stats.kstest(drawn, stats.uniform(0.01, 0.02).cdf).pvalue > 0.001
    assert seconds(2) == pytest.approx(0.1 + 2 * 0.001)  # at the next larger size
    assert seconds(9) == pytest.approx(0.1 + 9 * 0.001)


def test_gaps_of_poisson_arrivals_are_exponential() -> None:
    arrivals = poisson(50.0, 200.0, np.random.default_rng(5))
    assert stats.kstest(np.diff(arrivals), stats.expon(scale=1 / 50).cdf).pvalue > 0.001


def index_of_dispersion(arrivals: Times, seconds: float, window_s: float) -> float:
    """Variance of the counts in windows over their mean: 1 for Poisson arrivals."""
    counts, _ = np.histogram(arrivals, np.arange(0, seconds + window_s / 2, window_s))
    return float(counts.var(ddof=1) / counts.mean())


def bursts(rate: float, seconds: float, random: np.random.Generator) -> Times:
    return switching(rate, seconds, random, times=5.0, share=0.1, burst_s=2.0)


def groups(rate: float, seconds: float, random: np.random.Generator) -> Times:
    return together(rate, seconds, random, many=20, within_s=0.5)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (poisson, 1.0),
        # groups of a Poisson size of mean m: E k^2 / E k = 1 + m
        (groups, 21.0),
        # Fischer and Meier-Hellstern: 1 + 2 s1 s2 (r1 - r2)^2 / ((s1 + s2)^2 (r1 s2 + r2 s1));
        # calm r1 = 20 / 1.4, s1 = 1 / 18; burst r2 = 100 / 1.4, s2 = 1 / 2
        (bursts, 1 + 2 * (1 / 36) * (80 / 1.4) ** 2 / ((5 / 9) ** 2 * (20 / 2 + 100 / 18) / 1.4)),
    ],
)
def test_arrivals_have_their_rate_and_their_dispersion(
    kind: Callable[[float, float, np.random.Generator], Times], expected: float
) -> None:
    seconds, rate = 40_000.0, 20.0
    arrivals = kind(rate, seconds, np.random.default_rng(6))
    # windows of 100 s are long beside bursts and groups; 400 of them know an index to about 7 %
    index = index_of_dispersion(arrivals, seconds, 100.0)
    assert index == pytest.approx(expected, rel=0.25)
    error = np.sqrt(expected * rate / seconds)  # of the rate, by the same dispersion
    assert len(arrivals) / seconds == pytest.approx(rate, abs=4 * error)
    assert (np.diff(arrivals) >= 0).all()
