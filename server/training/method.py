"""A method: a frozen record of functions for named seams. The neutral record is plain SplitFed.

Each paper is one file in `methods/` that builds such a record out of a recipe's numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from edge_sdk.errors import ConfigurationError
from edge_sdk.training.plan import ClientPart
from server.training.aggregation import WeightRule, by_samples
from server.training.server_steps import ServerStep, copies

Labels = Literal["sent", "derivable", "private"]


@dataclass(frozen=True, slots=True)
class Method:
    """The seams.

    Attributes:
        name: as in a recipe.
        labels: what the server learns of labels; nothing is called private without a measured
            attack that fails.
        client: the client's half, in the words of its plan.
        server_step: None where the server has none (FedAvg).
        weigh: aggregation weights of the participants.
        server_weight: lambda, the server's own vote in aggregation.
        share_exits: whether exit heads are averaged and sent out, or stay on their clients.
        finetune_steps: SGD steps of each client on its own data after training.
    """

    name: str
    labels: Labels = "sent"
    client: ClientPart = field(default_factory=ClientPart)
    server_step: ServerStep | None = copies
    weigh: WeightRule = by_samples
    server_weight: float = 0.0
    share_exits: bool = False
    finetune_steps: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.server_weight < math.inf:
            raise ConfigurationError(
                f"server_weight: expected a number from 0 up, got {self.server_weight}"
            )
        if not isinstance(self.finetune_steps, int) or self.finetune_steps < 0:
            raise ConfigurationError(
                f"finetune_steps: expected a whole number from 0 up, got {self.finetune_steps}"
            )
