"""Client State Records: each client's evidence by class, and the weight that it earns.
BESplit, 4.1

A record is one tensor, as it is kept in the method's memory and in checkpoints:

    (N, N + 3) float64, a row per true class:   E (N columns) | M | U_ale | U_epi

all of them sums over samples: evidence for each class, their number, their uncertainties.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, Literal

import torch
from torch import Tensor, nn

from edge_sdk.gate_form import Activation
from edge_sdk.training.formulas.evidence import aleatoric, concentration, epistemic

Missing = Literal["full", "mean", "sum"]
Factor = Literal["evidence", "aleatoric", "epistemic"]

FACTORS: Final[tuple[Factor, ...]] = ("evidence", "aleatoric", "epistemic")
EPS: Final = 1e-8


def record_of(logits: Tensor, labels: Tensor, activation: Activation = "exp") -> Tensor:
    """The record of one batch, to be added to its client's: (N, N + 3) float64.

    Args:
        logits: (B, N) finite. labels: (B,) int64, each in [0, N).
    """
    alpha = concentration(logits.detach(), activation)
    rows = torch.cat(
        [
            alpha - 1,
            torch.ones_like(alpha[:, :1]),
            aleatoric(alpha)[:, None],
            epistemic(alpha)[:, None],
        ],
        dim=1,
    )
    true = nn.functional.one_hot(labels, alpha.shape[1]).to(rows.dtype)
    return true.T @ rows


def updated(old: Tensor | None, new: Tensor, rounds: int, beta: float) -> Tensor:
    """A client's record after a round.

    R = b * R_old + (1 - b) * R_new, b = beta^max(1, rounds).    Eq. 6

    Args:
        old: None at first sight: then R = R_new.
        rounds: since the client last took part; the longer ago, the less the old record counts.
        beta: in [0, 1]; 0 forgets all but the last round.
    """
    if old is None:
        return new
    decay = beta ** max(1, rounds)
    return decay * old + (1 - decay) * new


def evidential_weights(
    records: Mapping[str, Tensor],
    *,
    missing: Missing = "full",
    factors: Collection[Factor] = FACTORS,
    power: float = 1.0,
) -> dict[str, float]:
    """Weights by evidence and uncertainty.

    w_k ~ (Q_k / (U_ale,k * U_epi,k))^power, scaled to sum 1.    Eq. 8-10

    Q_k is the mean over all N classes of q_i = E_ii / (sum_j E_ij + eps), 0 for a class without
    samples. The ratios of Eq. 9 have one numerator for all clients, which drops out of Eq. 10.

    Differs: Eq. 9 sums average uncertainties over classes, so a client that holds fewer classes has
    the smaller sum and earns more, ten times as much for one class of ten. That is `missing =
    "sum"`. Their mean over the classes a client holds, `"mean"`, pays it too: a client of few
    classes is sure of them. With `"full"` a class without samples counts with the uncertainties of
    no evidence, as Q counts it 0. The paper has power 1. U_epi: see `epistemic`.

    Args:
        records: of the round's participants.
        factors: those that count; leaving one out is an ablation of the paper's Table 4.
        power: below 1 it moves the weights towards equal ones, which are those of power 0.
    Returns: by client; the same for all where no client has evidence for a right answer.
    """
    scores = {
        client: _score(record, missing, factors) ** power for client, record in records.items()
    }
    total = sum(scores.values())
    if not total > 0:
        return dict.fromkeys(scores, 1 / len(scores)) if scores else {}
    return {client: score / total for client, score in scores.items()}


def label_shares(records: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Label shares of every client and of all together.

    P_k = M_k / sum M_k of every record, and P_g = sum_k M_k / sum_k sum M_k.    BESplit, 4.2

    Returns: P by client, (N,) float64, and P_g. Records without a sample are left out.
    Raises: ValueError if no record has a sample.
    """
    clients = list(records)
    counts = torch.stack([_counts(record) for record in records.values()]) if clients else None
    if counts is None or not counts.sum() > 0:
        raise ValueError("label shares: expected a record with samples, got none")
    totals = counts.sum(1)
    overall = counts.sum(0) / totals.sum()
    rows = zip(clients, counts, totals.tolist(), strict=True)
    return {client: count / total for client, count, total in rows if total > 0}, overall


def _counts(record: Tensor) -> Tensor:
    return record[:, len(record)]


def _score(record: Tensor, missing: Missing, factors: Collection[Factor]) -> float:
    classes = len(record)
    counts = _counts(record)
    held = counts > 0
    if not held.any():
        return 0.0
    evidence = record[:, :classes]
    score = 1.0
    if "evidence" in factors:
        # the averages of Eq. 7 have M above and below: they drop out but for eps
        mean = evidence[held] / counts[held, None]
        right = mean[torch.arange(len(mean)), held.nonzero().squeeze(1)]
        score *= float((right / (mean.sum(1) + EPS)).sum()) / classes
    none = torch.ones(1, classes, dtype=torch.float64)
    for factor, column, most in (
        ("aleatoric", classes + 1, aleatoric(none)),
        ("epistemic", classes + 2, epistemic(none)),
    ):
        if factor in factors:
            means = record[held, column] / counts[held]
            if missing == "full":
                means = torch.cat([means, most.expand(classes - len(means))])
            uncertainty = means.sum() if missing == "sum" else means.mean()
            score /= float(uncertainty) + EPS
    return score
