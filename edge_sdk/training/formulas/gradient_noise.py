"""Noise on the gradients that a client returns, so that they reveal less about its labels.

This is the isotropic noise of Li et al., "Label Leakage and Protection in Two-party Split Learning"
(ICLR 2022, arXiv:2102.08504). The paper's other methods do not fit many classes: Marvell's
structure is optimised for two, and max_norm only scales a gradient, in which the one entry of
opposite sign still marks the label.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def isotropic(gradient: Tensor, strength: float, generator: np.random.Generator) -> Tensor:
    """g + n, n ~ N(0, s / D * max_j |g_j|^2 * I) for each sample    Li et al., `iso`

    The expected squared norm of one sample's noise is s times that of the batch's largest gradient.

    Args:
        gradient: (B, D). strength: s; 0 returns the gradient unchanged.
        generator: must come from a key that the receiver does not know, because it could subtract
            the noise otherwise.
    """
    if not strength:
        return gradient
    rows = gradient.flatten(1)
    largest = torch.linalg.vector_norm(rows, dim=1).max()
    noise = torch.from_numpy(generator.standard_normal(gradient.shape, dtype=np.float32))
    scale: Tensor = math.sqrt(strength / rows.shape[1]) * largest
    return gradient + scale * noise.to(gradient.device)
