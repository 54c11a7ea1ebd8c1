"""Building blocks that several backbones share: normalisation, pooling to a grid, heads, init."""

from __future__ import annotations

import math
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

Norm = Literal["batch", "group"]
M = TypeVar("M", bound=nn.Module)


class PooledStage(nn.Sequential):
    """Convolution, ReLU, max-pool.

    In training with channels last, the pool comes before ReLU, on the larger map alone: `cnn6`
    trains 1.05 to 1.3 times as fast. Values and gradients are those of the layers in turn, bit for
    bit: ReLU changes no order, and where the largest value of a window is below 0 neither way has a
    gradient.
    """

    def forward(self, x: Tensor) -> Tensor:
        convolution, relu, pool = self
        z: Tensor = convolution(x)
        if self.training and z.is_contiguous(memory_format=torch.channels_last):
            pooled: Tensor = relu(pool(z))
            return pooled
        plain: Tensor = pool(relu(z))
        return plain


def norm2d(kind: Norm, channels: int) -> nn.Module:
    """BatchNorm over maps (B, C, H, W), or GroupNorm: see group_norm. 2 * C parameters each."""
    return group_norm(channels) if kind == "group" else nn.BatchNorm2d(channels)


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm, for clients with batches that are small or differ from each other.

    A group has 16 channels (as good as 32 groups in Wu & He 2018, Table 3), or 8 if 16 does not
    divide the width. So even a 1x1 map has several values in each group.
    """
    return nn.GroupNorm(channels // math.gcd(channels, 16), channels)


def grid_pool(side: int, cells: int) -> nn.Module | None:
    """Average pooling of a side x side map to cells x cells; None if the sizes do not allow it.

    Only plain average pooling is used, because adaptive pooling is slow in an exported graph. The
    map must divide evenly. Two more cases are allowed: 7 to 3 takes windows of 3 with steps of 2,
    as adaptive pooling does; 8 to 3 takes the same windows, as alexnet's own last pool does.
    """
    if side == cells:
        return nn.Identity()
    if side >= cells and side % cells == 0:
        return nn.AvgPool2d(side // cells)
    if cells == 3 and side in (7, 8):
        return nn.AvgPool2d(3, stride=2)
    return None


def grid_head(channels: int, side: int, cells: int, classes: int) -> nn.Sequential | None:
    """Head: pool to cells x cells, flatten, linear; None if `grid_pool` does not allow it."""
    pool = grid_pool(side, cells)
    if pool is None:
        return None
    return nn.Sequential(pool, nn.Flatten(), nn.Linear(channels * cells * cells, classes))


def global_head(channels: int, classes: int) -> nn.Sequential:
    """Head: global average pool, flatten, linear; for maps of any size."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def he_initialised(module: M) -> M:
    """`module` with new convolutions, N(0, 2 / fan_out), and biases 0 (He et al. 2015)."""
    for part in module.modules():
        if isinstance(part, nn.Conv1d | nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    return module
