"""SplitLPF, Eq. 8-11, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from server.training.methods.formulas.contribution import (
    contribution_weights,
    cosine,
    global_gradient,
    gradient_of,
)

# Five clients of equal size. The first pulls backwards; |c| sums to 2.6, its share is 9/26.
RIDER = {"rider": -0.9, "a": 0.5, "b": 0.4, "c": 0.4, "d": 0.4}
EQUAL = dict.fromkeys(RIDER, 100)


def test_free_rider_is_paid_under_the_literal_form() -> None:
    weights = contribution_weights(EQUAL, RIDER, 0.5, signed=False)
    # .5 * .2 + .5 * 9/26 = .1 + .17308: more than the fifth its data are
    assert weights["rider"] == pytest.approx(0.1 + 9 / 52)
    assert round(weights["rider"], 3) == 0.273
    assert weights["a"] == pytest.approx(0.1 + 5 / 52)
    assert sum(weights.values()) == pytest.approx(1)


def test_free_rider_gets_nothing_when_the_sign_is_kept() -> None:
    weights = contribution_weights(EQUAL, RIDER, 0.5)
    # .1 - 9/52 < 0; the others' .1 + 5/52 and three times .1 + 4/52 sum to .4 + 17/52
    assert weights["rider"] == 0
    assert weights["a"] == pytest.approx((0.1 + 5 / 52) / (0.4 + 17 / 52))
    assert sum(weights.values()) == pytest.approx(1)


def test_alpha_one_is_by_samples_bit_for_bit() -> None:
    samples = {"a": 7, "b": 13, "c": 3011}
    cosines = {"a": 0.3, "b": -0.2, "c": 1.0}
    assert contribution_weights(samples, cosines, 1.0) == {
        "a": 7 / 3031,
        "b": 13 / 3031,
        "c": 3011 / 3031,
    }


def test_alpha_zero_is_direction_alone() -> None:
    weights = contribution_weights({"a": 1, "b": 999}, {"a": 0.6, "b": 0.2}, 0.0)
    assert weights == {"a": pytest.approx(0.75), "b": pytest.approx(0.25)}


def test_without_a_direction_samples_decide() -> None:
    # the first round, zero gradients: every cosine is 0
    assert contribution_weights({"a": 1, "b": 3}, {"a": 0.0, "b": 0.0}) == {"a": 0.25, "b": 0.75}


def test_all_against_the_last_gradient_fall_back_to_samples() -> None:
    # alpha 0: every weight is below zero
    weights = contribution_weights({"a": 1, "b": 3}, {"a": -0.5, "b": -0.5}, 0.0)
    assert weights == {"a": 0.25, "b": 0.75}
    # alpha .5: .5 * .25 - .25 < 0, .5 * .75 - .25 > 0: who has more data is left
    assert contribution_weights({"a": 1, "b": 3}, {"a": -0.5, "b": -0.5}) == {"a": 0.0, "b": 1.0}


def test_a_cosine_within_the_dead_zone_says_nothing() -> None:
    samples = {"a": 100, "b": 200, "c": 100, "d": 100}
    cosines = {"a": -0.09, "b": 0.6, "c": 0.2, "d": 0.1}
    # d lies on the edge and counts; |c| sums to .9 without a
    weights = contribution_weights(samples, cosines, 0.5, dead_zone=0.1)
    assert weights == {
        "a": pytest.approx(0.1 / (0.5 + 0.5)),
        "b": pytest.approx(0.2 + 3 / 9),
        "c": pytest.approx(0.1 + 1 / 9),
        "d": pytest.approx(0.1 + 1 / 18),
    }
    # noise alone: by samples, where the sign of the noise would leave c without a vote
    noise = {"a": 0.01, "b": 0.02, "c": -0.05, "d": 0.01}
    assert contribution_weights(samples, noise, 0.5)["c"] == 0
    assert contribution_weights(samples, noise, 0.5, dead_zone=0.1) == {
        "a": 0.2,
        "b": 0.4,
        "c": 0.2,
        "d": 0.2,
    }


def test_one_client_has_all_the_weight_whatever_its_direction() -> None:
    for value in (1.0, 0.0, -1.0):
        assert contribution_weights({"a": 5}, {"a": value}) == {"a": 1.0}


@given(
    st.lists(
        st.tuples(st.integers(1, 10_000), st.floats(-1, 1, allow_nan=False)), min_size=1, max_size=9
    ),
    st.floats(0, 1),
    st.booleans(),
)
def test_weights_are_shares(clients: list[tuple[int, float]], alpha: float, signed: bool) -> None:
    samples = {str(i): n for i, (n, _) in enumerate(clients)}
    cosines = {str(i): c for i, (_, c) in enumerate(clients)}
    weights = contribution_weights(samples, cosines, alpha, signed=signed)
    assert math.isclose(sum(weights.values()), 1)
    assert min(weights.values()) >= 0


def test_gradient_is_start_minus_end_without_statistics() -> None:
    start = {"w": torch.tensor([1.0, 2.0]), "bn.running_mean": torch.tensor([5.0])}
    end = {"w": torch.tensor([0.5, 3.0]), "bn.running_mean": torch.tensor([9.0])}
    assert {k: v.tolist() for k, v in gradient_of(start, end).items()} == {"w": [0.5, -1.0]}


def test_cosine_by_hand() -> None:
    one = {"w": torch.tensor([3.0]), "v": torch.tensor([4.0])}
    # over all parameters together: (3*1 + 4*0) / (5 * 1)
    assert cosine(one, {"w": torch.tensor([1.0]), "v": torch.tensor([0.0])}) == pytest.approx(0.6)
    assert cosine(one, {k: -t for k, t in one.items()}) == -1
    # a client of another depth is compared by what both hold
    assert cosine(one, {"w": torch.tensor([2.0])}) == 1
    assert cosine(one, {"u": torch.tensor([2.0])}) == 0


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_cosine_of_no_direction_is_zero(value: float) -> None:
    assert cosine({"w": torch.full((2,), value)}, {"w": torch.ones(2)}) == 0


def test_cosine_of_extremes_does_not_overflow() -> None:
    huge = {"w": torch.tensor([3e38, 3e38])}
    tiny = {"w": torch.tensor([1e-40, 1e-40])}
    assert cosine(huge, tiny) == pytest.approx(1)


def test_global_gradient_is_the_mean_over_the_clients_that_hold_it() -> None:
    gradients = {
        "a": {"w": torch.tensor([1.0])},
        "b": {"w": torch.tensor([3.0]), "v": torch.tensor([8.0])},
        "c": {"w": torch.tensor([100.0]), "u": torch.tensor([1.0])},
    }
    got = global_gradient(gradients.items(), {"a": 0.25, "b": 0.75, "c": 0.0})
    assert {k: v.tolist() for k, v in got.items()} == {"w": [2.5], "v": [8.0]}
