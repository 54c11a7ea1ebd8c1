"""HARMONY's contrastive alignment: by hand, by numpy, and where its gradient could break."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from server.training.methods.formulas.contrastive import (
    SHORTEST,
    Alignment,
    alignment_loss,
    at_length_1,
)


def tensor(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_pairs_by_hand() -> None:
    # 3-4-5: a pair of one class costs 25 / 2; another at 0.6 of a margin of 1 costs 0.4^2 / 2
    first, second = tensor([3.0, 0.0], [0.6, 0.0]), tensor([0.0, 4.0], [0.0, 0.0])
    one_of_each = alignment_loss(first, second, torch.tensor([True, False]), 1.0)
    assert float(one_of_each) == pytest.approx((12.5 + 0.08) / 2)
    assert float(alignment_loss(first, second, torch.tensor([False, True]), 1.0)) == pytest.approx(
        (0.0 + 0.18) / 2
    )
    # with a margin of 6 the pair that is 5 apart is still pushed: (6 - 5)^2 / 2
    assert float(alignment_loss(first[:1], second[:1], torch.tensor([False]), 6.0)) == 0.5


@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 5), st.floats(0, 3))
def test_loss_is_the_papers_sum_over_pairs(
    seed: int, pairs: int, width: int, margin: float
) -> None:
    generator = np.random.default_rng(seed)
    one, two = generator.standard_normal((2, pairs, width))
    same = generator.integers(0, 2, pairs).astype(bool)
    expected = 0.0
    for a, b, alike in zip(one, two, same, strict=True):
        d = float(np.linalg.norm(a - b))
        expected += alike * d**2 / 2 + (1 - alike) * max(0.0, margin - d) ** 2 / 2
    got = alignment_loss(
        torch.from_numpy(one), torch.from_numpy(two), torch.from_numpy(same), margin
    )
    assert float(got) == pytest.approx(expected / pairs, abs=1e-12)


@pytest.mark.parametrize("same", [[True, True], [False, False], [True, False]])
def test_gradient_is_that_of_finite_differences(same: list[bool]) -> None:
    generator = torch.Generator().manual_seed(1)
    # near enough for the margin to matter, and not within a finite difference of it
    first = torch.rand(2, 3, dtype=torch.float64, generator=generator).requires_grad_()
    second = torch.rand(2, 3, dtype=torch.float64, generator=generator).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda a, b: alignment_loss(a, b, torch.tensor(same), 2.0), (first, second)
    )


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("apart", [0.0, 1e-30, 1e-22, 1e-18])
def test_gradient_is_finite_where_embeddings_meet(apart: float, alike: bool) -> None:
    first = torch.full((4, 8), 1.0).requires_grad_()
    second = torch.full((4, 8), 1.0 + apart)
    loss = alignment_loss(first - 1 + apart, second - 1, torch.full((4,), alike), 1.0)
    (gradient,) = torch.autograd.grad(loss, first)
    assert torch.isfinite(gradient).all()
    if not alike:  # max(0, 1 - 0)^2 / 2
        assert float(loss.detach()) == pytest.approx(0.5)


def test_pairs_push_away_from_each_other_however_near() -> None:
    first = torch.zeros(1, 2).requires_grad_()
    second = torch.tensor([[1e-15, 0.0]])
    loss = alignment_loss(first, second, torch.tensor([False]), 1.0)
    (gradient,) = torch.autograd.grad(loss, first)
    # a step against it takes s1 to the left, away from s2, with the full force of the margin
    assert gradient.tolist() == [[pytest.approx(1.0), 0.0]]


def test_pairs_beyond_the_margin_are_left_alone() -> None:
    first = torch.tensor([[2.0, 0.0]]).requires_grad_()
    loss = alignment_loss(first, torch.zeros(1, 2), torch.tensor([False]), 1.0)
    (gradient,) = torch.autograd.grad(loss, first)
    assert float(loss.detach()) == 0
    assert gradient.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e4])
def test_at_length_1_the_loss_of_one_class_is_1_less_the_cosine(scale: float) -> None:
    """Its gradient is sin / |s| for each pair, so it shrinks with the length."""
    generator = torch.Generator().manual_seed(2)
    first, second = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    first = (scale * first).requires_grad_()
    loss = alignment_loss(at_length_1(first), at_length_1(second), torch.full((5,), True), 1.0)
    cosine = nn.functional.cosine_similarity(first, second).detach()
    torch.testing.assert_close(loss.detach(), (1 - cosine).mean())
    (gradient,) = torch.autograd.grad(loss, first)
    expected = (1 - cosine**2).sqrt() / first.detach().norm(dim=1) / 5
    torch.testing.assert_close(gradient.norm(dim=1), expected)


def test_at_length_1_two_classes_are_pushed_up_to_an_angle() -> None:
    """At right angles, and at any lengths, two embeddings are the root of 2 apart."""
    first, second = tensor([3.0, 0.0]), tensor([0.0, 0.2])
    loss = alignment_loss(at_length_1(first), at_length_1(second), torch.tensor([False]), 1.5)
    assert float(loss) == pytest.approx((1.5 - math.sqrt(2)) ** 2 / 2)
    loss = alignment_loss(at_length_1(first), at_length_1(second), torch.tensor([False]), 1.4)
    assert float(loss) == 0


def test_an_embedding_of_length_0_has_a_finite_gradient() -> None:
    first = torch.zeros(2, 3).requires_grad_()
    loss = alignment_loss(
        at_length_1(first), at_length_1(torch.ones(2, 3)), torch.full((2,), True), 1.0
    )
    (gradient,) = torch.autograd.grad(loss, first)
    assert float(loss.detach()) == pytest.approx(0.5)
    assert float(gradient.norm(dim=1).max()) == pytest.approx(1 / SHORTEST / 2)


def stepped(align: Alignment) -> tuple[list[float], float]:
    """Losses over 60 plain steps of a layer on CSA alone, and how many times its norm grew.

    Its embeddings are 17 to 84 long at the start.
    """
    generator = torch.Generator().manual_seed(3)
    weight = nn.Parameter(torch.randn(8, 16, generator=generator))
    first, second = 4 * torch.randn(2, 32, 16, generator=generator)
    same = torch.arange(32) % 2 == 0
    begun = float(weight.detach().norm())
    losses = []
    for _ in range(60):
        one, other = first @ weight.T, second @ weight.T
        (csa,) = align.gradients(one, other, same, [weight])
        if align.normalise:
            one, other = at_length_1(one), at_length_1(other)
        losses.append(float(alignment_loss(one, other, same, align.margin).detach()))
        assert csa is not None
        with torch.no_grad():
            weight.sub_(csa)
    return losses, float(weight.detach().norm()) / begun


def test_alignment_at_length_1_lowers_its_loss_and_keeps_the_weights() -> None:
    losses, growth = stepped(Alignment(10.0, 1.0, normalise=True))
    assert losses[-1] < 0.7 * losses[0]
    assert growth == pytest.approx(1.0, rel=0.1)


def test_alignment_of_embeddings_as_they_are_runs_away() -> None:
    losses, growth = stepped(Alignment(0.1, 1.0, normalise=False))
    assert losses[-1] > 1e6 * losses[0]
    assert growth > 1e6
