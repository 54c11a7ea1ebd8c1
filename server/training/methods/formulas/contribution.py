"""The worth of a client's update, by its data and its direction.    SplitLPF, Eq. 8-11

A client's gradient is what its round took off the weights: those at the start minus those at the
end. Running statistics are no gradient and are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor

from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.protocol.weights import is_statistic

ALPHA: Final = 0.5


def gradient_of(start: Mapping[str, Tensor], end: Mapping[str, Tensor]) -> Weights:
    """A client's gradient grad_k, by parameter of `end`: start minus end."""
    return {name: start[name] - end[name] for name in end if not is_statistic(name)}


def cosine(one: Weights, other: Weights) -> float:
    """Cosine c_k of two gradients over the parameters that both have.    SplitLPF, Eq. 8

    0 where they share none or either is zero or not finite: it says nothing about a direction.
    """
    shared = sorted(name for name in one if name in other)  # a transport may change the order
    if not shared:
        return 0.0
    a = torch.cat([one[name].flatten().double() for name in shared])
    b = torch.cat([other[name].flatten().double() for name in shared])
    # each scaled by its own largest entry first: squares of float32 extremes fit into no float64
    norms = float(_scaled(a).norm()) * float(_scaled(b).norm())
    dot = float(_scaled(a) @ _scaled(b))
    value = dot / norms if norms > 0 else 0.0
    return min(1.0, max(-1.0, value)) if math.isfinite(value) else 0.0


def contribution_weights(
    samples: Mapping[str, int],
    cosines: Mapping[str, float],
    alpha: float = ALPHA,
    *,
    signed: bool = True,
    dead_zone: float = 0.0,
) -> dict[str, float]:
    """Weights p_k of the clients in the average; they sum to 1.

    p_k = alpha * n_k / sum n_j + (1 - alpha) * c_k / sum |c_j|      SplitLPF, Eq. 9-10
    p_k = ReLU(p_k) / sum ReLU(p_j)                                  Eq. 11

    By n_k alone where no cosine says anything (the first round), where alpha is 1, and where every
    weight would be zero.

    Differs: Eq. 9 has |c_k| above the line too, under which no p_k is ever below zero and a client
    that pulls backwards is paid for it. We keep the sign; `signed = False` is literal. A cosine
    within the dead zone counts as 0, which says nothing about a direction.

    Args:
        samples: n_k. cosines: c_k, of the same clients.
        dead_zone: least |c_k| that counts; 0 counts all, as the paper does.
    """
    cosines = {client: c if abs(c) >= dead_zone else 0.0 for client, c in cosines.items()}
    total = sum(samples.values())
    spread = sum(abs(c) for c in cosines.values())
    if not spread:
        return {client: n / total for client, n in samples.items()}
    # all times sum n: alpha = 1 is then n_k / sum n to the last bit
    raw = {
        client: alpha * n
        + (1 - alpha) * total * (cosines[client] if signed else abs(cosines[client])) / spread
        for client, n in samples.items()
    }
    kept = {client: max(0.0, value) for client, value in raw.items()}
    scale = sum(kept.values())
    if scale <= 0:
        return {client: n / total for client, n in samples.items()}
    return {client: value / scale for client, value in kept.items()}


def global_gradient(
    gradients: Iterable[tuple[str, Weights]], weights: Mapping[str, float]
) -> Weights:
    """The global gradient, sum_k p_k * grad_k.

    A parameter that some clients do not hold is the mean over those that do.

    Clients of weight 0 are left out; so is a parameter that no other client holds.

    Args:
        gradients: by client, in client order: addition depends on order.
    """
    total: Weights = {}
    held: dict[str, float] = {}
    for client, gradient in gradients:
        weight = weights[client]
        if weight <= 0:
            continue
        for name, tensor in gradient.items():
            part = weight * tensor
            total[name] = total[name] + part if name in total else part
            held[name] = held.get(name, 0.0) + weight
    return {name: tensor / held[name] for name, tensor in total.items()}


def _scaled(vector: Tensor) -> Tensor:
    largest = vector.abs().max()
    return vector / largest if largest > 0 else vector
