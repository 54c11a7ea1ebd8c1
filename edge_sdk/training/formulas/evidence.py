"""Evidence in a network's logits: a Dirichlet distribution, its uncertainties, and the loss that
trains it.    BESplit, 3.2, after Sensoy et al. 2018

    e = exp(logits), by its tangent beyond 10    alpha = e + 1    S = sum alpha    p = alpha / S
    u = N / S

Everything is computed in float64, because lnGamma of a large S loses the digits that matter in
float32. The cost is small: B x N numbers, next to the millions of a forward pass.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn

from edge_sdk.gate_form import TANGENT_FROM, Activation

# Entropies are differences of terms as large as alpha * ln alpha. Up to this value float64 keeps
# nine digits of them, and more evidence for a class changes no decision.
EVIDENCE_MAX: Final = 1e6


def evidence(logits: Tensor, activation: Activation = "exp") -> Tensor:
    """Evidence of logits, float64, of the same shape.

        exp         e = exp(min(z, 10)) * (1 + max(z - 10, 0))
        softplus    e = ln(1 + exp(z)), as networks of the releases before learnt it

    Ours: the paper does not name the non-negative activation. Beyond 10 the exponential goes on as
    its tangent, so no logit overflows, and none is without a gradient, as behind a limit.
    """
    z = logits.double()
    if activation == "softplus":
        return nn.functional.softplus(z)
    return z.clamp(max=TANGENT_FROM).exp() * (1 + (z - TANGENT_FROM).relu())


def concentration(logits: Tensor, activation: Activation = "exp") -> Tensor:
    """alpha = e + 1 of (B, N) logits: (B, N) float64, each at least 1.    Eq. 20"""
    return evidence(logits, activation) + 1


def aleatoric(alpha: Tensor) -> Tensor:
    """Expected entropy of the class under the Dirichlet, in nats.    Eq. 3

    U_ale = sum_i alpha_i/S * (digamma(S+1) - digamma(alpha_i+1))

    Args:
        alpha: (B, N) float64.
    Returns: (B,), from 0 (one class has all evidence) to ln N.
    """
    strength = alpha.sum(1, keepdim=True)
    gaps = torch.digamma(strength + 1) - torch.digamma(alpha + 1)
    return (alpha / strength * gaps).sum(1)


def dirichlet_entropy(alpha: Tensor) -> Tensor:
    """Differential entropy of the Dirichlet, in nats.    Eq. 4

    H = sum_i lnGamma(alpha_i) - lnGamma(S) - sum_i (alpha_i-1) * (digamma(alpha_i) - digamma(S))

    Differs: the paper prints lnGamma(S) inside the sum, which subtracts it N times.

    Args:
        alpha: (B, N) float64.
    Returns: (B,), at most -ln (N-1)!, that of no evidence at all.
    """
    strength = alpha.sum(1, keepdim=True)
    volume = torch.lgamma(alpha).sum(1) - torch.lgamma(strength).squeeze(1)
    spread = ((alpha - 1) * (torch.digamma(alpha) - torch.digamma(strength))).sum(1)
    return volume - spread


def epistemic(alpha: Tensor) -> Tensor:
    """U_epi = 1 / (1 + H_max - H), with H_max = -lnGamma(N), the entropy without evidence.

    Differs: the paper takes H itself, which is negative for N > 2. The more certain client would
    then get the smaller ratio in Eq. 9. This U_epi grows with the uncertainty and stays above 0.

    Args:
        alpha: (B, N) float64.
    Returns: (B,), in (0, 1]; 1 where there is no evidence.
    """
    return 1 / (1 + kl_to_uniform(alpha.clamp(max=EVIDENCE_MAX)).clamp(min=0))


def kl_to_uniform(alpha: Tensor) -> Tensor:
    """KL(Dir(alpha) || Dir(1)) in nats: H_max - H, (B,); 0 without evidence.

    Args:
        alpha: (B, N) float64.
    """
    return -math.lgamma(alpha.shape[1]) - dirichlet_entropy(alpha)


def evidential_losses(
    logits: Tensor, labels: Tensor, kl_weight: float, activation: Activation = "exp"
) -> Tensor:
    """The evidential loss of each sample.    Eq. 5

    L = digamma(S) - digamma(alpha_y) + lam_t * KL(Dir(alpha~) || Dir(1)),
    alpha~ = y + (1 - y) * alpha: evidence for the true class is not penalised.

    Args:
        logits: (B, N) float. labels: (B,) int64, each in [0, N).
        kl_weight: lam_t; with 0, only the expected cross-entropy under the Dirichlet is left.
    Returns: (B,) float64.
    """
    alpha = concentration(logits, activation)
    true = nn.functional.one_hot(labels, alpha.shape[1]).to(alpha.dtype)
    fit = torch.digamma(alpha.sum(1)) - torch.digamma((true * alpha).sum(1))
    if not kl_weight:
        return fit
    return fit + kl_weight * kl_to_uniform(true + (1 - true) * alpha)
