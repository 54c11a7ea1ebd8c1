"""Contrastive alignment of embeddings, by bits that say which pairs belong together."""

from __future__ import annotations

import torch
from torch import Tensor


def alignment_loss(first: Tensor, second: Tensor, same: Tensor, margin: float) -> Tensor:
    """Pulls pairs of one class together, pushes others apart up to a margin.

    L = I * |s1 - s2|^2 / 2 + (1 - I) * max(0, m - |s1 - s2|)^2 / 2    HARMONY, Eq. 7 (papers/003)

    Two embeddings at one point have no direction to be pushed in: their gradient is 0 there.

    Args:
        first, second: (B, D) float32, s1 and s2.
        same: (B,) bool, I: whether the two samples of a pair have one label.
        margin: m; 0 only pulls.
    Returns: () float32, mean over the pairs.
    """
    squared = (first - second).square().sum(1)
    apart = squared > 0
    # the root's slope at 0 is infinite, and infinity times 0 is NaN: keep 0 away from the root
    distance = torch.where(apart, squared, 1.0).sqrt() * apart
    push = (margin - distance).clamp(min=0).square()
    return torch.where(same, squared, push).mean() / 2
