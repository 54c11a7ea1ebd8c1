"""An adaptation: a client runs a few steps ahead in two directions before it learns.

One batch of HARMONY's local step (3.3-3.5), with B1 = (x1, y1) and B2 = (x2, y2):

    adapt      (f1, h1) = M plain SGD steps on Lc from (f, h) on B1;  (f2, h2) on B2      Eq. 3
    views      z1 = first K stages of f1 on x2, K drawn;  z2 = f2(x1)                     Eq. 4
    losses     Lc = CE(h2(z2), y1);  Ls = CE(server(z2), y1), computed here: labels stay
    outer      (f, h) -= lr * (g * dLc + (1 - g) * dLs), the gradients taken at (f2, h2)

The last line is the first-order approximation: the gradient of the adapted weights is applied to
those before the adaptation. z1 only shows the server another extractor; no gradient comes back for
it.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from edge_sdk.bundles.namespaces import BACK
from edge_sdk.nets.supernet import View
from edge_sdk.training.client.batches import EndlessSampler
from edge_sdk.training.client.companion import OpenBatch
from edge_sdk.training.client.exit_head import ExitHead
from edge_sdk.training.client.optimiser import optimiser_of
from edge_sdk.training.client.personal_head import personal_classifier
from edge_sdk.training.client.prefix import Prefix
from edge_sdk.training.client.second_view import SecondView
from edge_sdk.training.client.state import ClientState
from edge_sdk.training.formulas.gradient_noise import isotropic
from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.protocol.noise import NoiseKey
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.weights import read_weights
from edge_sdk.training.streams import Stream


class Adaptation:
    """Another way forward: through copies of the prefix and exit head that adapted first.

    It answers the server's outputs: by logits or, where the last layer is on the client, by
    embeddings.

    Args:
        second: where second batches B2 are drawn from.
        noise_key: what the noise on the answers is drawn from.
    """

    def __init__(
        self,
        state: ClientState,
        plan: Plan,
        prefix: Prefix,
        head: ExitHead,
        *,
        second: EndlessSampler,
        noise_key: NoiseKey,
    ) -> None:
        assert plan.part.meta is not None, "the plan asks for adaptation"
        self._state, self._plan, self._meta = state, plan, plan.part.meta
        self._prefix, self._head, self._second_rows = prefix, head, second
        self._noise_key = noise_key
        self._first = ScratchCopy(prefix.module, head.module)
        self._second = ScratchCopy(prefix.module, head.module)
        self._depths = [depth for depth in network_of(plan).cuts if depth <= plan.depth]
        self._classifier: nn.Linear | None = None
        if self._meta.head == "client":
            self._classifier = personal_classifier(plan, state.personal).to(state.device)
            self._back_optimiser = optimiser_of(plan, self._classifier.parameters())

    @property
    def width(self) -> int:
        """Numbers that the server's outputs have for each sample."""
        return self._plan.classes if self._classifier is None else self._classifier.in_features

    def forward(self, x: Tensor, y: Tensor) -> OpenBatch:
        """Both adaptations and both views; the batch has the second adaptation's gradients."""
        x2, y2 = self._state.at(self._second_rows.take(len(y)))
        view = None
        if self._plan.part.views:
            self._adapt(self._first, x, y)
            view = self._early_view(x2, y == y2)
        adapted = self._second
        self._adapt(adapted, x2, y2)
        # BatchNorm's running statistics move once for each batch, by the pass that is learnt from,
        # as without adaptation; those of the steps ahead go with the scratch copies
        _copy_buffers(self._prefix.module, adapted.prefix)
        z = self._prefix.run(x, adapted.prefix)
        _copy_buffers(adapted.prefix, self._prefix.module)
        loss = self._head.loss(adapted.head(z), y)
        own, *head = torch.autograd.grad(loss, [z, *adapted.head_parameters])
        # the gradients are the adapted copies'; prefix and exit head themselves step by them
        parameters = adapted.prefix_parameters
        return OpenBatch(x, y, z, parameters, own, head, float(loss.detach()), view)

    def answer(self, batch: OpenBatch, step: int, outputs: Tensor) -> tuple[Tensor, float]:
        """The gradient of Ls by the server's outputs, with noise.

        If the last layer is on the client, it takes a step. The loss returned for sending is 0: Ls
        itself would tell the label of a batch of one through any noise.
        """
        if self._classifier is None:
            logits = outputs
            loss = nn.functional.cross_entropy(logits, batch.y)
            (gradient,) = torch.autograd.grad(loss, [outputs])
        else:
            logits = self._classifier(outputs)
            loss = nn.functional.cross_entropy(logits, batch.y)
            parameters = list(self._classifier.parameters())
            gradient, *backs = torch.autograd.grad(loss, [outputs, *parameters])
            # as the server steps its trunk: on (1 - g) * Ls
            share = 1 - self._plan.part.exit_share
            self._back_optimiser.step([share * back for back in backs])
        batch.logits, batch.server_loss = logits.detach(), float(loss.detach())
        # from a key that the server does not know: from the plan's seed it could subtract the noise
        generator = self._noise_key.generator(Stream.ANSWER_NOISE, step=step)
        return isotropic(gradient, self._meta.noise, generator), 0.0

    def kept(self) -> Weights:
        """The last layer, where it is on the client."""
        return {} if self._classifier is None else BACK.prefixed(read_weights(self._classifier))

    def _adapt(self, scratch: ScratchCopy, x: Tensor, y: Tensor) -> None:
        """M steps on Lc from where the client stands."""
        scratch.reset(self._prefix.module, self._prefix.parameters, self._head.parameters)
        for _ in range(self._meta.steps):
            logits = scratch.head(self._prefix.run(x, scratch.prefix))
            scratch.descend(self._head.loss(logits, y), self._meta.rate)

    def _early_view(self, x2: Tensor, same: Tensor) -> SecondView:
        depth = self._plan.depth
        if self._meta.early:
            depth = self._depths[int(self._second_rows.generator.integers(len(self._depths)))]
        with torch.no_grad():
            z1 = self._first.prefix.part(0, depth)(x2)
        return SecondView.encode(z1, depth, same, self._plan)


class ScratchCopy:
    """Copies of a client's prefix and exit head that take the steps of one adaptation."""

    def __init__(self, prefix: View, head: nn.Module) -> None:
        self.prefix, self.head = deepcopy(prefix), deepcopy(head)
        self.prefix_parameters = list(self.prefix.parameters())
        self.head_parameters = list(self.head.parameters())

    def reset(
        self,
        prefix: nn.Module,
        prefix_parameters: list[Parameter],
        head_parameters: list[Parameter],
    ) -> None:
        """Copy the client's own weights again, and the buffers of its prefix."""
        own = self.prefix_parameters + self.head_parameters
        with torch.no_grad():
            for copy, source in zip(own, prefix_parameters + head_parameters, strict=True):
                copy.copy_(source)
        _copy_buffers(prefix, self.prefix)

    def descend(self, loss: Tensor, rate: float) -> None:
        """One step of plain SGD."""
        parameters = self.prefix_parameters + self.head_parameters
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=rate)


def _copy_buffers(source: nn.Module, target: nn.Module) -> None:
    for theirs, own in zip(source.buffers(), target.buffers(), strict=True):
        own.copy_(theirs)
