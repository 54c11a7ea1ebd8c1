"""Building blocks that several backbones share: normalisation, pooling to a grid, heads, init."""

from __future__ import annotations

import math
from typing import Literal, TypeVar

from torch import nn

Norm = Literal["batch", "group"]
M = TypeVar("M", bound=nn.Module)


def norm2d(kind: Norm, channels: int) -> nn.Module:
    """BatchNorm over maps (B, C, H, W), or GroupNorm: see group_norm. 2 * C parameters each."""
    return group_norm(channels) if kind == "group" else nn.BatchNorm2d(channels)


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm, for clients whose batches are small or unlike one another.

    Groups are of 16 channels (as good as 32 groups in Wu & He 2018, Table 3), of 8 where 16 does
    not divide the width: never so small that a 1x1 map would leave nothing to normalise over.
    """
    return nn.GroupNorm(channels // math.gcd(channels, 16), channels)


def grid_pool(side: int, cells: int) -> nn.Module | None:
    """Average a side x side map down to cells x cells; None where that is not allowed.

    Plain average pooling only, since adaptive pooling is slow once exported. It is allowed where
    the map divides evenly. 7 to 3 takes windows of 3 by steps of 2, the same windows as adaptive
    pooling; 8 to 3 takes the same, which are those of alexnet's own last pool.
    """
    if side == cells:
        return nn.Identity()
    if side >= cells and side % cells == 0:
        return nn.AvgPool2d(side // cells)
    if cells == 3 and side in (7, 8):
        return nn.AvgPool2d(3, stride=2)
    return None


def grid_head(channels: int, side: int, cells: int, classes: int) -> nn.Sequential | None:
    """Head: pool to cells x cells, flatten, linear; None where the map does not allow it."""
    pool = grid_pool(side, cells)
    if pool is None:
        return None
    return nn.Sequential(pool, nn.Flatten(), nn.Linear(channels * cells * cells, classes))


def global_head(channels: int, classes: int) -> nn.Sequential:
    """Head: global average pool, flatten, linear; for maps of any size."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def he_initialised(module: M) -> M:
    """`module` with its convolutions drawn anew, N(0, 2 / fan_out), biases 0 (He et al. 2015)."""
    for part in module.modules():
        if isinstance(part, nn.Conv1d | nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    return module
