"""Checks of clients' replies: each is checked whole before any of it is used.

Each check returns why the reply is refused, or None; those of numbers return a Refusal, which says
if they diverged. A fault is the client's alone: the round goes on without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

import torch

from edge_sdk.errors import ConfigurationError, FrameError, NotFiniteError
from edge_sdk.training.protocol.feature_codec import CODED
from edge_sdk.training.protocol.messages import Features, OutputGradient, Ready, Update, Weights
from edge_sdk.training.protocol.plan import Plan
from edge_sdk.training.protocol.weights import check_weights, is_variance

# The largest value of half precision, to which its codec clips. Larger ones, which the other codecs
# carry, are clipped to it as they arrive: their squares would leave infinities in the server's
# BatchNorm statistics.
LARGEST_FEATURE: Final = 65504.0
# A client's loss is a float32, as its network is. A double beyond that is made up, and makes
# the mean over all clients infinite, as if their training had diverged.
LARGEST_LOSS: Final = torch.finfo(torch.float32).max
# Rounding may leave the cosine of two equal changes a little above 1.
LARGEST_COSINE: Final = 1 + 1e-6


class Fault(StrEnum):
    """Kinds of faults for which a reply is refused, as the report writes them."""

    UNSOUND = "unsound"  # not what was asked for
    NOT_FINITE = "not-finite"  # infinity or NaN: the client's training diverged


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a reply is refused.

    Attributes:
        why: for people. fault: for programs.
    """

    why: str
    fault: Fault = Fault.UNSOUND

    @classmethod
    def of(cls, err: FrameError) -> Self:
        """The refusal of a reply whose check raised this error."""
        return cls(str(err), Fault.NOT_FINITE if isinstance(err, NotFiniteError) else Fault.UNSOUND)


def samples_fault(samples: int, samples_max: int | None) -> str | None:
    """Why a number of samples n_k is refused, or None.

    It weighs the update and cannot be verified, so the recipe limits it. An update without samples
    has no weight: alone in a round, it would leave a mean over nothing.
    """
    if samples < 1:
        return f"{samples} samples: expected at least 1"
    if samples_max is not None and samples > samples_max:
        return f"{samples} samples: the recipe takes at most {samples_max} a client (samples_max)"
    return None


