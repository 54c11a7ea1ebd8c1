"""Histograms of answers: every answer in its documented bin, and nothing lost at the ends."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edge_sdk.answers.prediction import DEVICE, FALLBACK, SERVER, Prediction
from edge_sdk.answers.tally import (
    LATENCY_BINS,
    LATENCY_EDGES_MS,
    UNCERTAINTY_BINS,
    AnswerTally,
    latency_quantile_ms,
    uncertainty_edges,
)

LARGEST = math.log(10)


def answer(uncertainty: float, latency_ms: float = 1.0, source: str = DEVICE) -> Prediction:
    return Prediction(0, "0", np.ones(1), uncertainty, 0.5, source, latency_ms)


def test_uncertainties_fall_into_the_documented_bins() -> None:
    tally = AnswerTally(LARGEST)
    values = np.random.default_rng(0).uniform(0, LARGEST, 2000)
    for value in values:
        tally.count(answer(float(value)))
    assert tally.uncertainty() == np.histogram(values, uncertainty_edges(LARGEST))[0].tolist()


@pytest.mark.parametrize("value", [LARGEST, LARGEST + 1e-9, 1e9, math.inf, math.nan])
def test_the_last_bin_takes_what_is_not_below_it(value: float) -> None:
    tally = AnswerTally(LARGEST)
    tally.count(answer(value))
    assert tally.uncertainty() == [0] * (UNCERTAINTY_BINS - 1) + [1]


def test_latencies_are_counted_by_source_between_powers_of_two() -> None:
    tally = AnswerTally(LARGEST)
    values = np.exp(np.random.default_rng(1).uniform(math.log(0.001), math.log(1e5), 2000))
    for value in values:
        tally.count(answer(0.1, float(value)))
    tally.count(answer(0.1, 1e-7, SERVER))
    tally.count(answer(0.1, 1e9, FALLBACK))
    edges = [0.0, *LATENCY_EDGES_MS, math.inf]
    found = tally.latency()
    assert found[DEVICE] == np.histogram(values, edges)[0].tolist()
    assert tally.latency_ms()[DEVICE] == pytest.approx(values.sum())
    assert found[SERVER] == [1] + [0] * (LATENCY_BINS - 1)
    assert found[FALLBACK] == [0] * (LATENCY_BINS - 1) + [1]


def test_a_quantile_is_near_that_of_the_samples() -> None:
    values = np.random.default_rng(2).lognormal(math.log(3.0), 0.6, 20_000)
    counts = np.histogram(values, [0.0, *LATENCY_EDGES_MS, math.inf])[0].tolist()
    for share in (0.5, 0.95, 0.99):
        found = latency_quantile_ms(counts, share)
        assert found == pytest.approx(float(np.quantile(values, share)), rel=0.2)
    assert latency_quantile_ms([0] * LATENCY_BINS, 0.5) is None
    assert latency_quantile_ms([0] * (LATENCY_BINS - 1) + [1], 1.0) == 2 * LATENCY_EDGES_MS[-1]


def test_a_copy_stays_as_it_was() -> None:
    tally = AnswerTally(LARGEST)
    tally.count(answer(0.1))
    copy = tally.copy()
    tally.count(answer(0.1))
    assert (sum(copy.uncertainty()), sum(tally.uncertainty())) == (1, 2)
    assert copy.id == tally.id
    assert AnswerTally(LARGEST).id != tally.id
