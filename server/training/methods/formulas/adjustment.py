"""Logit adjustment: cross-entropy that does not favour frequent labels.

SCALA, Eq. 9-13; after Menon et al. 2021. In training the logarithm of a label's share is added to
its logit, so that the logits themselves, by which predictions are made, need not know it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

# Ours: a label that no present client has would have -inf.
LEAST_SHARE: Final = 1e-6


def label_share(counts: Sequence[int]) -> Tensor:
    """Share P_k of each label in a client's data, (N,) float64.

    All labels alike where there are no counts to go by.
    """
    numbers = torch.tensor(counts, dtype=torch.float64)
    total = numbers.sum()
    return numbers / total if total else torch.full_like(numbers, 1 / len(counts))


def joint_share(shares: Mapping[str, Tensor], samples: Mapping[str, int]) -> Tensor:
    """Share P_s of each label over several clients: sum_k n_k * P_k / sum_k n_k.

    Args:
        shares: P_k by client. samples: n_k by client, of these clients at least.
    """
    total = sum(samples[client] for client in shares)
    weighed = [share * (samples[client] / total) for client, share in shares.items()]
    return torch.stack(weighed).sum(0)


def adjustment(share: Tensor, strength: float = 1.0, least: float = LEAST_SHARE) -> Tensor:
    """The adjustment added to the logits in training: a * ln(max(P, least)), (N,) float32.

    Args:
        strength: a; 1 is SCALA's, Menon et al.'s tau. 0 adds nothing.
    """
    return strength * share.clamp_min(least).log().to(torch.float32)


def adjusted_losses(logits: Tensor, labels: Tensor, added: Tensor | None) -> Tensor:
    """Cross-entropy of each sample on adjusted logits, (B,).

    CE(s + ln P, y)    SCALA, Eq. 12-13

    Args:
        logits: s, (B, N). labels: (B,) int64.
        added: ln P, (N,) or (B, N); equal entries are plain cross-entropy, as is None.
    """
    adjusted = logits if added is None else logits + added.to(logits.device)
    return nn.functional.cross_entropy(adjusted, labels, reduction="none")
