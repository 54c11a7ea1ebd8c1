"""Calibrated logits of a client whose labels are unequally common.    FedLC, Eq. 6-7

    L = CE(s - tau * n^(-1/4), y)        n_c: the client's samples of class c

A rare class has a larger margin: its logit has to win although tau * n^(-1/4) is taken from it.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

# a class that the client lacks counts as so few samples, as in public code: it loses 100 * tau
LEAST_COUNT: Final = 1e-8


def label_margins(counts: Tensor, tau: float) -> Tensor:
    """Margins taken from the logits: tau * n^(-1/4), (N,) float32.

    Args:
        counts: (N,) samples of each class. tau: strength; 0 gives zeros.
    """
    return tau * counts.to(torch.float32).clamp(min=LEAST_COUNT).pow(-0.25)


def calibrated_loss(logits: Tensor, labels: Tensor, margins: Tensor) -> Tensor:
    """Cross-entropy of the calibrated logits, (): the mean over the batch.

    Differs: the paper's denominator leaves out the true class, by which the loss has no lower
    bound; here, as in public code, it has all classes.

    Args:
        logits: (B, N). labels: (B,) int64. margins: (N,), of `label_margins`; zeros give plain
            cross-entropy.
    """
    return torch.nn.functional.cross_entropy(logits - margins, labels)
