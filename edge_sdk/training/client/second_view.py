"""The second view of a batch: other samples of the client's at a cut, and a bit for each that says
whether its label is that of the first view. The server aligns by it    HARMONY, Eq. 4, 7

How a view is made is a half's own affair: by a prefix that ran ahead (`meta`) or, in every other
half, by the prefix as it stands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_sdk.training.protocol.feature_codec import encode_batch
from edge_sdk.training.protocol.messages import Features
from edge_sdk.training.protocol.plan import Plan

_SECOND: Final = 0x62617463  # apart from every other stream of training


@dataclass(frozen=True, slots=True)
class SecondView:
    """z1 as it travels, the depth K it comes from, and where the two views' labels are equal."""

    values: Tensor
    ranges: Tensor | None
    depth: int
    same: Tensor

    @classmethod
    def of(cls, z: Tensor, depth: int, same: Tensor, plan: Plan) -> SecondView:
        """Coded as the plan's features are.

        Args:
            z: (B, ...) without a graph. same: (B,) bool.
        """
        values, ranges = encode_batch(z, plan.training.codec)
        return cls(values, ranges, depth, same.to(torch.uint8))

    def beside(self, features: Features) -> Features:
        """The first view's features, with this one."""
        return replace(
            features,
            view=self.values,
            view_ranges=self.ranges,
            entry=self.depth,
            same=self.same,
        )


class SecondBatches:
    """B2 of each batch: as many as B1, of an endless stream of own samples."""

    def __init__(self, client: str, samples: int, plan: Plan, number: int) -> None:
        key = [plan.seed, _SECOND, number, crc32(client.encode())]
        self.generator = np.random.default_rng(key)
        self._samples = samples
        self._left = np.empty(0, np.int64)

    def rows(self, size: int) -> NDArray[np.int64]:
        """Of the next one."""
        while len(self._left) < size:
            more = self.generator.permutation(self._samples)
            self._left = np.concatenate([self._left, more])
        rows, self._left = self._left[:size], self._left[size:]
        return rows
