"""From the clients' weights to the global ones, layer by layer.

Clients hold different stages: each tensor is averaged over the clients that hold it and the
server's own, which has weight lambda (SuperSFL, Eq. 6-8; plain averaging is lambda = 0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import chain

from torch import Tensor

from edge_sdk.training.protocol.messages import Update, Weights
from server.training.core.round_view import RoundView
from server.training.core.spool import Spool, SpooledWeights

EPS = 1e-8


@dataclass(frozen=True, slots=True)
class Contribution:
    """One participant's part in the merge: its update, its depth, its copy on the server.

    update: its weights are empty where `spooled` has them.
    copy: weights of this client's copy of the server's stages; empty where there is none.
    spooled: the update's weights, where they lie on a disk.
    """

    depth: int
    update: Update
    copy: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    spooled: Mapping[str, Tensor] | None = field(default=None, repr=False)

    @property
    def own(self) -> Mapping[str, Tensor]:
        """The weights that the client trained, by name, in memory or on a disk."""
        return self.update.weights if self.spooled is None else self.spooled

    def holds(self, name: str) -> bool:
        """Whether that tensor was trained, by the client or in its copy; none is in both."""
        return name in self.own or name in self.copy

    def tensor(self, name: str) -> Tensor:
        """The tensor after the round."""
        return self.own[name] if name in self.own else self.copy[name]

    def part(self, name: str, first: int, last: int) -> Tensor:
        """(last - first,) entries of that tensor, flattened."""
        side = self.own if name in self.own else self.copy
        if isinstance(side, SpooledWeights):
            return side.part(name, first, last)
        return side[name].reshape(-1)[first:last]

    def names(self) -> Iterator[str]:
        """The names of all tensors that it holds."""
        return chain(self.own, self.copy)

    def spool(self, spool: Spool) -> Contribution:
        """Move its weights to a disk.

        Raises: StorageError.
        """
        return Contribution(
            self.depth,
            replace(self.update, weights={}),
            spool.put(self.copy),
            spool.put(self.own),
        )


Contributions = Mapping[str, Contribution]
WeightRule = Callable[[Contributions, RoundView], dict[str, float]]
# the average and the number of clients in it, to the server's weights after the round
Correction = Callable[[Weights, int, RoundView], Weights]


def by_samples(contributions: Contributions, _now: RoundView) -> dict[str, float]:
    """Weights by samples: n_k / sum n_j."""
    total = sum(c.update.samples for c in contributions.values())
    return {client: c.update.samples / total for client, c in contributions.items()}


def equal(contributions: Contributions, _now: RoundView) -> dict[str, float]:
    """The same weight for each: 1 / n."""
    return {client: 1 / len(contributions) for client in contributions}


def by_depth_and_loss(contributions: Contributions, _now: RoundView) -> dict[str, float]:
    """Weights by depth and loss.

    w_i = d_i / sum d_j * (L_i+eps)^-1 / sum (L_j+eps)^-1    SuperSFL, Eq. 6

    They sum to about 1/n, not to 1, so the share of the server's lambda grows with the number of
    clients. `normalised` rescales them.
    """
    depths = sum(c.depth for c in contributions.values())
    surety = {client: 1 / (c.update.loss + EPS) for client, c in contributions.items()}
    total = sum(surety.values())
    return {
        client: c.depth / depths * surety[client] / total for client, c in contributions.items()
    }


def normalised(rule: WeightRule) -> WeightRule:
    """The rule with its weights scaled to sum 1."""

    @wraps(rule)
    def rescaled(contributions: Contributions, now: RoundView) -> dict[str, float]:
        return scaled(rule(contributions, now))

    return rescaled


def scaled(weights: Mapping[str, float]) -> dict[str, float]:
    """The weights, scaled to sum 1."""
    total = sum(weights.values())
    return {client: weight / total for client, weight in weights.items()}


def merge(
    contributions: Contributions,
    weights: Mapping[str, float],
    server: Weights,
    server_weight: float,
) -> Weights:
    """Average every tensor over the clients that hold it.

    theta = (sum_i w_i*theta_i + lam*theta_s) / (sum_i w_i + lam)    SuperSFL, Eq. 8

    A client votes for a stage with the same weight wherever it was trained, on the client or in its
    copy on the server.

    Args:
        server: theta_s, every weight of the network after the round.
        server_weight: lambda; 0 is a plain weighted average, as that of exit heads and auxiliary
            models always is.
    Returns: every tensor of `server`; one that no client holds stays the server's.
    """
    merged: Weights = {}
    for name, own in server.items():
        held = [(weights[client], c) for client, c in contributions.items() if c.holds(name)]
        vote = server_vote(name, server_weight)
        total = sum(weight for weight, _ in held) + vote
        if not held or total <= 0:
            merged[name] = own
            continue
        votes = ((weight, brought.tensor(name)) for weight, brought in held)
        merged[name] = weighted_mean(own, vote, votes, total)
    return merged


def server_vote(name: str, server_weight: float) -> float:
    """The server's weight: lambda; 0 on what it sends out and does not train.

    That is exit heads and auxiliary models.
    """
    return 0.0 if name.startswith(("exit", "auxiliary")) else server_weight


def weighted_mean(
    own: Tensor, server_weight: float, votes: Iterable[tuple[float, Tensor]], total: float
) -> Tensor:
    """The clients' tensors and the server's own, by weights that sum to `total`."""
    mean = own * (server_weight / total)
    for weight, tensor in votes:  # in client order: addition depends on order
        mean = mean + tensor * (weight / total)
    return mean
