"""Distillation of two teachers into a small model on the device.    BESplit, 4.3

    L = L_evid + lam_C * KD_C + lam_G * KD_G    Eq. 18

The student is the auxiliary model W_A = [W_Ae, W_Ah]: an extractor of the same form as the client's
prefix W_C, and a head. KD_C compares the distances between its features with those between the
features of W_C. KD_G compares its logits with the whole network's.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

EPS: Final = 1e-8


def kd_global(student: Tensor, teacher: Tensor, tau: float) -> Tensor:
    """KD_G = tau^2 * KL(p_g || p_a) at p = softmax(logits / tau), mean over the batch.    Eq. 15

    Differs: the first line of the paper's equation has the student first. Its second line has the
    teacher first, and is the one used here.

    Args:
        student, teacher: (B, N) logits; the teacher gets no gradient.
        tau: temperature, above 0.
    Returns: () float, 0 where both give the same probabilities.
    """
    return tau**2 * _kl(teacher.detach() / tau, student / tau)


def kd_client(student: Tensor, teacher: Tensor, tau: float) -> Tensor:
    """KD_C = tau^2 * KL(teacher || student), mean over rows of softmax(M / tau).    Eq. 16-17

    M is each extractor's `relation` of the batch.

    Differs: the paper's torch call puts the student first; here it is the teacher, as in KD_G.

    Args:
        student, teacher: (B, ...) features of the same samples, of any shapes.
    Returns: () float; 0 for a batch of one, and where all distances have the same proportions.
    """
    return tau**2 * _kl(relation(teacher.detach()) / tau, relation(student) / tau)


def relation(features: Tensor) -> Tensor:
    """Squared distances between all pairs of samples, divided by their mean.    Eq. 16

    M_ab = |z_a - z_b|^2, here divided by the mean over a != b.

    Differs: the paper does not divide. At the scale of real features, the softmax that follows
    would then have one entry of 1 in each row, and no gradient.

    Args:
        features: (B, ...) float.
    Returns: (B, B), 0 on the diagonal; all 0 if all samples are equal.
    """
    rows = features.flatten(1)
    rows = rows - rows.mean(0)  # same distances, and the products below lose fewer digits
    squares = rows.square().sum(1)
    distances = (squares[:, None] + squares - 2 * rows @ rows.T).clamp(min=0)
    others = ~torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    distances = distances * others
    pairs = max(1, len(rows) * (len(rows) - 1))
    return distances / (distances.sum() / pairs + EPS)


def _kl(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(softmax(teacher) || softmax(student)), mean over rows."""
    return nn.functional.kl_div(
        student.log_softmax(1), teacher.log_softmax(1), reduction="batchmean", log_target=True
    )
