"""What is late, on the weights of now: a result that began s rounds ago counts by its change.

    theta + share * (theta_k - theta_then)        share = (1 + s)^-a, FedAsync's discount

BatchNorm's running statistics are no sum of steps: theirs go that share of the way from those of
now to the client's. So a variance stays one, whatever became of it in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from edge_sdk.errors import FrameError
from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.protocol.weights import is_statistic
from server.training.core.weighted_mean import Contribution


def rebase_update(brought: Contribution, then: Weights, now: Weights, share: float) -> Contribution:
    """What its change would have made of the weights of now.

    Args:
        then: what it began with. now: what this round began with. share: 0 to 1, of the change.
    """

    def moved(weights: Mapping[str, Tensor]) -> Weights:
        return {
            name: torch.lerp(now[name], t, share)
            if is_statistic(name)
            else now[name] + share * (t - then[name])
            for name, t in weights.items()
        }

    update = replace(brought.update, weights=moved(brought.own))
    return Contribution(brought.depth, update, moved(brought.copy))


def flatten_by_round(sent: Mapping[int, Weights]) -> dict[str, Tensor]:
    """Weights by round as a checkpoint has them: by `ROUND/NAME`."""
    return {f"{r}/{name}": t for r, weights in sent.items() for name, t in weights.items()}


def unflatten_by_round(tensors: Mapping[str, Tensor]) -> dict[int, Weights]:
    """What `flatten_by_round` was given.

    Raises: FrameError for other names.
    """
    sent: dict[int, Weights] = {}
    for key, tensor in tensors.items():
        number, _, name = key.partition("/")
        if not number.isdecimal():
            raise FrameError(f"checkpoint: {key}: expected a tensor named by a round")
        sent.setdefault(int(number), {})[name] = tensor
    return sent
