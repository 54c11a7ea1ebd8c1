"""Gradients by the inputs of a computation, from those by its outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def vector_jacobian(
    outputs: Tensor,
    inputs: Sequence[Tensor],
    vector: Tensor,
    *,
    keep: bool = False,
    allow_unused: bool = False,
) -> tuple[Tensor, ...]:
    """The product of a vector with the Jacobian of `outputs` by each of `inputs`.

    It is the gradient of `sum(vector * outputs)`, bit for bit what torch gives with
    `grad_outputs=vector`. That argument has its shape checked by a part of torch that imports sympy
    first: seconds of a fast processor, within the first step of a device, for which the trainer
    waits.

    Args:
        outputs: of any shape. vector: of the same shape; a constant.
        keep: whether the graph is needed again.
        allow_unused: whether inputs may have no part in the outputs; theirs is None.
    Raises: ValueError for a vector of another shape.
    """
    if vector.shape != outputs.shape:
        raise ValueError(f"vector: expected shape {outputs.shape}, got {vector.shape}")
    return torch.autograd.grad(
        (outputs * vector).sum(), inputs, retain_graph=keep, allow_unused=allow_unused
    )
