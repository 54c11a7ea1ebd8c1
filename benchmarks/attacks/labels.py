"""Label attacks: labels that the server can infer from gradients of label-private clients.

The gradient of cross-entropy by logits is (softmax - onehot) / B, negative at the label only, so it
gives away labels that are never sent. These attacks measure that, with and without
counter-measures; nothing is called private before they fail (docs/methods/harmony.md).

    by_sign         logit gradients, nothing else known            Li et al. 2022, arXiv:2102.08504
    by_likelihood   noise about the gradient each label would give   maximum likelihood
    by_direction    embeddings' gradients by an unknown head, with a few labelled ones known
                                                                    Li et al. 2022, cosine attack
    by_norm         length of a gradient of any layer               Li et al. 2022, norm attack

`auc` says how well an attack's scores tell one class from the others, whatever the threshold.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from edge_sdk.errors import ConfigurationError


def by_sign(gradients: Tensor) -> Tensor:
    """Label of the smallest entry, without noise the only negative one.

    Args:
        gradients: (n, N) of the loss by logits.
    Returns: (n,) int64.
    """
    return gradients.argmin(1)


def by_likelihood(gradients: Tensor, candidates: Tensor) -> Tensor:
    """Label with the nearest gradient, the most likely one under isotropic noise.

    Args:
        gradients: (n, D) as returned. candidates: (n, N, D), from `candidate_gradients`.
    Returns: (n,) int64.
    """
    return (gradients[:, None] - candidates).square().sum(2).argmin(1)


def candidate_gradients(logits: Tensor, batch: int, head: Tensor | None = None) -> Tensor:
    """Gradient of each label: (softmax - onehot) / batch, times the head's weight if there is one.

    Args:
        logits: (n, N). batch: number of samples in the mean of the client's loss.
        head: (N, D) weight of the layer behind the embeddings; None for gradients by logits.
    Returns: (n, N, D), D = N without a head.
    """
    classes = logits.shape[1]
    likely = torch.softmax(logits, 1)[:, None] - torch.eye(classes)
    return likely / batch if head is None else likely @ head / batch


def by_direction(gradients: Tensor, known: Sequence[Tensor]) -> Tensor:
    """Class with known gradients of the most similar direction, by cosine.

    Args:
        gradients: (n, D), of any layer's output.
        known: for each class (m, D) labelled gradients; empty for a class without any.
    Returns: (n,) int64.
    Raises: ConfigurationError if no class has any.
    """
    return direction_scores(gradients, known).argmax(1)


def direction_scores(gradients: Tensor, known: Sequence[Tensor]) -> Tensor:
    """Cosine of each gradient and the mean direction of each class; -inf for an unknown class.

    Args:
        gradients, known: as `by_direction`.
    Returns: (n, N).
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
    return alike.masked_fill(~present, -torch.inf)


def by_norm(gradients: Tensor, classes: int) -> Tensor:
    """Length of each gradient as the score of every class, (n, N).

    Args:
        gradients: (n, D), of any layer's output.
    """
    lengths: Tensor = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
    return lengths.expand(-1, classes)


def auc(scores: Tensor, labels: Tensor) -> float:
    """Area under the curve of one class against the others, mean over the classes that occur.

    A score that separates a class the other way round separates it as well, so the area of a class
    is at least 0.5, and 0.5 is an attack that has failed.

    Args:
        scores: (n, N), higher for the likelier class. labels: (n,) int64, of two classes or more.
    """
    areas = []
    for label in sorted(set(labels.tolist())):
        area = float(roc_auc_score((labels == label).numpy(), scores[:, label].numpy()))
        areas.append(max(area, 1 - area))
    return statistics.fmean(areas)


def guessing_rate(labels: Tensor) -> float:
    """Accuracy of always guessing the most common label: at this rate an attack has failed."""
    return float(labels.bincount().max()) / len(labels)


def _unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=1)
