"""Our gradient descent against torch's, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from edge_sdk.training.formulas.sgd import Sgd

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


def test_gradients_are_left_as_they_are() -> None:
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
