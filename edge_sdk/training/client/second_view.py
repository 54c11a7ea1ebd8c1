"""The second view of a batch: features of other samples of the same client, and one bit per sample
that says whether the labels of both views are equal. The server aligns by it.   HARMONY, Eq. 4, 7

An adaptation makes the view with an adapted copy of the prefix; without one, the prefix makes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from edge_sdk.training.client.batches import EndlessSampler
from edge_sdk.training.protocol.feature_codec import encode_batch
from edge_sdk.training.protocol.messages import Features
from edge_sdk.training.protocol.plan import Plan
from edge_sdk.training.streams import Stream


@dataclass(frozen=True, slots=True)
class SecondView:
    """z1 as it travels, its depth K, and the samples at which both views have the same label."""

    values: Tensor
    ranges: Tensor | None
    depth: int
    same: Tensor

    @classmethod
    def encode(cls, z: Tensor, depth: int, same: Tensor, plan: Plan) -> SecondView:
        """Make a view, in the codec of the plan's features.

        Args:
            z: (B, ...) without a graph. same: (B,) bool.
        """
        values, ranges = encode_batch(z, plan.training.codec)
        return cls(values, ranges, depth, same.to(torch.uint8))

    def added_to(self, features: Features) -> Features:
        """The message with the first view's features, and this view in it."""
        return replace(
            features,
            view=self.values,
            view_ranges=self.ranges,
            entry=self.depth,
            same=self.same,
        )


def second_sampler(client: str, samples: int, plan: Plan, number: int) -> EndlessSampler:
    """The stream of samples that second batches B2 are drawn from, one B2 for each B1.

    Args:
        number: of the round.
    """
    generator = Stream.SECOND_BATCHES.generator(plan.seed, round=number, client=client)
    return EndlessSampler(generator, samples)
