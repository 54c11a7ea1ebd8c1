"""Our gradient descent against torch's, bit for bit, and the clip."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from edge_sdk.training.formulas.sgd import Sgd, clip_l2

torch.set_num_threads(1)


def _parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (5,), (2, 3, 3, 3)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def _gradients(parameters: list[nn.Parameter], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return [torch.randn(parameter.shape, generator=generator) for parameter in parameters]


@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_steps_are_those_of_torch(momentum: float, decay: float) -> None:
    ours, theirs = _parameters(), _parameters()
    mine = Sgd(ours, 0.05, momentum, decay)
    reference = torch.optim.SGD(theirs, 0.05, momentum=momentum, weight_decay=decay)
    for step in range(5):
        gradients = _gradients(ours, step)
        mine.step(gradients)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient
        reference.step()
        for own, other in zip(ours, theirs, strict=True):
            assert torch.equal(own, other)


def test_a_step_does_not_change_the_gradients() -> None:
    parameters = _parameters()
    optimiser = Sgd(parameters, 0.05, 0.8, 0.01)
    gradients = _gradients(parameters, 0)
    before = [gradient.clone() for gradient in gradients]
    optimiser.step(gradients)
    optimiser.step(_gradients(parameters, 1))
    assert all(map(torch.equal, gradients, before))


def test_only_the_parameters_named_are_stepped() -> None:
    parameters = _parameters()
    before = [parameter.detach().clone() for parameter in parameters]
    optimiser = Sgd(parameters, 0.05, 0.8, 0.01)
    optimiser.step(_gradients(parameters, 0)[1:], parameters[1:])
    assert torch.equal(parameters[0], before[0])
    assert not torch.equal(parameters[1], before[1])
    assert set(optimiser.velocities) == set(parameters[1:])


def gradients(scale: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [scale * torch.randn(shape, generator=generator) for shape in ((4, 3), (7,), (2, 2, 2))]


@pytest.mark.parametrize("scale", [1e-3, 0.05, 0.1, 1.0, 1e3])
def test_the_clip_is_over_all_parameters_together_as_torch_clips(scale: float) -> None:
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients(scale)]
    for parameter, gradient in zip(parameters, gradients(scale), strict=True):
        parameter.grad = gradient.clone()
    nn.utils.clip_grad_norm_(parameters, 0.5)

    clipped = clip_l2(gradients(scale), 0.5)

    # torch adds 1e-6 to the norm, we add 1e-8: 1e-6 / 0.5 apart at most
    for got, parameter in zip(clipped, parameters, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(got, parameter.grad, rtol=3e-6, atol=0)


def test_the_clip_keeps_the_direction_by_hand() -> None:
    # norm of (3, 4) is 5: scaled by 0.5 / 5
    clipped = clip_l2([torch.tensor([3.0]), torch.tensor([[4.0]])], 0.5)
    torch.testing.assert_close(clipped[0], torch.tensor([0.3]))
    torch.testing.assert_close(clipped[1], torch.tensor([[0.4]]))


@pytest.mark.parametrize("limit", [None, math.inf, 1e9])
def test_no_limit_or_one_above_the_norm_changes_no_bit(limit: float | None) -> None:
    given = gradients(1.0)
    assert all(torch.equal(a, b) for a, b in zip(clip_l2(given, limit), given, strict=True))


def test_a_gradient_of_zeros_stays_zero() -> None:
    assert clip_l2([torch.zeros(3)], 0.5)[0].tolist() == [0.0, 0.0, 0.0]
