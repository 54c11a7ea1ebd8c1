"""Adam with explicit gradients.

The arithmetic is torch.optim.Adam's on a CPU, bit for bit. The first of torch's own optimisers
imports torch's compiler: 72 MB of a device's memory, and a second of a fast processor in the middle
of a round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

BETA_1: Final = 0.9
BETA_2: Final = 0.999
EPS: Final = 1e-8


class Adam:
    """m = b1 * m + (1 - b1) * g;  v = b2 * v + (1 - b2) * g^2
    w = w - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)

    Args:
        parameters: w; they must stay the same tensors.
    """

    def __init__(self, parameters: Iterable[Tensor], learning_rate: float) -> None:
        self.parameters = list(parameters)
        self.learning_rate = learning_rate
        self._steps = 0
        self._means = [torch.zeros_like(p) for p in self.parameters]
        self._squares = [torch.zeros_like(p) for p in self.parameters]

    def step(self, gradients: Sequence[Tensor]) -> None:
        """One step.

        Args:
            gradients: one for each parameter; they are not changed.
        """
        self._steps += 1
        rate = self.learning_rate / (1 - BETA_1**self._steps)
        root = (1 - BETA_2**self._steps) ** 0.5
        with torch.no_grad():
            for parameter, gradient, mean, square in zip(
                self.parameters, gradients, self._means, self._squares, strict=True
            ):
                mean.lerp_(gradient, 1 - BETA_1)
                square.mul_(BETA_2).addcmul_(gradient, gradient, value=1 - BETA_2)
                parameter.addcdiv_(mean, (square.sqrt() / root).add_(EPS), value=-rate)
