"""Uncertainty of an exit head's answers to many samples at once, by a gate as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from edge_sdk.gate.gate import term_scale
from edge_sdk.gate_form import EVIDENCE, Activation, GateForm
from edge_sdk.training.formulas.evidence import concentration


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
