"""Noise on gradients that a client returns, so that they say less about its labels.

Of the family in Li et al., "Label Leakage and Protection in Two-party Split Learning" (ICLR 2022,
arXiv:2102.08504), its isotropic member. The paper's others do not carry over to many classes:
Marvell's structure is optimised for two, and max_norm only scales a gradient, whose one entry of
the other sign still is the label's.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def isotropic(gradient: Tensor, strength: float, generator: np.random.Generator) -> Tensor:
    """g + n, n ~ N(0, s / D * max_j |g_j|^2 * I) for each sample    Li et al., `iso`

    A sample's noise has s times the squared norm, in the mean, of the batch's largest gradient.

    Args:
        gradient: (B, D). strength: s; 0 leaves the gradient as it is.
        generator: must be drawn from what the receiver does not know, or it takes the noise off.
    """
    if not strength:
        return gradient
    rows = gradient.flatten(1)
    largest = torch.linalg.vector_norm(rows, dim=1).max()
    noise = torch.from_numpy(generator.standard_normal(gradient.shape, dtype=np.float32))
    scale: Tensor = math.sqrt(strength / rows.shape[1]) * largest
    return gradient + scale * noise.to(gradient.device)