def ready_fault(ready: Ready, plan: Plan) -> str | None:
    """Why a client's report before its first step is refused, or None."""
    numbers = plan.training
    batches = numbers.iterations or numbers.epochs * -(-ready.samples // numbers.batch)
    if ready.samples < 1 or not 0 <= ready.steps <= batches:
        return (
            f"{ready.samples} samples in {ready.steps} steps: expected at least 1 sample"
            f" and 0 to {batches} steps"
        )
    counts = ready.label_counts
    if counts and (len(counts) != plan.classes or sum(counts) != ready.samples):
        return f"label counts: expected {plan.classes} that sum to {ready.samples}, got {counts}"
    return None


def shapes_fault(
    features: Features,
    plan: Plan,
    shape_at: Callable[[int], tuple[int, ...]],
    batch: int | None = None,
) -> str | None:
    """Why a batch is refused as it travels, or None.

    Shapes are checked before anything is decoded, because decoding takes a while for each row.

    Args:
        shape_at: of one sample at a depth.
        batch: as ordered; None for the plan's, where a last batch of one sample joins the one
            before it.
    """
    shape = shape_at(plan.depth)
    most = plan.training.batch + 1 if batch is None else batch
    z = features.features
    size = len(z) if z.ndim else 0
    if z.shape[1:] != shape or not 1 <= size <= most:
        want = f"(1..{most}, {', '.join(map(str, shape))})"
        return f"features: expected shape {want}, got {tuple(z.shape)}"
    if features.view is not None and not plan.part.views:
        return "view: expected none, nothing is aligned by it"
    for name, values, ranges in (
        ("features", z, features.ranges),
        ("view", features.view, features.view_ranges),
    ):
        fault = None if values is None else _coding_fault(values, ranges, size)
        if fault is not None:
            return f"{name}: {fault}"
    return _view_fault(features, plan, shape_at) or _labels_fault(features.labels, plan, size)


def clip_features(values: torch.Tensor, name: str) -> tuple[torch.Tensor, int]:
    """A decoded batch within half precision's range, and how many of its values are at its ends.

    A value that a sender's codec has clipped counts as one that is clipped here. The gradient goes
    back to the client as if nothing had been clipped.

    Args:
        name: of the values, for the error.
    Raises: NotFiniteError.
    """
    low, high = (float(bound) for bound in torch.aminmax(values))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise NotFiniteError(f"{name}: expected finite values, got infinity or NaN")
    if low > -LARGEST_FEATURE and high < LARGEST_FEATURE:
        return values, 0
    at_ends = int((values.abs() >= LARGEST_FEATURE).sum())
    return values.clamp(-LARGEST_FEATURE, LARGEST_FEATURE), at_ends


def gradient_fault(reply: OutputGradient, outputs: torch.Tensor) -> Refusal | None:
    """Why a client's gradient with respect to the server's outputs is refused, or None."""
    gradient = reply.gradient
    if gradient.shape != outputs.shape or gradient.dtype != torch.float32:
        got = f"{gradient.dtype} {tuple(gradient.shape)}"
        return Refusal(
            f"output gradient: expected float32 of shape {tuple(outputs.shape)}, got {got}"
        )
    if not (bool(torch.isfinite(gradient).all()) and math.isfinite(reply.loss)):
        return Refusal(
            "output gradient: expected finite values and a finite loss, got infinity or NaN",
            Fault.NOT_FINITE,
        )
    if not _bounded(gradient) or reply.loss < 0:
        return Refusal(
            f"output gradient: expected values within {LARGEST_FEATURE:g} and a loss from 0 up"
        )
    return None


def _coding_fault(values: torch.Tensor, ranges: torch.Tensor | None, size: int) -> str | None:
    """Why a codec's type or numbers are refused, or None."""
    if values.dtype not in CODED:
        return f"expected float32, float16 or uint8, got {values.dtype}"
    if values.dtype != torch.uint8:
        return None if ranges is None else f"expected no ranges for {values.dtype}"
    if ranges is None or ranges.shape != (size, 2) or ranges.dtype != torch.float32:
        return f"expected a scale and a zero point for {size} samples"
    return None


def _view_fault(
    features: Features, plan: Plan, shape_at: Callable[[int], tuple[int, ...]]
) -> str | None:
    """Why a second view is refused, or None; it comes with all its parts or not at all."""
    view, entry, same = features.view, features.entry, features.same
    if view is None:
        return None if entry is None and same is None else "view: expected features with its depth"
    # the server's stages begin at the cut, unless it has some of its own for every depth
    least = 1 if plan.part.meta is not None and plan.part.meta.early else plan.depth
    if entry is None or not least <= entry <= plan.depth:
        return f"view: expected an entry depth of {least} to {plan.depth}, got {entry}"
    size = len(features.features)
    try:
        want = (size, *shape_at(entry))
    except ConfigurationError as err:  # a depth where the network is not cut
        return f"view: {err}"
    if view.shape != want:
        return f"view: expected shape {want}, got {tuple(view.shape)}"
    if same is None or same.dtype != torch.uint8 or same.shape != (size,) or int(same.max()) > 1:
        return f"view: expected {size} bits that say where labels are equal"
    return None


def _labels_fault(labels: torch.Tensor | None, plan: Plan, size: int) -> str | None:
    if not plan.send_labels:
        return None if labels is None else "labels: expected none, they stay on the client"
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
) -> Refusal | None:
    """Why an update is rejected, or None.

    Args:
        sent: what the client started from, an exit head it keeps to itself included.
        samples: n_k as the client reported it at the start of the round.
        norm_bound: largest L2 norm of the change; exit heads are left out.
    """
    try:
        check_weights(update.weights, sent)
    except FrameError as err:
        return Refusal.of(err)
    for name, tensor in update.weights.items():
        if is_variance(name) and bool((tensor < 0).any()):
            return Refusal(f"weights: {name}: expected variances from 0 up, got negative ones")
    if update.samples != samples:
        return Refusal(
            f"samples: expected {samples}, as at the start of the round, got {update.samples}"
        )
    fault = _figures_fault(update)
    if fault is not None:
        return fault
    if norm_bound is not None:
        norm = _change(update.weights, sent)
        if not norm <= norm_bound:
            return Refusal(f"change of norm {norm:.3g}: expected at most {norm_bound:g}")
    return None


def _figures_fault(update: Update) -> Refusal | None:
    """Why the loss of an update or the measures of its codec are refused, or None.

    The report has the means of all three.
    """
    loss, error, cosine = update.loss, update.error, update.cosine
    want = f"expected a number from 0 to {LARGEST_LOSS:.3g}"
    if not 0 <= loss <= LARGEST_LOSS:
        fault = Fault.UNSOUND if math.isfinite(loss) else Fault.NOT_FINITE
        return Refusal(f"loss: {want}, got {loss}", fault)
    if error is not None and not 0 <= error <= LARGEST_LOSS:
        return Refusal(f"error of the codec: {want}, got {error}")
    if cosine is not None and not abs(cosine) <= LARGEST_COSINE:
        return Refusal(f"cosine of the codec: expected a number from -1 to 1, got {cosine}")
    return None


def _bounded(values: torch.Tensor) -> bool:
    low, high = torch.aminmax(values)
    return bool(low >= -LARGEST_FEATURE and high <= LARGEST_FEATURE)  # NaN fails every comparison


def _change(weights: Mapping[str, torch.Tensor], sent: Weights) -> float:
    norms = [
        torch.linalg.vector_norm(tensor - sent[name], dtype=torch.float64)
        for name, tensor in weights.items()
        if not name.startswith("exit")
    ]
    return float(torch.linalg.vector_norm(torch.stack(norms)))
