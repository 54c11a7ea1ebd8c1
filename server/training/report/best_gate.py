"""The exit threshold that is best for one client, chosen with its test labels known.

HARMONY's oracle choice: an upper bound of what a gate can reach, not a gate to deploy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_sdk.gate.gate import largest_uncertainty, term_scale
from edge_sdk.gate_form import EVIDENCE, Activation, GateForm, read_gate
from edge_sdk.manifest import GatePolicy
from edge_sdk.training.formulas.evidence import concentration

Right = NDArray[np.bool_]

# Entropy in nats, for 10 classes. For other numbers of classes and other gates the same shares of
# the largest uncertainty.
THRESHOLDS: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.2, 1.6, 2.3)


@dataclass(frozen=True, slots=True)
class BestGate:
    """A threshold and its effect on the samples it was chosen for.

    Attributes:
        threshold: in the gate's unit, nats for entropy.
        exits: (n,) whether a sample is answered by the exit head.
        right: (n,) whether a sample's answer is right.
    """

    threshold: float
    exits: Right
    right: Right


def best_gate(
    policy: GatePolicy, logits: Tensor, exit_right: Right, server_right: Right
) -> BestGate:
    """The gate with most right answers of those in THRESHOLDS, the loosest of equals.

    Args:
        policy: the gate as text (edge_sdk.gate_form).
        logits: (n, N) of the exit head.
        exit_right, server_right: (n,) whether the exit head and the server are right.
    """
    uncertainty = uncertainty_of(read_gate(policy), logits)
    largest = largest_uncertainty(policy, logits.shape[1])
    best: BestGate | None = None
    for point in THRESHOLDS:
        threshold = point * (largest / math.log(10))
        exits: Right = uncertainty.numpy() < threshold
        right: Right = np.where(exits, exit_right, server_right)
        if best is None or right.sum() >= best.right.sum():
            best = BestGate(threshold, exits, right)
    assert best is not None
    return best


def uncertainty_of(form: GateForm, logits: Tensor) -> Tensor:
    """Uncertainty of every sample at once, (n,) float64; `logits` (n, N)."""
    if not form.terms:
        return MEASURES[form.kind](logits)
    scaled = [
        uncertainty_of(term, logits) / term_scale(term, logits.shape[1]) for term in form.terms
    ]
    stacked = torch.stack(scaled)
    return stacked.amax(0) if form.kind == "all" else stacked.amin(0)


def _entropy(logits: Tensor) -> Tensor:
    """Shannon entropy of the softmax in nats, (n,)."""
    logs = torch.log_softmax(logits.double(), 1)
    return -(logs.exp() * logs).sum(1)


def _margin(logits: Tensor) -> Tensor:
    """1 - (p1 - p2) of the two largest entries of the softmax, (n,)."""
    first, second = torch.softmax(logits.double(), 1).topk(2, 1).values.unbind(1)
    return 1 - (first - second)


def _vacuity(activation: Activation) -> Callable[[Tensor], Tensor]:
    """The measure N / S, (n,), of the Dirichlet distribution that logits stand for."""
    return lambda logits: logits.shape[1] / concentration(logits, activation).sum(1)


MEASURES: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "entropy": _entropy,
    "margin": _margin,
    **{measure: _vacuity(activation) for measure, activation in EVIDENCE.items()},
}
