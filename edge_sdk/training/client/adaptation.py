"""A client that learns to be personalised: a few steps ahead in two directions, and back again.

One batch of HARMONY's local step (3.3-3.5), with B1 = (x1, y1) and B2 = (x2, y2):

    adapt      (f1, h1) = M plain SGD steps on Lc from (f, h) on B1;  (f2, h2) on B2      Eq. 3
    views      z1 = first K stages of f1 on x2, K drawn;  z2 = f2(x1)                     Eq. 4
    losses     Lc = CE(h2(z2), y1);  Ls = CE(server(z2), y1), judged here: labels stay
    outer      (f, h) -= lr * (g * dLc + (1 - g) * dLs), the gradients taken at (f2, h2)

The last line is the first-order approximation: the gradient of the adapted weights is applied to
those before the adaptation. z1 only shows the server another extractor; nothing comes back for it.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from edge_sdk.errors import FrameError
from edge_sdk.training.client.client_round import Half, Open, apply_step, sgd
from edge_sdk.training.client.personal_head import BACK, back_of
from edge_sdk.training.client.second_view import SecondView
from edge_sdk.training.formulas.gradient_noise import isotropic
from edge_sdk.training.protocol.messages import (
    EndRound,
    Features,
    Feedback,
    OutputGradient,
    Outputs,
    StartRound,
    Step,
    Update,
)
from edge_sdk.training.protocol.plan import network_of
from edge_sdk.training.protocol.weights import read_weights

if TYPE_CHECKING:
    from edge_sdk.training.client import TrainingClient

# apart from every other stream of training
_NOISE: Final = 0x6E6F6973


class MetaHalf(Half):
    """A round of a client that adapts before it learns."""

    def __init__(self, client: TrainingClient, start: StartRound) -> None:
        super().__init__(client, start)
        plan, part = self.plan, start.plan.part.meta
        assert part is not None, "a plan with adaptation makes this half"
        assert self.head is not None, "such a plan has an exit head"
        self.meta = part
        self.heads = list(self.head.parameters())
        self.first = Branch(self.prefix, self.head)
        self.second = Branch(self.prefix, self.head)
        network = network_of(plan)
        self.depths = [depth for depth in network.cuts if depth <= plan.depth]
        self.classifier: nn.Linear | None = None
        if part.head == "client":
            self.classifier = back_of(plan, client.personal).to(client.device)
            self.back_optimiser = sgd(list(self.classifier.parameters()), plan)
        self.labels = torch.empty(0)
        self.answered = True
        self.server_loss = 0.0
        self.head_gradients: list[Tensor] = []
        self.other: SecondView | None = None

    def step(self, message: Step) -> Features:
        """Close the batch before, and both views of the next.

        Without the loss of the exit head: the server has that head, and of a batch of one the loss
        is the label.
        """
        features = replace(super().step(message), loss=None)
        return features if self.other is None else self.other.beside(features)

    def answer(self, message: Outputs) -> OutputGradient:
        """dLs by the server's logits or, where the head is here, by its embeddings.

        Without Ls itself, which would say the label of a batch of one through any noise.

        Raises: FrameError for outputs that do not belong to the open batch.
        """
        outputs = message.outputs.to(self.client.device).detach().requires_grad_()
        width = self.plan.classes if self.classifier is None else self.classifier.in_features
        shape = (len(self.labels), width)
        wrong = self.answered or message.step != self.opened - 1 or outputs.shape != shape
        # of the sum: as good, and faster than looking at each
        if wrong or not bool(torch.isfinite(outputs.sum())):
            raise FrameError(
                f"client {self.client.name}: outputs of step {message.step}: expected finite ones"
                f" of the open batch, of shape {shape}, got shape {tuple(outputs.shape)}"
            )
        self.answered = True
        if self.classifier is None:
            loss = nn.functional.cross_entropy(outputs, self.labels)
            (gradient,) = torch.autograd.grad(loss, [outputs])
        else:
            loss = nn.functional.cross_entropy(self.classifier(outputs), self.labels)
            own = list(self.classifier.parameters())
            gradient, *backs = torch.autograd.grad(loss, [outputs, *own])
            # as the server steps its trunk: on (1 - g) * Ls
            share = 1 - self.plan.part.exit_share
            apply_step(self.back_optimiser, own, [share * back for back in backs])
        self.server_loss = float(loss.detach())
        # of what the server cannot know: with the plan's seed alone it would take it off again
        drawn = np.random.default_rng([*self.noise_key, _NOISE, message.step])
        gradient = isotropic(gradient, self.meta.noise, drawn)
        return OutputGradient(self.number, message.step, gradient.contiguous(), loss=0.0)

    def end(self, message: EndRound) -> Update:
        """As every half; a head that is kept here is kept for the next round."""
        update = super().end(message)
        if self.classifier is not None:
            kept = read_weights(self.classifier)
            self._keep({BACK + name: tensor for name, tensor in kept.items()})
        return update

    def _forward(self, x: Tensor, y: Tensor) -> Open:
        """Both adaptations and both views; of the second the gradients of Lc are kept."""
        x2, y2 = self._at(self.others.rows(len(y)))
        self.labels, self.answered = y, False
        self.other = None
        if self.plan.part.views:
            self._adapt(self.first, x, y)
            self.other = self._early_view(x2, y == y2)
        self._adapt(self.second, x2, y2)
        z = self._run(x, self.second.prefix)
        _copy_buffers(self.second.prefix, self.prefix)  # BatchNorm's statistics
        loss = self._exit_loss(self.second.head(z), y)
        own, *self.head_gradients = torch.autograd.grad(loss, [z, *self.second.heads])
        return Open(z, own, float(loss.detach()), len(y))

    def _close(self, feedback: Feedback | None) -> None:
        """The outer step: of the head here, of the prefix as in every half."""
        batch = self.open
        if feedback is not None:
            feedback = replace(feedback, loss=self.server_loss)
        if batch is not None:
            share = 1.0 if feedback is None else self._own_weight(batch, feedback)
            assert self.head_optimiser is not None
            gradients = [share * gradient for gradient in self.head_gradients]
            apply_step(self.head_optimiser, self.heads, gradients)
        super()._close(feedback)

    def _pull(self, z: Tensor, gradient: Tensor, *, keep: bool = False) -> list[Tensor]:
        """Back to the adapted prefix's parameters; they are applied to those before it adapted."""
        return list(torch.autograd.grad(z, self.second.prefixes, gradient, retain_graph=keep))

    def _adapt(self, branch: Branch, x: Tensor, y: Tensor) -> None:
        """M steps on Lc from where the client stands."""
        branch.start(self.prefix, self.parameters, self.heads)
        for _ in range(self.meta.steps):
            loss = self._exit_loss(branch.head(self._run(x, branch.prefix)), y)
            branch.descend(loss, self.meta.rate)

    def _second_view(self, y: Tensor) -> SecondView | None:  # noqa: ARG002 - `_forward` makes it
        return None

    def _early_view(self, x2: Tensor, same: Tensor) -> SecondView:
        depth = self.plan.depth
        if self.meta.early:
            depth = self.depths[int(self.others.generator.integers(len(self.depths)))]
        with torch.no_grad():
            z1 = x2
            for part in list(self.first.prefix.children())[: depth + 1]:  # `normalise` is the first
                z1 = part(z1)
        return SecondView.of(z1, depth, same, self.plan)


class Branch:
    """Copies of a client's prefix and exit head that run ahead and are thrown away."""

    def __init__(self, prefix: nn.Module, head: nn.Module) -> None:
        self.prefix, self.head = deepcopy(prefix), deepcopy(head)
        self.prefixes, self.heads = list(self.prefix.parameters()), list(self.head.parameters())

    def start(self, prefix: nn.Module, prefixes: list[Parameter], heads: list[Parameter]) -> None:
        """Go back to where the client stands: to its prefix, and the parameters of both."""
        with torch.no_grad():
            for own, its in zip(self.prefixes + self.heads, prefixes + heads, strict=True):
                own.copy_(its)
        _copy_buffers(prefix, self.prefix)

    def descend(self, loss: Tensor, rate: float) -> None:
        """One step of plain SGD."""
        parameters = self.prefixes + self.heads
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=rate)


def _copy_buffers(source: nn.Module, target: nn.Module) -> None:
    for theirs, own in zip(source.buffers(), target.buffers(), strict=True):
        own.copy_(theirs)
