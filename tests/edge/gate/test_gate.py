"""The gate: uncertainties against scipy, torch and hand-worked numbers; when it exits."""

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from edge_sdk.errors import ConfigurationError
from edge_sdk.gate.gate import (
    POLICIES,
    Floats,
    Gate,
    entropy,
    gate_from,
    margin,
    uncertainties,
    vacuity,
    vacuity_exp,
)
from edge_sdk.manifest import GateSpec

SIZES = (2, 3, 10, 1000)
LARGEST = float(np.finfo(np.float32).max)


def floats(*values: float) -> Floats:
    return np.array(values, np.float32)


def random_logits(rows: int, size: int, scale: float = 4.0) -> Floats:
    return np.random.default_rng(size).normal(0, scale, (rows, size)).astype(np.float32)


def softmax(logits: Floats) -> NDArray[np.float64]:
    probabilities: NDArray[np.float64] = scipy.special.softmax(logits.astype(np.float64))
    return probabilities


@pytest.mark.parametrize("size", SIZES)
def test_entropy_is_that_of_scipy_in_nats(size: int) -> None:
    for logits in random_logits(20, size):
        # float64 on both sides: only the order of N additions differs
        expected = float(scipy.stats.entropy(softmax(logits)))
        assert entropy(logits)[2] == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_margin_is_one_less_the_lead_of_the_first_over_the_second(size: int) -> None:
    for logits in random_logits(20, size):
        second, first = np.sort(softmax(logits))[-2:]
        assert margin(logits)[2] == pytest.approx(1 - (first - second), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_vacuity_and_expected_probabilities_are_those_of_the_dirichlet(size: int) -> None:
    for logits in random_logits(20, size):
        alpha = torch.nn.functional.softplus(torch.from_numpy(logits).double()) + 1
        _, probabilities, uncertainty = vacuity(logits)
        mean = torch.distributions.Dirichlet(alpha).mean.numpy()
        np.testing.assert_allclose(probabilities, mean, rtol=1e-6)
        # torch's softplus drops e^-x above x = 20, 2e-9 there
        assert uncertainty == pytest.approx(size / float(alpha.sum()), rel=1e-8)


@pytest.mark.parametrize("size", SIZES)
def test_vacuity_of_exp_is_that_of_the_dirichlet_with_the_tangent_beyond_10(size: int) -> None:
    for logits in random_logits(20, size) * np.float32(3):
        z = [float(logit) for logit in logits]
        tangent = math.exp(10)
        evidence = [math.exp(v) if v <= 10 else tangent + tangent * (v - 10) for v in z]
        mean = torch.distributions.Dirichlet(torch.tensor(evidence).double() + 1).mean.numpy()
        _, probabilities, uncertainty = vacuity_exp(logits)
        np.testing.assert_allclose(probabilities, mean, rtol=1e-6)
        assert uncertainty == pytest.approx(size / (size + sum(evidence)), rel=1e-9)


def test_uncertainties_worked_out_by_hand() -> None:
    # softmax: three quarters and one quarter
    logits = floats(math.log(3), 0)
    # -(3/4 ln 3/4 + 1/4 ln 1/4) = 2 ln 2 - 3/4 ln 3; float32 holds ln 3 to 6e-8
    assert entropy(logits)[2] == pytest.approx(2 * math.log(2) - 0.75 * math.log(3), abs=1e-7)
    assert margin(logits)[2] == pytest.approx(0.5, abs=1e-7)
    # softplus(ln 3) = ln 4, softplus(0) = ln 2: S = 2 + 3 ln 2
    assert vacuity(logits)[2] == pytest.approx(2 / (2 + 3 * math.log(2)), abs=1e-7)
    # exp(ln 3) = 3, exp(0) = 1: S = 2 + 4; at 12 it is e^10 * 3
    assert vacuity_exp(logits)[2] == pytest.approx(1 / 3, abs=1e-7)
    assert vacuity_exp(floats(12, -1e4))[2] == pytest.approx(2 / (2 + 3 * math.exp(10)), rel=1e-7)


@pytest.mark.parametrize("size", SIZES)
def test_equal_logits_are_the_most_uncertain(size: int) -> None:
    logits = np.zeros(size, np.float32)
    assert entropy(logits)[2] == pytest.approx(math.log(size), rel=1e-12)
    assert margin(logits)[2] == pytest.approx(1.0, rel=1e-12)
    # no evidence at all is further down: softplus(0) = ln 2 is a little
    assert vacuity(logits - np.float32(1e4))[2] == 1.0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("height", [1e2, 1e4, LARGEST])
@pytest.mark.parametrize("floor", [0.0, -1e4, -LARGEST])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.filterwarnings("error")
def test_a_towering_logit_gives_a_sure_finite_answer(
    policy: str, floor: float, height: float, size: int
) -> None:
    logits = np.full(size, floor, np.float32)
    logits[1] = height
    label, probabilities, uncertainty = POLICIES[policy](logits)
    assert label == 1
    assert math.isfinite(uncertainty)
    assert np.isfinite(probabilities).all()
    if not policy.startswith("vacuity"):
        # 999 other classes at e^-100 each are 4e-41
        assert 0 <= uncertainty < 1e-38
        assert probabilities[1] == 1


@pytest.mark.parametrize("policy", POLICIES)
@given(
    logits=hnp.arrays(
        np.float32,
        st.integers(2, 12),
        elements=st.floats(-LARGEST, LARGEST, width=32) | st.floats(-20, 20, width=32),
    )
)
def test_any_finite_logits_give_a_finite_uncertainty_in_range(policy: str, logits: Floats) -> None:
    label, probabilities, uncertainty = POLICIES[policy](logits)
    highest = math.log(len(logits)) if policy == "entropy" else 1.0
    assert 0 <= uncertainty <= highest * (1 + 1e-12)
    assert label == int(logits.argmax())
    assert probabilities.dtype == np.float32
    assert float(probabilities.sum()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.filterwarnings("error")
def test_nan_and_infinity_never_exit(policy: str, value: float) -> None:
    decision = Gate(POLICIES[policy], math.inf).decide(floats(1.0, value, 3.0))
    assert not decision.exit
    assert math.isnan(decision.uncertainty)
    assert decision.label == 1


def test_deciding_leaves_the_logits_as_they_were() -> None:
    # they are onnxruntime's own output buffer
    logits = random_logits(1, 10)[0]
    before = logits.copy()
    for policy in POLICIES.values():
        Gate(policy, 0.5).decide(logits)
    np.testing.assert_array_equal(logits, before)


def test_exits_strictly_below_the_threshold_only() -> None:
    logits = floats(2, 1, 0)
    value = entropy(logits)[2]
    assert not Gate(entropy, value).decide(logits).exit
    decision = Gate(entropy, math.nextafter(value, math.inf)).decide(logits)
    assert decision.exit
    assert decision.label == 0
    assert decision.uncertainty == value
    assert decision.threshold == math.nextafter(value, math.inf)
    np.testing.assert_allclose(decision.probabilities, softmax(logits), rtol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_infinite_thresholds_always_or_never_exit(policy: str) -> None:
    for logits in (np.zeros(10, np.float32), floats(1e4, 0)):
        assert Gate(POLICIES[policy], math.inf).decide(logits).exit
        assert not Gate(POLICIES[policy], -math.inf).decide(logits).exit


def test_a_threshold_written_later_counts_from_the_next_sample() -> None:
    gate = Gate(entropy, 0.0)
    assert not gate.decide(floats(3, 0)).exit
    gate.threshold = 0.5
    assert gate.decide(floats(3, 0)).exit


def test_the_users_threshold_wins_over_the_bundles() -> None:
    spec = GateSpec("margin", 0.25)
    assert gate_from(spec, 10) == Gate(margin, 0.25)
    assert gate_from(spec, 10, threshold=0.75) == Gate(margin, 0.75)
    assert gate_from(spec, 10, threshold=0.0) == Gate(margin, 0.0)
    with pytest.raises(ConfigurationError, match="nan"):
        gate_from(spec, 10, threshold=math.nan)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_curves_uncertainties_are_bit_equal_to_the_gates(policy: str, order: str) -> None:
    rows = random_logits(200, 10)
    array = np.asarray(rows, order="F" if order == "F" else "C")
    gate = Gate(POLICIES[policy], 0.4)
    one_by_one = [gate.decide(row).uncertainty for row in rows]
    assert uncertainties(policy, array).tolist() == one_by_one


def test_an_unknown_policy_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match=r"entropy, margin, vacuity, .* got magic"):
        uncertainties("magic", np.zeros((1, 2), np.float32))
