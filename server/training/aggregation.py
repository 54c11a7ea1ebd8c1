"""From the clients' weights to the global ones, layer by layer.

Clients hold different stages: each tensor is averaged over those who hold it, beside the server's
own with weight lambda (SuperSFL, Eq. 6-8; plain averaging is lambda = 0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from edge_sdk.training.messages import Update, Weights
from server.training.view import RoundView

EPS = 1e-8


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one participant brought: its update, the depth it trained, its copy on the server.

    copy: weights of this client's copy of the server's stages; empty where there is none.
    """

    depth: int
    update: Update
    copy: Weights = field(default_factory=dict, repr=False)

    @property
    def weights(self) -> Weights:
        """Both sides', by name: no stage is trained on both."""
        return self.copy | self.update.weights


Contributions = Mapping[str, Contribution]
WeightRule = Callable[[Contributions, RoundView], dict[str, float]]


def by_samples(contributions: Contributions, _now: RoundView) -> dict[str, float]:
    """n_k / sum n_j."""
    total = sum(c.update.samples for c in contributions.values())
    return {client: c.update.samples / total for client, c in contributions.items()}


def by_depth_and_loss(contributions: Contributions, _now: RoundView) -> dict[str, float]:
    """w_i = d_i / sum d_j * (L_i+eps)^-1 / sum (L_j+eps)^-1    SuperSFL, Eq. 6

    They sum to about 1/n, not to 1: with lambda beside them the server's vote grows with the
    number of clients. `normalised` rescales them.
    """
    depths = sum(c.depth for c in contributions.values())
    surety = {client: 1 / (c.update.loss + EPS) for client, c in contributions.items()}
    total = sum(surety.values())
    return {
        client: c.depth / depths * surety[client] / total for client, c in contributions.items()
    }


def normalised(rule: WeightRule) -> WeightRule:
    """The same weights, scaled to sum 1."""

    def scaled(contributions: Contributions, now: RoundView) -> dict[str, float]:
        weights = rule(contributions, now)
        total = sum(weights.values())
        return {client: weight / total for client, weight in weights.items()}

    return scaled


def merge(
    contributions: Contributions,
    weights: Mapping[str, float],
    server: Weights,
    server_weight: float,
) -> Weights:
    """theta = (sum_i w_i*theta_i + lam*theta_s) / (sum_i w_i + lam)    SuperSFL, Eq. 8

    A client votes for a stage with the same weight wherever it was trained, on the client or in its
    copy on the server.

    Args:
        server: theta_s, every weight of the network after the round.
        server_weight: lambda; 0 is a plain weighted average.
    Returns: every tensor of `server`; one that no client holds stays the server's.
    """
    merged: Weights = {}
    of_client = {client: c.weights for client, c in contributions.items()}
    for name, own in server.items():
        held = [
            (weights[client], brought[name])
            for client, brought in of_client.items()
            if name in brought
        ]
        total = sum(weight for weight, _ in held) + server_weight
        if not held or total <= 0:
            merged[name] = own
            continue
        mean: Tensor = own * (server_weight / total)
        for weight, tensor in held:  # in client order: addition depends on order
            mean = mean + tensor * (weight / total)
        merged[name] = mean
    return merged
