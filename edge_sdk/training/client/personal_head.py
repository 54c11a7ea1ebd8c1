"""The client's two ends of a U: the front goes to the server, the back never leaves. SplitLPF, 3.1

    front      z = f(x)                                          as everywhere: averaged, sent out
    server     e = middle(z)
    back       L = CE(b(dropout(e)), y);  b -= lr_k * dL/db;  dL/de goes up
    front      f -= lr * J_f^T dL/dz, once the server has taken dL/de through the middle

Labels stay here, but whoever sees dL/de over many steps can tell them apart: they are derivable.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Final
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from edge_sdk.errors import FrameError
from edge_sdk.training.client.client_round import Half, Open
from edge_sdk.training.protocol.messages import (
    EndRound,
    OutputGradient,
    Outputs,
    StartRound,
    Update,
    Weights,
)
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.weights import load_weights, read_weights

if TYPE_CHECKING:
    from edge_sdk.training.client import TrainingClient

# names under which a client keeps its back and how good it last was
BACK: Final = "back."
ACCURACY: Final = "accuracy"
LEAST_RATE: Final = 0.1  # of the plan's: a client that is always right still learns

_DROPOUT: Final = 0x64726F70  # apart from every other stream of training


def personal_rate(rate: float, accuracy: float) -> float:
    """lr_k = lr * (1 - acc_k), in [0.1 * lr, lr].

    Ours: SplitLPF (4.2) says only that the personal rate follows the client's accuracy.

    Args:
        accuracy: share of right answers on own samples in the last round; 0 before the first.
    """
    return rate * min(1.0, max(LEAST_RATE, 1 - accuracy))


def back_of(plan: Plan, personal: Weights) -> nn.Linear:
    """The last layer as its client last left it; as the plan's seed makes it before the first time.

    Args:
        personal: what the client keeps to itself.
    Raises: FrameError where that is of another network.
    """
    back = deepcopy(network_of(plan).suffix(plan.depth).classifier)
    kept = {name: personal[BACK + name] for name in read_weights(back) if BACK + name in personal}
    if kept:
        load_weights(back, kept)
    return back


class PersonalHalf(Half):
    """A round of a client that has the last layer to itself."""

    def __init__(self, client: TrainingClient, start: StartRound) -> None:
        super().__init__(client, start)
        plan, part = self.plan, start.plan.part.back
        assert part is not None, "a plan with a back makes this half"
        self.dropout = part.dropout
        self.back = back_of(plan, client.personal).to(client.device)
        accuracy = float(client.personal.get(BACK + ACCURACY, 0.0))
        numbers = plan.training
        rate = numbers.learning_rate if part.learning_rate is None else part.learning_rate
        self.back_parameters = list(self.back.parameters())
        self.back_optimiser = torch.optim.SGD(
            self.back_parameters,
            personal_rate(rate, accuracy) if part.follow_accuracy else rate,
            momentum=numbers.momentum,
            weight_decay=numbers.weight_decay,
        )
        self.labels: Tensor | None = None
        self.right = self.judged = 0

    def answer(self, message: Outputs) -> OutputGradient:
        """One step of the back on the server's embeddings, and their gradient before it."""
        if self.open is None or self.labels is None or message.step != self.opened - 1:
            raise FrameError(f"client {self.client.name}: no step {message.step} is open here")
        labels, self.labels = self.labels, None
        shape = (len(labels), self.back.in_features)
        embeddings = message.outputs.to(self.client.device).detach().requires_grad_()
        # of the sum: as good, and faster than looking at each
        if embeddings.shape != shape or not bool(torch.isfinite(embeddings.sum())):
            raise FrameError(
                f"client {self.client.name}: outputs: expected finite embeddings of shape {shape},"
                f" got shape {tuple(embeddings.shape)}"
            )
        with torch.no_grad():
            self.right += int((self.back(embeddings).argmax(1) == labels).sum())
        self.judged += len(labels)
        logits = self.back(embeddings * self._mask(message.step, shape))
        loss = nn.functional.cross_entropy(logits, labels)
        gradient, *own = torch.autograd.grad(loss, [embeddings, *self.back_parameters])
        for parameter, its in zip(self.back_parameters, own, strict=True):
            parameter.grad = its
        self.back_optimiser.step()
        return OutputGradient(
            self.number, message.step, gradient.contiguous(), float(loss.detach())
        )

    def end(self, message: EndRound) -> Update:
        """As every half, and the back is kept for the next round."""
        update = super().end(message)
        kept = read_weights(self.back)
        if self.judged:
            kept[ACCURACY] = torch.tensor(self.right / self.judged)
        self._keep({BACK + name: tensor for name, tensor in kept.items()})
        return update

    def _forward(self, x: Tensor, y: Tensor) -> Open:
        self.labels = y
        return super()._forward(x, y)

    def _mask(self, step: int, shape: tuple[int, ...]) -> Tensor:
        """What dropout multiplies the embeddings by; keyed, so that every transport draws alike."""
        if not self.dropout:
            return torch.ones((), device=self.client.device)
        name = crc32(self.client.name.encode())
        key = [self.plan.seed, _DROPOUT, self.number, name, step]
        drawn = np.random.default_rng(key).random(shape, np.float32)
        mask: Tensor = torch.from_numpy(drawn >= self.dropout).to(self.client.device, torch.float32)
        return mask / (1 - self.dropout)
