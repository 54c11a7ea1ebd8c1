"""The two teachers' losses against torch's own divergence, and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from edge_sdk.training.formulas.distillation import kd_client, kd_global, relation

TAU = 5.0


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_kd_global_is_the_divergence_of_the_student_from_the_teacher() -> None:
    student, teacher = draw(6, 10), draw(6, 10, seed=1)
    pairs = kl_divergence(Categorical(logits=teacher / TAU), Categorical(logits=student / TAU))
    expected = TAU**2 * pairs.mean()
    torch.testing.assert_close(kd_global(student, teacher, TAU), expected)


def test_kd_global_by_hand() -> None:
    # tau 1; p_g = (3/4, 1/4), p_a = (1/2, 1/2): 3/4 ln 3/2 + 1/4 ln 1/2
    teacher = torch.tensor([[math.log(3), 0.0]])
    got = kd_global(torch.zeros(1, 2), teacher, 1.0)
    assert float(got) == pytest.approx(0.75 * math.log(1.5) - 0.25 * math.log(2), rel=1e-6)
    # the other way round it would be ln 2/3 / 2 + ln 2 / 2
    assert float(got) != pytest.approx(0.5 * math.log(4 / 3), rel=1e-2)


def test_relation_by_hand() -> None:
    # (0,0), (3,4), (0,8): 25 and 64 and 9 + 16 = 25; mean of the off-diagonal 38
    features = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 8.0]])
    expected = torch.tensor([[0.0, 25, 64], [25, 0, 25], [64, 25, 0]]) / 38
    torch.testing.assert_close(relation(features), expected, rtol=1e-5, atol=1e-6)


def test_relation_is_that_of_cdist_whatever_offset_and_shape() -> None:
    features = draw(16, 8, 4, 4) + 100
    distances = torch.cdist(features.double().flatten(1), features.double().flatten(1)).square()
    expected = (distances / (distances.sum() / (16 * 15))).float()
    torch.testing.assert_close(relation(features), expected, rtol=1e-4, atol=1e-5)


def test_kd_client_is_the_mean_divergence_of_rows() -> None:
    student, teacher = draw(5, 7), draw(5, 3, 2, seed=1)
    rows = kl_divergence(
        Categorical(logits=relation(teacher) / TAU), Categorical(logits=relation(student) / TAU)
    )
    torch.testing.assert_close(kd_client(student, teacher, TAU), TAU**2 * rows.mean())


def test_kd_client_depends_only_on_the_proportions_of_distances() -> None:
    teacher = draw(5, 6)
    rotation = torch.linalg.qr(draw(6, 6, seed=2))[0]
    same = 7 * teacher @ rotation + 3
    assert float(kd_client(same, teacher, TAU)) == pytest.approx(0, abs=1e-5)
    assert float(kd_client(draw(5, 6, seed=3), teacher, TAU)) > 1e-3


def test_teachers_get_no_gradient() -> None:
    student, teacher = draw(4, 3).requires_grad_(), draw(4, 3, seed=1).requires_grad_()
    for loss in (kd_global, kd_client):
        own, theirs = torch.autograd.grad(
            loss(student, teacher, TAU), [student, teacher], allow_unused=True
        )
        assert own.abs().sum() > 0
        assert theirs is None


@pytest.mark.parametrize("features", [draw(1, 4), torch.ones(6, 4), torch.zeros(2, 3)])
def test_a_batch_of_one_or_of_equal_samples_has_loss_0(features: torch.Tensor) -> None:
    student = features.clone().requires_grad_()
    loss = kd_client(student, draw(*features.shape), TAU)
    (gradient,) = torch.autograd.grad(loss, student)
    assert bool(torch.isfinite(loss))
    assert gradient.abs().sum() == 0


def test_relation_has_the_gradient_of_finite_differences() -> None:
    features = draw(4, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda given: kd_client(given, draw(4, 2), TAU), [features])
