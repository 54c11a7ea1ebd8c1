"""Personalisation after training, as data: HARMONY, Eq. 5, and SplitGP with fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from edge_sdk.checks import check_fields
from profiles.checks import number, optional, whole

# More would be another training; a trainer must not keep a device busy for ever.
STEPS_MAX: Final = 100_000


@dataclass(frozen=True, slots=True)
class FineTuning:
    """Steps of plain SGD on mini-batches of a client's own data.

    Attributes:
        steps: M; 0 for none. rate: learning rate; None for the plan's.
    """

    steps: int = 0
    rate: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, "fine-tuning", steps=whole(0, STEPS_MAX), rate=optional(number(above=0)))
