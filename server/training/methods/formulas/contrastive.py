"""Contrastive alignment of embeddings, by bits that say which pairs belong together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from edge_sdk.checks import check_value, need
from profiles.checks import flag, number

# by parameter; None for one that took no part in the loss
Gradients = list[Tensor | None]
# Lengths below this count as this, so that the gradient by a very short embedding stays finite.
# Embeddings of `cnn6` on Fashion-MNIST were up to 27 apart.
SHORTEST: Final = 1e-3
# of two embeddings of length 1
FARTHEST: Final = 2.0


@dataclass(frozen=True, slots=True)
class Alignment:
    """Strength of the alignment: the server's stages learn which embeddings belong together.

    Differs: Eq. 7 prints the distance of embeddings as they are; with `normalise` s / max(|s|,
    SHORTEST) stands for each embedding s.

    Attributes:
        weight: of the loss that is added to the server's own; 0 for none.
        margin: up to which embeddings of different classes are pushed apart.
        normalise: whether embeddings are compared at length 1, so that they are at most 2 apart.
            Else as they are: the gradient grows with them then, without a limit.
    """

    weight: float
    margin: float
    normalise: bool

    def __post_init__(self) -> None:
        check_value("align_weight", self.weight, number(least=0))
        check_value("margin", self.margin, number(least=0))
        check_value("normalise_embeddings", self.normalise, flag)
        need(
            self.margin <= FARTHEST or not self.normalise,
            "margin",
            "at most 2, since embeddings of length 1 are at most 2 apart, or normalise_embeddings"
            " = false",
            self.margin,
        )

    def gradients(
        self, first: Tensor, second: Tensor, same: Tensor, parameters: Sequence[nn.Parameter]
    ) -> Gradients:
        """Gradients of the weighted loss by these parameters alone; it stops at the features.

        Args:
            first, second, same: as `alignment_loss` takes them, with the graph that made them.
        """
        if self.normalise:
            first, second = at_length_1(first), at_length_1(second)
        csa = self.weight * alignment_loss(first, second, same, self.margin)
        return list(torch.autograd.grad(csa, parameters, allow_unused=True))


def at_length_1(embeddings: Tensor) -> Tensor:
    """Embeddings s as s / max(|s|, SHORTEST).

    Args:
        embeddings: (B, D), floats.
    Returns: the same shape and dtype.
    """
    return nn.functional.normalize(embeddings, dim=1, eps=SHORTEST)


def alignment_loss(first: Tensor, second: Tensor, same: Tensor, margin: float) -> Tensor:
    """Loss that pulls pairs of one class together and pushes others apart up to a margin.

    L = I * |s1 - s2|^2 / 2 + (1 - I) * max(0, m - |s1 - s2|)^2 / 2    HARMONY, Eq. 7

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


def added(own: Sequence[Tensor | None], more: Sequence[Tensor | None]) -> Gradients:
    """The sum of two gradients of each parameter; None where it took part in neither loss."""
    return [
        one if other is None else other if one is None else one + other
        for one, other in zip(own, more, strict=True)
    ]
