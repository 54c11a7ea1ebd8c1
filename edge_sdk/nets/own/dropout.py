"""Dropout that is repeatable: its mask is drawn from a hash of its own input.

torch draws dropout from one generator that all threads of a process share. The same round would
then differ between a simulation and real devices, and after a restart. Here equal inputs get equal
masks, wherever they are computed, and the next batch gets another mask.
"""

from __future__ import annotations

import struct
from typing import Final

import torch
from torch import Tensor, nn

# of multiplicative hashing: 2^64 over the golden ratio (Knuth, 6.4)
_ODD: Final = 0x9E3779B97F4A7C15
_KINDS: Final = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class RepeatableDropout(nn.Module):
    """Zero a share of the values, and scale the others by 1 / (1 - p), in training only.

    Args:
        p: share of the values, 0 to 1.
        channels: whether whole channels are zeroed together (Dropout1d, Dropout2d, Dropout3d).
        key: number of the layer in its network: layers with equal inputs get other masks.
    """

    def __init__(self, p: float, *, channels: bool, key: int) -> None:
        super().__init__()
        self.p = p
        self.channels = channels
        self.key = key

    def forward(self, x: Tensor) -> Tensor:
        """x (B, ...) with the mask of its values; x itself in evaluation."""
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return x * 0
        shape = (*x.shape[:2], *(1,) * (x.ndim - 2)) if self.channels else tuple(x.shape)
        generator = torch.Generator().manual_seed(_seed(x, self.key))
        mask = torch.rand(shape, generator=generator).to(x.device) >= self.p
        return x * mask / (1 - self.p)


def make_repeatable(net: nn.Module) -> None:
    """Put RepeatableDropout in the place of each of torch's dropout layers, in place.

    A dropout that a layer calls as a function (torch.nn.functional.dropout) stays as it is.
    """
    key = 0
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in _KINDS:
                assert isinstance(child, _KINDS)
                channels = type(child) is not nn.Dropout
                setattr(parent, name, RepeatableDropout(child.p, channels=channels, key=key))
                key += 1


def _seed(x: Tensor, key: int) -> int:
    """A hash, 32 bits, of the sum of x and of the key."""
    total = float(x.detach().sum(dtype=torch.float64))
    bits = int.from_bytes(struct.pack("<d", total), "little")
    # torch seeds with the low 32 bits alone, and those of a rounded sum may all be 0
    return (((bits ^ key) * _ODD) % 2**64) >> 32
