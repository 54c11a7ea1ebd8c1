"""The test for drift: its statistic, its false alarms over a day, and real drifts of a real model.

Oracle: scipy's two-sample test of Kolmogorov and Smirnov, on the samples themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from edge_sdk.answers.tally import uncertainty_edges
from edge_sdk.gate.gate import uncertainties
from edge_sdk.manifest import GatePoint
from edge_sdk.nets import build
from edge_sdk.training.data.load import load_dataset
from exporters.curve import candidate_thresholds, measure_gate, operating_curve
from server.alerts.drift import (
    SAMPLES_MOST,
    Drift,
    HeldOut,
    find_drift,
    look_alpha,
    sample_count,
    smirnov_bound,
)

Floats = NDArray[np.float64]
TOP = math.log(10)
EDGES = uncertainty_edges(TOP)
LOOKS = 96


def held_out(values: Floats) -> HeldOut:
    """What a bundle's manifest would tell of these uncertainties."""
    right = np.ones(len(values), dtype=bool)
    curve = operating_curve(values, right, right, candidate_thresholds(values, 10))
    found = HeldOut.of(curve)
    assert found is not None
    return found


def counts(values: Floats) -> list[int]:
    return [int(count) for count in np.histogram(values, EDGES)[0]]


def uncertain(random: np.random.Generator, number: int, shape: float = 0.4) -> Floats:
    """Uncertainties as networks have them: most near 0, a few near the top."""
    return TOP * random.beta(shape, 2.0, number)


@pytest.mark.parametrize("n", [20, 100, 350])
@pytest.mark.parametrize("m", [20, 150, 359])
def test_the_bound_is_never_below_the_exact_probability(n: int, m: int) -> None:
    for moved in (0.05, 0.1, 0.2, 0.3, 0.5):
        exact = stats.ks_2samp(np.arange(m) / m, np.arange(n) / n + moved, method="exact")
        assert smirnov_bound(exact.statistic, n, m) >= exact.pvalue


def test_the_distance_is_never_above_that_of_the_samples_and_near_it() -> None:
    random = np.random.default_rng(3)
    for shape in (0.4, 0.6, 1.0):
        known, seen = uncertain(random, 359), uncertain(random, 500, shape)
        found = find_drift(counts(seen), EDGES, held_out(known))
        true = stats.ks_2samp(known, seen).statistic
        assert true - 0.05 <= found.distance <= true + 1e-12  # a step of the curve is 0.05
        assert found.answers == 500


def test_the_number_of_samples_is_found_in_the_rates() -> None:
    random = np.random.default_rng(4)
    for number in (61, 359, 1000, 10_000):
        found = held_out(uncertain(random, number)).samples
        assert number % found == 0
        assert found > number / 20
    assert sample_count([1 / math.pi, 1 / math.e]) == SAMPLES_MOST
    assert HeldOut.of([GatePoint(0.1, 0.5, 1.0, 1.0)]) is None


def test_no_answers_and_the_same_answers_are_no_drift() -> None:
    known = uncertain(np.random.default_rng(5), 359)
    assert find_drift([0] * 32, EDGES, held_out(known)) == Drift(0.0, 1.0, 0, less_sure=False)
    same = find_drift(counts(known), EDGES, held_out(known))
    assert (same.distance, same.p_value) == (0.0, 1.0)
    surer = find_drift(counts(known / 50), EDGES, held_out(known))
    assert surer.distance > 0.3
    assert not surer.less_sure


def test_chance_alone_raises_no_more_alarms_a_day_than_stated() -> None:
    """Days of a device whose inputs do not change: it is looked at every quarter of an hour, at the
    answers of the last hour, which overlap. 10 % are allowed here, so that 200 days can refute it.
    """
    random = np.random.default_rng(6)
    allowed, days, per_look = 0.1, 200, 60
    alarms = 0
    for _ in range(days):
        known = held_out(uncertain(random, 359))
        quarters = [np.array(counts(uncertain(random, per_look))) for _ in range(LOOKS + 3)]
        windows = [np.sum(quarters[i : i + 4], axis=0).tolist() for i in range(LOOKS)]
        alpha = look_alpha(allowed, LOOKS, 1)
        alarms += any(find_drift(one, EDGES, known).p_value < alpha for one in windows)
    # of 200 days with 10 %, more than 31 alarms come with probability 0.6 %
    assert alarms <= 31


def shifted(x: NDArray[Any]) -> NDArray[Any]:
    """Digits two pixels to the right, as after a knock at the camera."""
    return np.roll(x, 2, axis=-1)


def blurred(x: NDArray[Any]) -> NDArray[Any]:
    """Digits out of focus: the mean of each pixel and its four neighbours, twice."""
    moves = [(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)]
    for _ in range(2):
        x = np.mean([np.roll(x, move, axis=(-2, -1)) for move in moves], axis=0)
    return x.astype(np.float32)


@dataclass(frozen=True)
class Exit:
    """The exit head of a trained network, and what its bundle's manifest tells of it."""

    net: Any
    held_out: HeldOut
    x: NDArray[Any]

    @classmethod
    def trained(cls, train_centrally: Callable[..., None]) -> Exit:
        """A network on the digits, measured on 350 samples; 800 others remain."""
        data = load_dataset("digits")
        x, y = np.concatenate([data.x_train, data.x_test]), np.r_[data.y_train, data.y_test]
        net = build("tiny", classes=10, input_shape=(1, 8, 8), mean=data.mean, std=data.std, seed=0)
        train_centrally(net, x[:600], y[:600], epochs=10, learning_rate=1e-2)
        net.eval()
        exits, final = cls._logits(net, x[600:950])
        found = HeldOut.of(measure_gate(exits, final, y[600:950]).curve)
        assert found is not None
        return cls(net, found, x[950:])

    @staticmethod
    def _logits(net: Any, x: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        with torch.inference_mode():
            z = net.prefix(2)(torch.from_numpy(np.ascontiguousarray(x)))
            return net.exit_head(2)(z).numpy(), net.suffix(2)(z).numpy()

    def look(self, x: NDArray[Any]) -> Drift:
        values = uncertainties("entropy", self._logits(self.net, x)[0])
        return find_drift(counts(values), EDGES, self.held_out)


@pytest.fixture(scope="module")
def exit_head(train_centrally: Callable[..., None]) -> Exit:
    torch.set_num_threads(1)
    return Exit.trained(train_centrally)


@pytest.mark.parametrize("change", [shifted, blurred])
def test_a_real_drift_is_found_within_400_answers(exit_head: Exit, change: Any) -> None:
    """Among ten devices with one false alarm in 100 days; the unchanged digits are no drift."""
    alpha = look_alpha(0.01, LOOKS, 10)
    same, other = exit_head.look(exit_head.x), exit_head.look(change(exit_head.x[:400]))
    assert same.p_value > alpha
    assert same.distance < 0.15
    assert other.p_value < alpha, other
    assert other.distance > 0.15
