"""What the server takes from a client: every reply is checked whole before any of it is used.

Each check returns why the reply is refused, or None. A fault is the client's alone: the round goes
on without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from edge_sdk.errors import FrameError
from edge_sdk.training.messages import Features, Ready, Update, Weights
from edge_sdk.training.plan import Plan
from edge_sdk.training.weights import check_weights

# Of half precision, so that every codec could carry it. Larger ones are a network that diverges,
# and would leave infinities in the server's BatchNorm statistics.
LARGEST_FEATURE: Final = 65504.0


def ready_fault(ready: Ready, plan: Plan) -> str | None:
    """Of a client about to start: samples there are, and batches that these can fill."""
    batches = plan.epochs * -(-ready.samples // plan.batch)
    if ready.samples < 1 or not 0 <= ready.steps <= batches:
        return (
            f"{ready.samples} samples in {ready.steps} steps: expected at least 1 sample"
            f" and 0 to {batches} steps"
        )
    return None


def features_fault(features: Features, plan: Plan, shape: tuple[int, ...]) -> str | None:
    """Of one batch, decoded.

    Args:
        shape: of one sample at the client's cut.
    """
    z, labels = features.features, features.labels
    size = len(z) if z.ndim else 0
    # a last batch of one sample joins the one before it
    if z.shape[1:] != shape or not 1 <= size <= plan.batch + 1:
        want = f"(1..{plan.batch + 1}, {', '.join(map(str, shape))})"
        return f"features: expected shape {want}, got {tuple(z.shape)}"
    low, high = torch.aminmax(z)
    if not (low >= -LARGEST_FEATURE and high <= LARGEST_FEATURE):  # NaN fails every comparison
        return f"features: expected values up to {LARGEST_FEATURE:g}, got larger ones or NaN"
    if labels is None:
        return "labels: expected one for each sample, got none"
    if labels.dtype != torch.int64 or labels.shape != (size,):
        got = f"{labels.dtype} {tuple(labels.shape)}"
        return f"labels: expected int64 of shape ({size},), got {got}"
    if int(labels.min()) < 0 or int(labels.max()) >= plan.classes:
        return f"labels: expected 0 to {plan.classes - 1}"
    return None


def update_fault(
    update: Update, sent: Weights, samples: int, norm_bound: float | None
) -> str | None:
    """Of an update.

    Args:
        sent: what the client started from, an exit head it keeps to itself included.
        samples: n_k as it said at the start of the round.
        norm_bound: largest L2 norm of the change; exit heads are left out.
    """
    try:
        check_weights(update.weights, sent)
    except FrameError as err:
        return str(err)
    if update.samples != samples:
        return f"samples: expected {samples}, as at the start of the round, got {update.samples}"
    if not 0 <= update.loss < float("inf"):
        return f"loss: expected a number from 0 up, got {update.loss}"
    if norm_bound is not None:
        norm = _change(update.weights, sent)
        if not norm <= norm_bound:
            return f"change of norm {norm:.3g}: expected at most {norm_bound:g}"
    return None


def _change(weights: Mapping[str, torch.Tensor], sent: Weights) -> float:
    norms = [
        torch.linalg.vector_norm(tensor - sent[name], dtype=torch.float64)
        for name, tensor in weights.items()
        if not name.startswith("exit")
    ]
    return float(torch.linalg.vector_norm(torch.stack(norms)))
