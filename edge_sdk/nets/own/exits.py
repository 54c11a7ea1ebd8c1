"""Exit heads for stages of any shape: features pooled to a small grid, and a linear layer."""

from __future__ import annotations

from typing import Final

from torch import Tensor, nn

# pools by the number of axes behind the channels
_POOLS: Final[dict[int, type[nn.Module]]] = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
# cells along each axis, the finest first: shallow exits need more than one (plain_cnn.py)
_CELLS: Final = (3, 2, 1)
# most inputs of the linear layer: 256 channels on a grid of 3 x 3
_FEATURES_MAX: Final = 2304


class TokenMean(nn.Module):
    """Tokens (B, T, width) to their mean (B, width)."""

    def forward(self, x: Tensor) -> Tensor:
        """Mean over the tokens."""
        return x.mean(dim=1)


def exit_for(shape: tuple[int, ...], classes: int, *, tokens: bool) -> nn.Sequential | None:
    """A new exit head for one sample's features of that shape; None if there is none for them.

    Args:
        shape: (C,), maps (C, L), (C, H, W), (C, D, H, W), or tokens (T, width).
        tokens: whether features of two axes are tokens, and not maps.
    """
    if len(shape) == 1:
        return nn.Sequential(nn.Linear(shape[0], classes))
    if tokens:
        width = shape[-1]
        return nn.Sequential(TokenMean(), nn.LayerNorm(width), nn.Linear(width, classes))
    channels, *sides = shape
    if len(sides) not in _POOLS:
        return None
    cells = _cells(channels, sides)
    features = channels
    for count in cells:
        features *= count
    return nn.Sequential(*_grid(sides, cells), nn.Flatten(), nn.Linear(features, classes))


def _cells(channels: int, sides: list[int]) -> list[int]:
    """Cells along each axis: as many as the limit of features allows, and no more than its side."""
    for most in _CELLS:
        cells = [min(most, side) for side in sides]
        features = channels
        for count in cells:
            features *= count
        if features <= _FEATURES_MAX:
            break
    return cells


def _grid(sides: list[int], cells: list[int]) -> list[nn.Module]:
    """Average pooling to that many cells; its windows overlap where they do not divide a side.

    Plain pooling, because adaptive pooling is slow in an exported graph.
    """
    if sides == cells:
        return []
    strides = tuple(side // count for side, count in zip(sides, cells, strict=True))
    windows = tuple(
        side - (count - 1) * stride
        for side, count, stride in zip(sides, cells, strides, strict=True)
    )
    return [_POOLS[len(sides)](windows, strides)]
