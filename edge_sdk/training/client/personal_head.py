"""The personal head: the network's last layer stays on the client.    SplitLPF, 3.1

    front      z = f(x)                                          as everywhere: averaged, sent out
    server     e = middle(z)
    back       L = CE(b(dropout(e)), y);  b -= lr_k * dL/db;  dL/de goes up
    front      f -= lr * J_f^T dL/dz, once the server has taken dL/de through the middle

Labels stay here, but a receiver of dL/de over many steps can tell them apart: they are derivable.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edge_sdk.bundles.namespaces import BACK
from edge_sdk.training.client.companion import Companion, OpenBatch
from edge_sdk.training.client.optimiser import optimiser_of
from edge_sdk.training.client.state import ClientState
from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.weights import load_weights, read_weights
from edge_sdk.training.streams import Stream

# the name in the namespace `back` of the share of right answers in the last round
ACCURACY: Final = "accuracy"
LEAST_RATE: Final = 0.1  # share of the rate: a client that is always right still learns


def personal_rate(rate: float, accuracy: float) -> float:
    """lr_k = lr * (1 - acc_k), in [0.1 * lr, lr].

    Ours: SplitLPF (4.2) says only that the personal rate follows the client's accuracy.

    Args:
        accuracy: share of right answers on own samples in the last round; 0 before the first.
    """
    return rate * min(1.0, max(LEAST_RATE, 1 - accuracy))


def back_rate(plan: Plan, personal: Weights) -> float:
    """The learning rate of a client's last layer in its next steps.

    Args:
        personal: the client's personal weights, its last accuracy among them.
    """
    part = plan.part.back
    assert part is not None, "the plan asks for a personal head"
    rate = plan.training.learning_rate if part.learning_rate is None else part.learning_rate
    if not part.follow_accuracy:
        return rate
    return personal_rate(rate, float(personal.get(BACK.key(ACCURACY), 0.0)))


def dropped(embeddings: Tensor, drawn: NDArray[np.float32], share: float) -> Tensor:
    """Embeddings in training: those drawn below `share` left out, the others scaled up.

    Args:
        drawn: of the embeddings' shape, uniform in [0, 1).
    """
    kept: Tensor = torch.from_numpy(drawn >= share).to(embeddings.device, torch.float32)
    return embeddings * (kept / (1 - share))


def personal_classifier(plan: Plan, personal: Weights) -> nn.Linear:
    """The last layer, with the client's own weights or, before its first round, the plan's seed's.

    Args:
        personal: the client's personal weights.
    Raises: FrameError if they are of another network.
    """
    classifier = deepcopy(network_of(plan).segment(0, None).classifier)
    names, kept = read_weights(classifier), BACK.select(personal)
    own = {name: kept[name] for name in names if name in kept}
    if own:
        load_weights(classifier, own)
    return classifier


class PersonalHead(Companion):
    """Trains the last layer, and answers the server's embeddings with their gradient."""

    def __init__(self, state: ClientState, plan: Plan, number: int) -> None:
        part = plan.part.back
        assert part is not None, "the plan asks for a personal head"
        self._dropout = part.dropout
        self._dropout_at = partial(
            Stream.DROPOUT.generator, plan.seed, round=number, client=state.name
        )
        self._classifier = personal_classifier(plan, state.personal).to(state.device)
        self._parameters = list(self._classifier.parameters())
        rate = back_rate(plan, state.personal)
        self.optimiser = optimiser_of(plan, self._parameters, rate)
        self._right = self._seen = 0

    @property
    def width(self) -> int:
        """Numbers in one sample's embedding."""
        return self._classifier.in_features

    def answer(self, batch: OpenBatch, step: int, outputs: Tensor) -> tuple[Tensor, float]:
        """One step of the last layer on the embeddings, and their gradient before it."""
        with torch.no_grad():
            batch.logits = self._classifier(outputs)
            self._right += int((batch.logits.argmax(1) == batch.y).sum())
        self._seen += len(batch.y)
        logits = self._classifier(self._masked(step, outputs))
        loss = nn.functional.cross_entropy(logits, batch.y)
        gradient, *own = torch.autograd.grad(loss, [outputs, *self._parameters])
        self.optimiser.step(own)
        batch.server_loss = float(loss.detach())
        return gradient, batch.server_loss

    def kept(self) -> Weights:
        """The last layer and, if the server asked in this round, the share of right answers."""
        kept = read_weights(self._classifier)
        if self._seen:
            kept[ACCURACY] = torch.tensor(self._right / self._seen)
        return BACK.prefixed(kept)

    def _masked(self, step: int, outputs: Tensor) -> Tensor:
        """After dropout, which is drawn from a key so that every transport draws the same."""
        if not self._dropout:
            return outputs
        drawn = self._dropout_at(step=step).random(outputs.shape, np.float32)
        return dropped(outputs, drawn, self._dropout)
