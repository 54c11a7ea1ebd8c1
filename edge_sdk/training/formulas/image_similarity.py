"""Similarity of images: it scores inversion attacks, and the inversion guard trains against it.

Each measure takes two batches (B, C, H, W) of values in [0, 1] and returns one number per image.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn

# Wang et al. 2004, section III.C: an 11x11 Gaussian window of deviation 1.5; K1 and K2
WINDOW: Final = 11
SIGMA: Final = 1.5
C1: Final = 0.01**2
C2: Final = 0.03**2
# limits PSNR to 100 dB: a perfect copy would have infinity, which has no mean
LEAST_ERROR: Final = 1e-10


def mse(image: Tensor, other: Tensor) -> Tensor:
    """Mean squared error, (B,): 0 for copies."""
    return (image - other).square().flatten(1).mean(1)


def psnr(image: Tensor, other: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB, (B,): -10 * log10(MSE), at most 100."""
    return -10 * mse(image, other).clamp_min(LEAST_ERROR).log10()


def ssim(image: Tensor, other: Tensor) -> Tensor:
    """Structural similarity, (B,): 1 for copies. Differentiable.

    SSIM = (2*m_a*m_b + C1) * (2*c_ab + C2) / ((m_a^2 + m_b^2 + C1) * (v_a + v_b + C2))

    Wang et al. 2004, Eq. 13: means, variances and covariance under a Gaussian window, channel by
    channel; the mean is over all positions of the window inside the image, and all channels.
    An image smaller than 11x11 gets the largest window with an odd side that fits.
    """
    batch, channels, height, width = image.shape
    # one convolution over both images, their squares and their product, each plane by itself
    planes = torch.stack([image, other, image**2, other**2, image * other])
    planes = planes.reshape(5 * batch * channels, 1, height, width)
    for side, shape in ((height, (1, 1, -1, 1)), (width, (1, 1, 1, -1))):
        planes = nn.functional.conv2d(planes, _window(side, image).view(shape))
    mean, mean_other, square, square_other, product = planes.reshape(5, batch, -1)
    variances = square - mean**2 + square_other - mean_other**2
    covariance = product - mean * mean_other
    alike = (2 * mean * mean_other + C1) * (2 * covariance + C2)
    places: Tensor = alike / ((mean**2 + mean_other**2 + C1) * (variances + C2))
    return places.mean(1)


def _window(side: int, like: Tensor) -> Tensor:
    """The Gaussian's weights along one axis, which sum to 1."""
    reach = min(WINDOW, side if side % 2 else side - 1) // 2
    offsets = range(-reach, reach + 1)
    weights = [math.exp(-(offset**2) / (2 * SIGMA**2)) for offset in offsets]
    return like.new_tensor([weight / sum(weights) for weight in weights])
