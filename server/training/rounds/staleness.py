"""Staleness: the share by which a result of an earlier round counts.

The change of a result that began s rounds ago is discounted and added to the weights of now:

    theta + (1 + s)^-a * (theta_k - theta_then)        a = 0.5

This is FedAsync's polynomial discount (Xie et al., 2019, 5.2). BatchNorm's running statistics are
not a sum of steps: they go that share of the way from the server's to the client's. So a variance
stays above zero, however the server's changed in between.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from edge_sdk.errors import FrameError
from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.protocol.weights import is_statistic
from server.training.core.weighted_mean import Contribution


class Staleness:
    """The first weights of past rounds, and the rule by which late results count.

    Args:
        limit: rounds by which a result may be late and still count.
        power: a; 0 counts the whole change.
    """

    def __init__(self, limit: int, power: float) -> None:
        self.limit = limit
        self._power = power
        self._sent: dict[int, Weights] = {}

    def begin(self, number: int, weights: Weights) -> None:
        """Keep the weights that a round begins with."""
        self._sent[number] = weights

    def keep(self, rounds: Collection[int]) -> None:
        """Drop the weights of all rounds but these."""
        self._sent = {number: sent for number, sent in self._sent.items() if number in rounds}

    @property
    def rounds(self) -> Collection[int]:
        """The rounds with first weights that are kept."""
        return self._sent.keys()

    def sent(self, number: int) -> Weights | None:
        """The weights that a round began with; None where they are not kept."""
        return self._sent.get(number)

    def fault(self, rounds: int) -> str | None:
        """Why a result that is so many rounds late is refused, or None."""
        if rounds <= self.limit:
            return None
        return f"an update {rounds} rounds late: expected at most {self.limit}"

    def rebase(
        self, brought: Contribution, then: Weights, now: Weights, rounds: int
    ) -> Contribution:
        """Discount a result that is so many rounds late; one that is on time stays as it is.

        Args:
            then: the weights it began with. now: the weights that this round began with.
        """
        if not rounds:
            return brought
        return rebase_update(brought, then, now, (1 + rounds) ** -self._power)

    def state_dict(self) -> dict[str, Tensor]:
        """The weights that are kept, for a checkpoint."""
        return flatten_by_round(self._sent)

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what `state_dict` gave.

        Raises: FrameError for other names.
        """
        self._sent = unflatten_by_round(tensors)


def rebase_update(brought: Contribution, then: Weights, now: Weights, share: float) -> Contribution:
    """Add a share of a contribution's change to the weights of now.

    Args:
        then: the weights it began with. now: the weights that this round began with.
        share: 0 to 1.
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
    """The weights by round that `flatten_by_round` was given.

    Raises: FrameError for other names.
    """
    sent: dict[int, Weights] = {}
    for key, tensor in tensors.items():
        number, _, name = key.partition("/")
        if not number.isdecimal():
            raise FrameError(f"checkpoint: {key}: expected a tensor named by a round")
        sent.setdefault(int(number), {})[name] = tensor
    return sent
