"""HARMONY's contrastive alignment: by hand, by numpy, and where its gradient could break."""

from __future__ import annotations

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
    direction,
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
def test_directions_weigh_the_same_at_every_length(scale: float) -> None:
    """Their loss is 1 - cos; the gradient shrinks with the length, where the raw one grows."""
    generator = torch.Generator().manual_seed(2)
    first, second = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    first = (scale * first).requires_grad_()
    loss = alignment_loss(direction(first), direction(second), torch.full((5,), True), 1.0)
    cosine = nn.functional.cosine_similarity(first, second)
    torch.testing.assert_close(loss, (1 - cosine).mean())
    (gradient,) = torch.autograd.grad(loss, first)
    assert float(gradient.norm(dim=1).max()) <= 1 / 5 / float(first.detach().norm(dim=1).min())


def test_an_embedding_without_a_direction_has_a_finite_gradient() -> None:
    first = torch.zeros(2, 3).requires_grad_()
    loss = alignment_loss(direction(first), direction(torch.ones(2, 3)), torch.ones(2) == 1, 1.0)
    (gradient,) = torch.autograd.grad(loss, first)
    assert float(loss.detach()) == pytest.approx(0.5)
    assert float(gradient.norm(dim=1).max()) == pytest.approx(1 / SHORTEST / 2)


@pytest.mark.parametrize(("directions", "bears"), [(True, True), (False, False)])
def test_a_trunk_with_long_embeddings_bears_the_alignment_of_directions_alone(
    directions: bool, bears: bool
) -> None:
    """Plain steps on CSA from embeddings of length 30 to 60: the raw distances run away."""
    generator = torch.Generator().manual_seed(3)
    trunk = nn.Linear(16, 8, bias=False)
    with torch.no_grad():
        trunk.weight.copy_(torch.randn(8, 16, generator=generator))
    first, second = 4 * torch.randn(2, 32, 16, generator=generator)
    align = Alignment(0.1, 1.0, directions)
    start = float(trunk.weight.detach().norm())
    for _ in range(60):
        csa = align.gradients(
            trunk(first), trunk(second), torch.arange(32) % 2 == 0, [trunk.weight]
        )
        assert csa[0] is not None
        with torch.no_grad():
            trunk.weight -= csa[0]
    end = float(trunk.weight.detach().norm())
    assert (end < 2 * start) == bears
