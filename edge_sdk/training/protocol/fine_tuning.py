"""Personalisation after training, as data: HARMONY, Eq. 5, SplitGP with fine-tuning, SplitLPF."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from edge_sdk.checks import check_fields
from profiles.checks import number, optional, whole

# More would be another training; a trainer must not keep a device busy for ever.
STEPS_MAX: Final = 100_000
EPOCHS_MAX: Final = 1_000


@dataclass(frozen=True, slots=True)
class FineTuning:
    """Training of a client on its own data, once the weights of all are averaged.

    Attributes:
        steps: M, steps of plain SGD on mini-batches, of prefix and exit head; 0 for none.
        rate: their learning rate, a constant; None for the plan's, that of the last round.
        refit_epochs: passes over the client's samples that train its own last layer
            (edge_sdk.training.client.fine_tuning); 0 for none, as from an older trainer.
    """

    steps: int = 0
    rate: float | None = None
    refit_epochs: int = 0

    def __post_init__(self) -> None:
        check_fields(
            self,
            "fine-tuning",
            steps=whole(0, STEPS_MAX),
            rate=optional(number(above=0)),
            refit_epochs=whole(0, EPOCHS_MAX),
        )
