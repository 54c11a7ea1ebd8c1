"""Numbers of the evidential loss, as recipes and plans have them; no torch.    BESplit, Eq. 5"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from edge_sdk.checks import check_fields
from edge_sdk.gate_form import Activation
from profiles.checks import number, one_of, whole


@dataclass(frozen=True, slots=True)
class EvidentialLoss:
    """Activation from logits to evidence, and the cost of evidence for wrong classes.

    lam_t = kl_share * min(1, t / T)    in round t, counted from 1

    Differs: the paper names no activation and prints no factor. Behind softplus and with all of the
    divergence a network learns nothing (docs/decisions/0026-evidence-that-learns.md).

    Attributes:
        activation: from a logit to evidence (edge_sdk.training.formulas.evidence.evidence).
        kl_share: lam_t once T rounds have passed. anneal_rounds: T.
    """

    activation: Activation = "exp"
    kl_share: float = 0.01
    anneal_rounds: int = 10

    def __post_init__(self) -> None:
        check_fields(
            self,
            "evidence",
            activation=one_of(get_args(Activation)),
            kl_share=number(least=0),
            anneal_rounds=whole(1),
        )

    def kl_weight(self, number: int) -> float:
        """lam_t of round `number`."""
        return self.kl_share * min(1.0, number / self.anneal_rounds)
