from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import entropy as scipy_entropy

from edge_sdk.gate.gate import gate_from, uncertainties
from edge_sdk.gate_form import read_gate
from edge_sdk.manifest import GatePoint
from exporters.curve import (
    candidate_thresholds,
    choose_threshold,
    fit_scales,
    measure_gate,
    operating_curve,
)


def test_entropy_is_that_of_the_softmax_in_nats() -> None:
    logits = np.random.default_rng(0).normal(scale=8, size=(200, 7)).astype(np.float32)
    expected = scipy_entropy(softmax(logits.astype(np.float64), axis=1), axis=1)
    np.testing.assert_allclose(uncertainties("entropy", logits), expected, atol=1e-12)


def test_entropy_lies_between_0_and_ln_n_for_extreme_logits() -> None:
    logits = np.array([[1e4, -1e4, 0.0], [3.0, 3.0, 3.0]], np.float32)
    entropy = uncertainties("entropy", logits)
    assert entropy.tolist() == [0.0, pytest.approx(math.log(3))]
    assert entropy.max() <= math.log(3)


def test_curve_by_hand() -> None:
    # sorted by uncertainty: the exit is right on a, b, d; the server on a, c, d
    uncertainty = np.array([0.1, 0.2, 0.3, 0.4])
    exit_correct = np.array([True, True, False, True])
    full_correct = np.array([True, False, True, True])
    curve = operating_curve(uncertainty, exit_correct, full_correct, [0.1, 0.25, 0.35, 9.0])
    assert curve == (
        # at 0.1 nothing lies below: left out
        GatePoint(0.25, 0.5, 1.0, 1.0),  # a, b exit right; c, d right on the server
        GatePoint(0.35, 0.75, 2 / 3, 0.75),  # c exits wrong
        GatePoint(9.0, 1.0, 0.75, 0.75),
    )


def test_threshold_is_that_of_the_most_accurate_pair_and_the_loosest_of_equals() -> None:
    # the server alone has 0.96; at 0.2 and 0.4 the pair beats it, at 0.8 it only equals it
    curve = [
        GatePoint(0.1, 0.2, 1, 0.97),
        GatePoint(0.2, 0.4, 1, 0.98),
        GatePoint(0.4, 0.6, 1, 0.98),
        GatePoint(0.8, 0.8, 1, 0.96),
        GatePoint(2.4, 1, 0.9, 0.9),
    ]
    chosen = choose_threshold(curve, exit_accuracy=0.9, full_accuracy=0.96, tolerance=0.0)
    assert chosen == 0.4


def test_equals_that_differ_in_the_last_bit_are_equal() -> None:
    assert 0.1 + 0.2 != 0.3
    curve = [GatePoint(0.1, 0.2, 1, 0.1 + 0.2), GatePoint(0.5, 0.6, 1, 0.3)]
    chosen = choose_threshold(curve, exit_accuracy=0.1, full_accuracy=0.2, tolerance=0.0)
    assert chosen == 0.5


@pytest.mark.parametrize(("tolerance", "expected"), [(0.0, 0.1), (0.005, 0.5), (0.1, 1.0)])
def test_tolerance_is_below_the_best_pair(tolerance: float, expected: float) -> None:
    # floors: 0.98, 0.975, and 0.88, which the device alone (0.9) lifts to 0.9
    curve = [GatePoint(0.1, 0.3, 1, 0.98), GatePoint(0.5, 0.6, 1, 0.976), GatePoint(1, 1, 0.9, 0.9)]
    chosen = choose_threshold(curve, exit_accuracy=0.9, full_accuracy=0.95, tolerance=tolerance)
    assert chosen == expected


def test_everything_is_offloaded_where_the_server_alone_is_best() -> None:
    # within 0.01 of it there is one
    curve = [GatePoint(0.1, 0.5, 1, 0.975), GatePoint(2.4, 1, 0.9, 0.9)]
    chosen = [
        choose_threshold(curve, exit_accuracy=0.9, full_accuracy=0.98, tolerance=tolerance)
        for tolerance in (0.0, 0.01)
    ]
    assert chosen == [0.0, 0.1]


def test_threshold_never_makes_the_pair_worse_than_the_device_alone() -> None:
    # the device alone has 0.95 here, more than the server's 0.9
    curve = [GatePoint(0.1, 0.5, 1, 0.92), GatePoint(2.4, 1, 0.95, 0.95)]
    chosen = choose_threshold(curve, exit_accuracy=0.95, full_accuracy=0.9, tolerance=0.005)
    assert chosen == 2.4


