"""Membership inference: was a sample among those that a network was trained on?

The attacker holds a sample with its label and asks the network. A small loss speaks for a member
(Yeom et al. 2018, arXiv:1709.01604). The true rate at a small false rate says whether anybody is
found for sure, which the area under the curve hides (Carlini et al. 2022, arXiv:2112.03570).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor

FALSE_RATE: Final = 0.01


@dataclass(frozen=True, slots=True)
class Membership:
    """Success of an attack.

    Attributes:
        auc: area under the curve; 0.5 is guessing, 1 is certainty.
        true_rate: share of the members that are found while 1 % of the others are called members
            wrongly; 0.01 is guessing.
    """

    auc: float
    true_rate: float


def by_loss(members: Tensor, others: Tensor) -> Membership:
    """Call the samples with the smallest losses members.

    Args:
        members, others: (n,) and (m,) losses of samples that were trained on and that were not.
    """
    truth = np.r_[np.ones(len(members)), np.zeros(len(others))]
    scores = -torch.cat([members, others]).double().numpy()
    false_rates, true_rates, _ = roc_curve(truth, scores)
    found = float(true_rates[false_rates <= FALSE_RATE].max())
    return Membership(float(roc_auc_score(truth, scores)), found)
