"""The optimiser of everything that a client trains by the plan's numbers."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from edge_sdk.training.formulas.sgd import Sgd
from edge_sdk.training.protocol.plan import Plan


def optimiser_of(
    plan: Plan, parameters: Iterable[nn.Parameter], learning_rate: float | None = None
) -> Sgd:
    """SGD over `parameters` by the plan's numbers.

    Args:
        learning_rate: in place of the plan's.
    """
    numbers = plan.training
    rate = numbers.learning_rate if learning_rate is None else learning_rate
    return Sgd(parameters, rate, numbers.momentum, numbers.weight_decay)
