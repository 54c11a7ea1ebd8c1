"""A merge that a few bad clients cannot bend: large changes clipped, extremes left out.

clip     A client's change of a stage since the round's start is scaled down to at most
         `clip_factor` times the median norm of the clients that trained that stage. A client that
         changed nothing does not count. BatchNorm's statistics of a stage are compared by
         themselves: they are not of the size of weights. Of two clients the smaller norm counts as
         the median, since it cannot be known which of the two is bad: an honest device with much
         more data than the other is then held to `clip_factor` times the other's change, in its own
         direction, where the larger norm would let a bad client change all. Two devices that trust
         each other train with `robust = "none"`.
cap      No client's weight exceeds `weight_cap` times the median weight, whatever samples or loss
         it reports. All weights are then scaled to the sum that they had before.
trim     In each coordinate the k smallest and the k largest of the n values held are left out,
         k = floor(trim * n); the others are averaged by their weights. The clients' part against
         the server's own vote stays as it is in the plain merge.

Trimmed mean: Yin et al., Byzantine-Robust Distributed Learning, ICML 2018, Def. 2, with weights
added. Clipping to the median: Pillutla et al. and others bound norms so; the form is ours.
With trim 0 and nothing to clip or cap it is the plain merge, to the last bit.

The server's own step is bounded elsewhere (server.training.rounds.outliers); a client that stands
out there comes here with weight 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.protocol.weights import is_statistic
from server.training.core.weighted_mean import (
    Contribution,
    Contributions,
    server_vote,
    weighted_mean,
)

# Values of all clients that are sorted at once: about 40 MB, whatever the number of clients.
BLOCK_VALUES: Final = 1_000_000
# 0.3 * 10 is a little less than 3
ROUNDING: Final = 1e-9

Ratios = dict[str, dict[str, float]]


def change_ratios(contributions: Contributions, start: Weights) -> Ratios:
    """The norm of each client's change over the median norm, by client and stage.

    Args:
        start: every weight as it was when the round began.
    """
    norms = {client: _norms(brought, start) for client, brought in contributions.items()}
    by_stage: dict[str, list[float]] = {}
    for of_client in norms.values():
        for stage, norm in of_client.items():
            if norm > 0:
                by_stage.setdefault(stage, []).append(norm)
    medians = {stage: statistics.median_low(found) for stage, found in by_stage.items()}
    return {
        client: {stage: norm / medians[stage] if norm else 0.0 for stage, norm in each.items()}
        for client, each in norms.items()
    }


def clipped_clients(ratios: Ratios, clip_factor: float) -> dict[str, str]:
    """The clients with a clipped change, and by how much they stand out."""
    found = {}
    for client, of_client in ratios.items():
        stage, worst = max(of_client.items(), key=lambda entry: entry[1], default=("", 0.0))
        if worst > clip_factor:
            found[client] = f"{stage} changed {worst:.3g} times as much as the median's"
    return found


def cap_weights(weights: Mapping[str, float], weight_cap: float) -> dict[str, float]:
    """The weights, none above `weight_cap` times the median of those above 0."""
    above = [weight for weight in weights.values() if weight > 0]
    if not above:
        return dict(weights)
    most = weight_cap * statistics.median_low(above)
    return {client: min(weight, most) for client, weight in weights.items()}


def cap_shares(weights: Mapping[str, float], weight_cap: float) -> dict[str, float]:
    """The weights as `cap_weights` gives them, scaled to the sum that they had before.

    What one client loses so goes to the other clients and not to the server's own vote, against
    which the rest may be next to nothing: by Eq. 6 a client with a tiny loss has nearly all.
    """
    capped = cap_weights(weights, weight_cap)
    total = sum(capped.values())
    if not total:
        return capped
    scale = sum(weights.values()) / total
    return {client: weight * scale for client, weight in capped.items()}


def trimmed_merge(
    contributions: Contributions,
    weights: Mapping[str, float],
    server: Weights,
    server_weight: float,
    *,
    start: Weights,
    ratios: Ratios,
    clip_factor: float,
    trim: float,
) -> Weights:
    """Merge as `merge` does, with changes clipped and extremes left out.

    A client of weight 0 has no value that could be left out: it counts as if it held nothing.

    Args:
        trim: share of the values of a coordinate left out on each side; below 0.5.
        ratios: of `change_ratios`.
    """
    merged: Weights = {}
    for name, own in server.items():
        held = [c for c in contributions if weights[c] > 0 and contributions[c].holds(name)]
        if not held:
            merged[name] = own
            continue
        stage, vote = _stage(name), server_vote(name, server_weight)
        changes = [
            _Change(contributions[c], name, start[name], _scale(ratios[c][stage], clip_factor))
            for c in held
        ]
        shares = [weights[client] for client in held]
        k = math.floor(trim * len(held) + ROUNDING)
        if k:
            merged[name] = _trimmed(own, vote, changes, shares, k)
        else:
            votes = zip(shares, (change.whole() for change in changes), strict=True)
            merged[name] = weighted_mean(own, vote, votes, sum(shares) + vote)
    return merged


class _Change:
    """A client's tensor after the round, clipped as it is read."""

    def __init__(self, brought: Contribution, name: str, start: Tensor, scale: float) -> None:
        self._brought = brought
        self._name = name
        self._start = start
        self._scale = scale

    def whole(self) -> Tensor:
        return self._clip(self._brought.tensor(self._name), self._start)

    def part(self, first: int, last: int) -> Tensor:
        values = self._brought.part(self._name, first, last)
        return self._clip(values, self._start.reshape(-1)[first:last])

    def _clip(self, values: Tensor, start: Tensor) -> Tensor:
        return values if self._scale == 1 else start + (values - start) * self._scale


def _trimmed(
    own: Tensor, server_weight: float, changes: list[_Change], shares: list[float], k: int
) -> Tensor:
    """The mean of one tensor, a block of columns at a time, k values left out on each side."""
    weight = torch.tensor(shares, dtype=torch.float64, device=own.device)
    total = float(weight.sum())
    count = own.numel()
    width = max(1, BLOCK_VALUES // len(changes))
    blocks = []
    for first in range(0, count, width):
        last = min(first + width, count)
        values, order = torch.stack([c.part(first, last) for c in changes]).sort(dim=0, stable=True)
        kept = weight[order[k:-k]]
        mean = (values[k:-k] * kept).sum(0) / kept.sum(0)
        ours = own.reshape(-1)[first:last]
        blocks.append((mean * total + ours * server_weight) / (total + server_weight))
    return torch.cat(blocks).to(own.dtype).reshape(own.shape)


def _norms(brought: Contribution, start: Weights) -> dict[str, float]:
    """L2 norm of a client's change, by stage."""
    squares: dict[str, float] = {}
    for name in brought.names():
        change = torch.linalg.vector_norm(brought.tensor(name) - start[name], dtype=torch.float64)
        stage = _stage(name)
        squares[stage] = squares.get(stage, 0.0) + float(change) ** 2
    return {stage: math.sqrt(square) for stage, square in squares.items()}


def _stage(name: str) -> str:
    """The stage that a tensor is of: `trunk.stage3` for `trunk.stage3.1.weight`."""
    end = name.index(".", len("trunk.") if name.startswith("trunk.") else 0)
    return f"{name[:end]} statistics" if is_statistic(name) else name[:end]


def _scale(ratio: float, clip_factor: float) -> float:
    return min(1.0, clip_factor / ratio) if ratio else 1.0
