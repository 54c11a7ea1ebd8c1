"""Decoders that reconstruct images from smashed data, and the scale of their pixels.

An attacker trains one on the features of its own images. A client with an inversion guard trains a
small one, to measure how much its features reveal (SCALA, section 5.7, after ResSFL, Li et al.
2022).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edge_sdk.errors import ConfigurationError

Array = NDArray[Any]


class Decoder(nn.Sequential):
    """Features (B, c, h, w) to images (B, C, H, W) in [0, 1].

    A convolution to `width` channels, `blocks` residual blocks, then up to the image's size by
    doublings, each followed by a convolution. The normalisation is GroupNorm, because a batch may
    have one sample.

    Args:
        features: shape of one sample's features. image: that of one image.
        width: channels inside, a multiple of 8.
    Raises: ConfigurationError unless inputs and features are maps of three axes.
    """

    def __init__(
        self, features: tuple[int, ...], image: tuple[int, ...], width: int, blocks: int = 0
    ) -> None:
        if len(features) != 3 or len(image) != 3:
            raise ConfigurationError(
                "inversion: expected images and maps of three axes, got inputs of shape"
                f" {image} and features of shape {features}"
            )
        layers = [_conv(features[0], width), *(_Residual(width) for _ in range(blocks))]
        for size in _sizes(features[1:], image[1:]):
            layers += [nn.Upsample(size), _conv(width, width)]
        super().__init__(*layers, nn.Conv2d(width, image[0], 3, padding=1), nn.Sigmoid())


class Pixels:
    """Scales raw inputs to 0..1: uint8 from 0..255, other types from the range of `x`."""

    def __init__(self, x: Array) -> None:
        bytewise = x.dtype == np.uint8
        self.low = 0.0 if bytewise else float(x.min())
        self.high = 255.0 if bytewise else float(x.max())

    def __call__(self, x: Tensor) -> Tensor:
        """The scaled inputs; all 0 if the range is a single value."""
        return (x.to(torch.float32) - self.low) / max(self.high - self.low, 1e-12)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = _conv(width, width), _conv(width, width)

    def forward(self, z: Tensor) -> Tensor:
        through: Tensor = self.second(self.first(z))
        return z + through


def _conv(channels: int, width: int) -> nn.Module:
    conv = nn.Conv2d(channels, width, 3, padding=1)
    return nn.Sequential(conv, nn.GroupNorm(width // 8, width), nn.ReLU())


def _sizes(small: tuple[int, ...], large: tuple[int, ...]) -> list[tuple[int, int]]:
    """Sizes from `small` to `large` by doublings; the last one is cut to fit."""
    (height, width), sizes = small, []
    while (height, width) != large:
        height, width = min(2 * height, large[0]), min(2 * width, large[1])
        sizes.append((height, width))
    return sizes
