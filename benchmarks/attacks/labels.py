"""What the server can read of labels in the gradients that label-private clients return to it.

The gradient of cross-entropy by logits is (softmax - onehot) / B: negative at the label alone, so
labels that are never sent are known all the same. These attacks measure that, with and without
counter-measures; nothing is called private before they fail (docs/methods.md, HARMONY).

    by_sign         logit gradients, nothing else known            Li et al. 2022, arXiv:2102.08504
    by_likelihood   noise about the gradient each label would give   maximum likelihood
    by_direction    embeddings' gradients by a head nobody knows, a few labelled ones beside them
                                                                    Li et al. 2022, cosine attack
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edge_sdk.errors import ConfigurationError


def by_sign(gradients: Tensor) -> Tensor:
    """The smallest entry: without noise the only negative one.

    Args:
        gradients: (n, N) of the loss by logits.
    Returns: (n,) int64.
    """
    return gradients.argmin(1)


def by_likelihood(gradients: Tensor, candidates: Tensor) -> Tensor:
    """The label whose gradient is nearest: the most likely one under isotropic noise.

    Args:
        gradients: (n, D) as returned. candidates: (n, N, D), from `candidate_gradients`.
    Returns: (n,) int64.
    """
    return (gradients[:, None] - candidates).square().sum(2).argmin(1)


def candidate_gradients(logits: Tensor, batch: int, head: Tensor | None = None) -> Tensor:
    """What each label would give: (softmax - onehot) / batch, times the head's weight if any.

    Args:
        logits: (n, N). batch: over how many samples the client's loss is a mean.
        head: (N, D) weight of the layer behind the embeddings; None for gradients by logits.
    Returns: (n, N, D), D = N without a head.
    """
    classes = logits.shape[1]
    likely = torch.softmax(logits, 1)[:, None] - torch.eye(classes)
    return likely / batch if head is None else likely @ head / batch


def by_direction(gradients: Tensor, known: Sequence[Tensor]) -> Tensor:
    """The class to whose known gradients the direction is most alike, by cosine.

    Args:
        gradients: (n, D), of any layer's output.
        known: for each class (m, D) of labelled gradients; empty for a class nobody has.
    Returns: (n,) int64.
    Raises: ConfigurationError if no class has any.
    """
    if not any(len(rows) for rows in known):
        raise ConfigurationError("attack: expected labelled gradients of a class, got none")
    width = gradients.shape[1]
    centres = torch.stack(
        [_unit(rows).mean(0) if len(rows) else torch.zeros(width) for rows in known]
    )
    alike = _unit(gradients) @ _unit(centres).T
    present = torch.tensor([len(rows) > 0 for rows in known])
    return alike.masked_fill(~present, -torch.inf).argmax(1)


def guessing_rate(labels: Tensor) -> float:
    """Accuracy of always saying the commonest label: at this rate an attack has failed."""
    return float(labels.bincount().max()) / len(labels)


def _unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=1)
