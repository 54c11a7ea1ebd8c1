"""Stochastic gradient descent with explicit gradients, and their clip.

The arithmetic is torch.optim.SGD's, bit for bit. The hooks, profiler records and groups of that
optimiser are left out: on `tiny` they take most of a step. Torch's compiler is not imported either,
which the first of torch's optimisers does: 2.4 s of a process's start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor, nn

EPS: Final = 1e-8


class Sgd:
    """v = m * v + (g + d * w);  w = w - lr * v

    Args:
        parameters: w; they must stay the same tensors while their momentum counts.
        momentum: m; 0 keeps no v. weight_decay: d.

    Attributes:
        velocities: v by parameter, for the parameters that took a step.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        learning_rate: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        self.parameters = list(parameters)
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.velocities: dict[nn.Parameter, Tensor] = {}

    def step(
        self, gradients: Sequence[Tensor], parameters: Sequence[nn.Parameter] | None = None
    ) -> None:
        """One step.

        Args:
            gradients: one for each of `parameters`; they are not changed.
            parameters: the subset to step; None steps all.
        """
        stepped = self.parameters if parameters is None else parameters
        with torch.no_grad():
            for parameter, gradient in zip(stepped, gradients, strict=True):
                parameter.add_(self._direction(parameter, gradient), alpha=-self.learning_rate)

    def _direction(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        if self.weight_decay:
            gradient = gradient.add(parameter, alpha=self.weight_decay)
        if not self.momentum:
            return gradient
        velocity = self.velocities.get(parameter)
        if velocity is None:
            velocity = self.velocities[parameter] = gradient.detach().clone()
        else:
            velocity.mul_(self.momentum).add_(gradient)
        return velocity


def clip_l2(gradients: Sequence[Tensor], limit: float | None) -> list[Tensor]:
    """The gradients scaled so that their joint L2 norm is at most `limit`; None leaves them.

    Args:
        gradients: of all parameters together; the norm is over their concatenation.
    """
    if limit is None:
        return list(gradients)
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))
    scale = torch.clamp(limit / (norm + EPS), max=1.0)
    return [gradient * scale for gradient in gradients]
