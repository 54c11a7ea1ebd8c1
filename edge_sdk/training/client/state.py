"""The state of a client between rounds: its data, device, secret and personal weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_sdk.bundles import namespaces
from edge_sdk.errors import FrameError
from edge_sdk.training.protocol.fine_tuning import FineTuning
from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.protocol.plan import Plan

Array = NDArray[Any]

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ClientState:
    """One client, from round to round.

    Attributes:
        name: unique among the clients; random streams are keyed by it.
        x: (n, ...) raw inputs. y: (n,) int64 labels.
        device: where the client trains.
        secret: the seed of the noise that guards the data. The server knows the plan's seed, so
            this noise has a seed of its own.
        held_out: inputs and labels that the client never trains on, to score it by.
        personal: weights that stay on the client, by their keys (edge_sdk.bundles.namespaces). A
            method with a personal share also keeps all weights that the client trained last.
        fine_tuning: how the client adapts to its data once training has ended.
    """

    name: str
    x: Array
    y: NDArray[np.int64]
    device: torch.device
    secret: int
    held_out: tuple[Array, NDArray[np.int64]] | None = None
    personal: Weights = field(default_factory=dict)
    fine_tuning: FineTuning = field(default_factory=FineTuning)

    @property
    def samples(self) -> int:
        """n_k."""
        return len(self.y)

    def at(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """The inputs and labels at `rows`, on the client's device."""
        x = torch.from_numpy(np.ascontiguousarray(self.x[rows]))
        return x.to(self.device), torch.from_numpy(self.y[rows]).to(self.device)

    def start_weights(self, plan: Plan, sent: Weights) -> Weights:
        """The weights that a round starts from: the average, the personal ones, or a mixture.

        lambda * personal + (1 - lambda) * average, lambda the plan's personal share.

        Args:
            sent: the average, from the server.
        Returns: the keys of `sent`. The client's own exit head is added if the server sends none;
            the result has no exit head if the client has none either.
        """
        share, head = plan.part.personal_share, namespaces.exit_head(plan.depth)
        start = {
            key: torch.lerp(value, self.personal[key], share)
            if share and key in self.personal
            else value
            for key, value in sent.items()
        }
        if not any(map(head.holds, sent)):
            start |= {key: value for key, value in self.personal.items() if head.holds(key)}
        return start

    def take_first(self, plan: Plan, sent: Weights) -> Weights:
        """Keep the first weights that the server has for parts of the client's own.

        Parts that the client has kept from an earlier round stay as they are.

        Returns: what else was sent.
        """
        own = [namespaces.exit_head(plan.depth)] if plan.part.exit_head else []
        own += [namespaces.BACK] if plan.part.own_back else []
        for namespace in own:
            if not any(map(namespace.holds, self.personal)):
                first = namespaces.FIRST.select(sent)
                found = {key: tensor for key, tensor in first.items() if namespace.holds(key)}
                if found:
                    self.keep(found, 0)
        return {key: t for key, t in sent.items() if not namespaces.FIRST.holds(key)}

    def keep(self, weights: Weights, number: int) -> None:
        """Keep all of `weights` for the next rounds, or none of them if one is not finite.

        The round after one that diverged starts from the weights kept before it.

        Args:
            number: of the round that trained them.
        """
        if all(bool(torch.isfinite(tensor).all()) for tensor in weights.values()):
            self.personal |= {name: tensor.clone() for name, tensor in weights.items()}
            return
        logger.warning(
            "round=%d client=%s keeps none of %s and %d more: not finite",
            number,
            self.name,
            min(weights),
            len(weights) - 1,
        )

    def check_data(self, plan: Plan) -> None:
        """Compare the data with the plan.

        Raises: FrameError if the plan cannot be trained on them.
        """
        if len(self.x) != len(self.y) or not len(self.y):
            raise FrameError(
                f"client {self.name}: expected a label for each of one or more inputs,"
                f" got {len(self.x)} inputs and {len(self.y)} labels"
            )
        if self.x.shape[1:] != plan.input_shape:
            raise FrameError(
                f"client {self.name}: the plan is for inputs {plan.input_shape},"
                f" the data here are {self.x.shape[1:]}"
            )
        low, high = int(self.y.min()), int(self.y.max())
        if low < 0 or high >= plan.classes:
            raise FrameError(
                f"client {self.name}: the plan is for labels 0 to {plan.classes - 1},"
                " the data here have others"  # which ones is private: this text goes to the server
            )
