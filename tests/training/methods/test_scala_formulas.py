"""SCALA's formulas: shares of a batch (Eq. 3) and logit adjustment (Eq. 12-13)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Categorical

from server.training.core.round_view import RoundView
from server.training.methods.formulas.adjustment import (
    adjusted_losses,
    adjustment,
    joint_share,
    label_share,
)
from server.training.methods.formulas.batch_share import proportional


def test_shares_of_a_batch_by_hand() -> None:
    # 320 * 100 / 600 = 53.3, 320 * 200 / 600 = 106.7, 320 * 300 / 600 = 160
    assert proportional({"a": 100, "b": 200, "c": 300}, 320, RoundView(1)) == {
        "a": 53,
        "b": 106,
        "c": 160,
    }


def test_a_small_client_brings_one_sample_at_least() -> None:
    assert proportional({"a": 1, "b": 9_999}, 32, RoundView(1)) == {"a": 1, "b": 31}


def test_a_batch_smaller_than_the_fleet_has_one_of_each() -> None:
    assert proportional(dict.fromkeys("abcde", 10), 3, RoundView(1)) == dict.fromkeys("abcde", 1)


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=50), st.integers(1, 10**6))
def test_shares_are_floors_of_exact_fractions(sizes: list[int], batch: int) -> None:
    samples = {str(place): size for place, size in enumerate(sizes)}
    shares = proportional(samples, batch, RoundView(1))
    total = sum(sizes)
    for name, share in shares.items():
        # in whole numbers, where no float rounds: share <= B*n/N < share + 1, or 1 where that is 0
        exact = batch * samples[name]
        assert share * total <= exact < (share + 1) * total or (share == 1 and exact < total)
    floored = sum(share for share in shares.values() if share > 1)
    assert floored <= batch


def test_shares_of_labels_by_hand() -> None:
    assert label_share([2, 0, 6]).tolist() == [0.25, 0, 0.75]
    # not known: all alike, which adjusts nothing
    assert label_share([0, 0]).tolist() == [0.5, 0.5]


def test_joint_share_is_the_share_of_all_data_together() -> None:
    counts = {"a": [3, 1, 0], "b": [0, 2, 4], "absent": [9, 9, 9]}
    present = {name: label_share(counts[name]) for name in ("a", "b")}
    joint = joint_share(present, {"a": 4, "b": 6, "absent": 27})
    # 3, 3 and 4 of 10 samples; who is absent has no say
    torch.testing.assert_close(joint, torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64))


def test_a_label_that_no_client_has_is_held_at_a_millionth() -> None:
    added = adjustment(label_share([1, 0]))
    assert added.tolist() == pytest.approx([0, math.log(1e-6)])
    assert torch.isfinite(added).all()


def test_adjusted_loss_by_hand() -> None:
    # s = (0, 0), P = (3/4, 1/4): exp(s + ln P) is P itself, so the loss of label k is -ln P_k
    added = adjustment(label_share([3, 1]))
    losses = adjusted_losses(torch.zeros(2, 2), torch.tensor([0, 1]), added)
    assert losses.tolist() == pytest.approx([-math.log(0.75), -math.log(0.25)])


def test_adjusted_loss_is_the_likelihood_of_a_reweighted_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 5, (7,), generator=generator)
    share = torch.rand(5, generator=generator, dtype=torch.float64) + 0.1
    share /= share.sum()
    # Eq. 11 read backwards: p(y|x) is proportional to P(y) * exp(s_y)
    reweighted = Categorical(probs=share * logits.exp())
    expected = -reweighted.log_prob(labels)  # type: ignore[no-untyped-call]  # torch
    torch.testing.assert_close(adjusted_losses(logits, labels, share.log()), expected)


def test_equal_shares_or_none_are_plain_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 4, generator=generator)
    labels = torch.randint(0, 4, (6,), generator=generator)
    plain = -torch.log_softmax(logits, 1)[torch.arange(6), labels]
    torch.testing.assert_close(adjusted_losses(logits, labels, None), plain)
    equal = adjustment(torch.full((4,), 0.25, dtype=torch.float64))
    torch.testing.assert_close(adjusted_losses(logits, labels, equal), plain)


def test_a_client_of_one_label_learns_next_to_nothing_of_it() -> None:
    # ln P is 0 for its own label and ln 1e-6 for others: the softmax is as good as certain
    logits = torch.zeros(1, 10, requires_grad=True)
    added = adjustment(label_share([0, 0, 0, 5, 0, 0, 0, 0, 0, 0]))
    loss = adjusted_losses(logits, torch.tensor([3]), added).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    # its share of the softmax is one over 1 + 9e-6; float32 holds that to 6 % of the rest
    assert float(gradient[0, 3]) == pytest.approx(-9e-6, rel=6e-2)
    assert float(loss.detach()) == pytest.approx(math.log1p(9e-6), rel=6e-2)


def test_half_the_strength_is_half_the_logarithm_and_the_least_share_bounds_it() -> None:
    share = torch.tensor([0.75, 0.25, 0.0], dtype=torch.float64)
    found = adjustment(share, strength=0.5, least=0.01)
    expected = [0.5 * math.log(0.75), 0.5 * math.log(0.25), 0.5 * math.log(0.01)]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
    assert not adjustment(share, strength=0.0).any()
