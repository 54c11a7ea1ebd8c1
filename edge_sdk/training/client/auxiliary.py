"""A client that also teaches a small model of its own: BESplit's half.    BESplit, 4.3

The auxiliary model W_A answers on the device. It is an extractor built as the client's prefix W_C
is, and a head; personal, never averaged, and never sent. Each batch teaches it once the server's
answer is there, and without KD_G where the server is silent.
"""

from __future__ import annotations

import math
from copy import deepcopy
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from edge_sdk.errors import ConfigurationError, FrameError
from edge_sdk.nets.supernet import Supernet
from edge_sdk.training.client.client_round import Half, Open, apply_step, sgd
from edge_sdk.training.formulas.distillation import kd_client, kd_global
from edge_sdk.training.formulas.evidence import evidential_losses, kl_weight_at
from edge_sdk.training.protocol.messages import EndRound, Feedback, StartRound, Update, Weights
from edge_sdk.training.protocol.plan import Distillation, Plan, network_of
from edge_sdk.training.protocol.weights import load_weights, read_weights

if TYPE_CHECKING:
    from edge_sdk.training.client import TrainingClient

# names under which its weights are kept: auxiliary.extractor.stage1.…, auxiliary.head.…
MARK: Final = "auxiliary."


class Auxiliary(nn.Module):
    """W_A = [W_Ae, W_Ah].

    Args:
        extractor: raw input (B, ...) to features, shaped as the smashed data.
        head: features to logits (B, N).
    """

    def __init__(self, extractor: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.extractor = extractor
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Raw input (B, ...) to logits (B, N)."""
        logits: Tensor = self.head(self.extractor(x))
        return logits

    def read(self) -> Weights:
        """Copies of its weights, by the names under which they are kept."""
        parts = {"extractor": self.extractor, "head": self.head}
        return {
            f"{MARK}{part}.{name}": tensor
            for part, module in parts.items()
            for name, tensor in read_weights(module).items()
        }

    def load(self, personal: Weights) -> bool:
        """Take the weights kept among a client's personal ones, if they are there.

        Raises: FrameError where they do not fit: they were kept for another cut or network.
        """
        found = {k.removeprefix(MARK): t for k, t in personal.items() if k.startswith(MARK)}
        for part, module in (("extractor.", self.extractor), ("head.", self.head)):
            own = {k.removeprefix(part): t for k, t in found.items() if k.startswith(part)}
            if found:
                load_weights(module, own)
        return bool(found)


def auxiliary_of(plan: Plan) -> Auxiliary:
    """A new W_A with the weights of the plan's seed: those of the network, and a fresh linear.

    Raises: ConfigurationError for a plan without one, or a head its features do not allow.
    """
    return deepcopy(_template(plan))


class DistillingHalf(Half):
    """SplitFed's half with W_A beside it; the server's loss is its own affair."""

    def __init__(self, client: TrainingClient, start: StartRound) -> None:
        super().__init__(client, start)
        self.how = _distillation(self.plan)
        self.auxiliary = auxiliary_of(self.plan).to(client.device)
        self.auxiliary.load(client.personal)
        self.auxiliary.train()
        self.student = list(self.auxiliary.parameters())
        self.student_optimiser = sgd(self.student, self.plan)
        self.kl_weight = kl_weight_at(self.number, self.how.anneal_rounds)
        self.lesson: tuple[Tensor, Tensor] | None = None  # x and y of the open batch

    def end(self, message: EndRound) -> Update:
        """As every half, and W_A is kept."""
        update = super().end(message)
        self._keep(self.auxiliary.read())
        return update

    def alone(self) -> Update:
        """The open batch and those left teach W_A; the prefix has nothing to learn by."""
        self._close(None)
        for step in range(self.opened, self.samples.steps):
            self.open = self._forward(*self._batch(step))
            self._close(None)
        return self.end(EndRound(self.number))

    def _forward(self, x: Tensor, y: Tensor) -> Open:
        self.lesson = x, y
        return super()._forward(x, y)

    def _close(self, feedback: Feedback | None) -> None:
        batch, lesson = self.open, self.lesson
        super()._close(feedback)
        if batch is not None and lesson is not None:
            outputs = None if feedback is None else feedback.outputs
            self._teach(*lesson, batch.z.detach(), outputs)

    def _teach(self, x: Tensor, y: Tensor, z: Tensor, outputs: Tensor | None) -> None:
        """One step of W_A on L_evid + lam_C * KD_C + lam_G * KD_G    Eq. 18

        Args:
            z: W_C's features of x. outputs: the server's logits for z, None while it is silent.
        """
        features = self.auxiliary.extractor(x)
        logits = self.auxiliary.head(features)
        loss = evidential_losses(logits, y, self.kl_weight).mean()
        if self.how.client_share:
            loss = loss + self.how.client_share * kd_client(features, z, self.how.tau)
        if self.how.server_share and outputs is not None:
            if outputs.shape != logits.shape or not math.isfinite(float(outputs.sum())):
                raise FrameError(
                    f"client {self.client.name}: feedback: expected finite outputs of shape"
                    f" {tuple(logits.shape)}, got shape {tuple(outputs.shape)}"
                )
            loss = loss + self.how.server_share * kd_global(logits, outputs, self.how.tau)
        gradients = torch.autograd.grad(loss, self.student)
        if math.isfinite(float(loss.detach())):  # a batch that is not must not spoil what is kept
            apply_step(self.student_optimiser, self.student, gradients)


@lru_cache(maxsize=8)
def _template(plan: Plan) -> Auxiliary:
    net = network_of(plan)
    extractor = deepcopy(net.prefix(plan.depth))
    if _distillation(plan).head == "exit":
        return Auxiliary(extractor, deepcopy(net.exit_head(plan.depth)))
    return Auxiliary(extractor, _global_head(net, plan))


def _global_head(net: Supernet, plan: Plan) -> nn.Sequential:
    """Global average pool and linear, whatever the network's own exit heads are."""
    with torch.no_grad():
        prefix = deepcopy(net.prefix(plan.depth)).to("meta").eval()
        channels, *sides = prefix(torch.empty(1, *net.input_shape, device="meta")).shape[1:]
    pools = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d}
    own = [part for part in net.exit_head(plan.depth).modules() if isinstance(part, nn.Linear)]
    if len(sides) not in pools or own[-1].in_features % channels:
        raise ConfigurationError(
            f"{net.name}: its features are no maps to pool over; expected distil head exit"
        )
    linear = nn.Linear(channels, net.classes, device="meta").to_empty(device="cpu")
    generator = torch.Generator().manual_seed(plan.seed)
    bound = 1 / math.sqrt(channels)  # as torch draws a linear layer, but by the plan's seed
    nn.init.uniform_(linear.weight, -bound, bound, generator=generator)
    nn.init.uniform_(linear.bias, -bound, bound, generator=generator)
    return nn.Sequential(pools[len(sides)](1), nn.Flatten(), linear)


def _distillation(plan: Plan) -> Distillation:
    if plan.part.distil is None:
        raise ConfigurationError("auxiliary model: expected a plan with distil, got one without")
    return plan.part.distil