def test_everything_is_offloaded_where_no_threshold_is_good_enough() -> None:
    curve = [GatePoint(0.1, 0.5, 0.5, 0.7), GatePoint(2.4, 1, 0.5, 0.5)]
    assert choose_threshold(curve, exit_accuracy=0.5, full_accuracy=0.9, tolerance=0.005) == 0.0


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_grid_scales_with_the_number_of_classes(classes: int) -> None:
    thresholds = candidate_thresholds(np.zeros(5), classes)
    # 2.3 of ln 10 = 2.3026 nats, in the same proportion
    assert 2.3 * math.log(classes) / math.log(10) == pytest.approx(thresholds[-2])
    assert thresholds[-1] > math.log(classes)


def test_no_quantile_lies_on_a_sample() -> None:
    uncertainty = np.random.default_rng(1).uniform(0, 2.3, 500)
    assert not np.isin(candidate_thresholds(uncertainty, 10), uncertainty).any()


def test_last_point_of_a_measured_curve_is_the_device_alone() -> None:
    rng = np.random.default_rng(2)
    exit_logits, full_logits = rng.normal(size=(2, 300, 10)).astype(np.float32)
    labels = rng.integers(0, 10, 300)
    gate = measure_gate(exit_logits, full_logits, labels)
    last = gate.curve[-1]
    assert last.exit_rate == 1.0
    assert last.accuracy == last.exit_accuracy == (exit_logits.argmax(1) == labels).mean()
    rates = [point.exit_rate for point in gate.curve]
    assert rates == sorted(rates)


@pytest.mark.parametrize(
    "policy",
    [
        "entropy",
        "margin",
        "vacuity",
        "all(entropy:0.3, margin:0.2)",
        "any(vacuity:0.4, margin:0.2)",
    ],
)
def test_a_curve_is_of_the_gate_that_a_device_runs(policy: Any) -> None:
    rng = np.random.default_rng(3)
    exit_logits = (4 * rng.normal(size=(200, 10))).astype(np.float32)
    full_logits = rng.normal(size=(200, 10)).astype(np.float32)
    labels = rng.integers(0, 10, 200)
    spec = measure_gate(exit_logits, full_logits, labels, policy=policy)
    assert spec.policy == policy
    for point in spec.curve[:: len(spec.curve) // 4]:
        gate = gate_from(spec, 10, threshold=point.threshold)
        exits = np.array([gate.decide(row).exit for row in exit_logits])
        assert exits.mean() == pytest.approx(point.exit_rate)
        pair = np.where(exits, exit_logits.argmax(1), full_logits.argmax(1))
        assert (pair == labels).mean() == pytest.approx(point.accuracy)
    assert spec.curve[-1].exit_rate == 1.0


def test_open_scales_are_fitted_at_the_share_that_the_first_measure_lets_exit() -> None:
    rng = np.random.default_rng(4)
    exit_logits = (3 * rng.normal(size=(400, 10))).astype(np.float32)
    labels = exit_logits.argmax(1)
    # the exit head is wrong exactly where its entropy is high, the whole network everywhere else
    high = uncertainties("entropy", exit_logits) > 0.8
    labels[high] = (labels[high] + 1) % 10
    full_logits = np.eye(10, dtype=np.float32)[np.where(high, labels, (labels + 1) % 10)]
    alone = measure_gate(exit_logits, full_logits, labels, policy="entropy")
    share = float((uncertainties("entropy", exit_logits) < alone.threshold).mean())
    assert 0.1 < share < 0.95
    fitted = measure_gate(exit_logits, full_logits, labels, policy="all(entropy, margin)")
    form = read_gate(fitted.policy)
    assert [term.kind for term in form.terms] == ["entropy", "margin"]
    for term in form.terms:
        assert term.scale is not None
        below = (uncertainties(term.kind, exit_logits) < term.scale).mean()
        assert below == pytest.approx(share, abs=0.01)  # a scale has four digits
    # given scales stay, and so does a gate that leaves nothing open
    half = measure_gate(exit_logits, full_logits, labels, policy="any(entropy:0.5, margin)")
    terms = read_gate(half.policy).terms
    assert (terms[0].scale, terms[1].scale) == (0.5, form.terms[1].scale)
    closed = "all(entropy:0.5, margin:0.25)"
    assert measure_gate(exit_logits, full_logits, labels, policy=closed).policy == closed


def test_a_network_that_is_sure_of_everything_gives_scales_above_0() -> None:
    exit_logits = np.zeros((50, 10), np.float32)
    exit_logits[:, 3] = 1e4  # entropy and margin are 0
    text = fit_scales("all(entropy, margin)", exit_logits, 0.5)
    assert all(term.scale is not None and term.scale > 0 for term in read_gate(text).terms)
    assert (uncertainties(text, exit_logits) < 1).all()
