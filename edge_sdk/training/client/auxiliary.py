"""The auxiliary model: a small model that the client trains for itself.    BESplit, 4.3

The auxiliary model W_A answers on the device. It is an extractor built as the client's prefix W_C
is, and a head; personal, never averaged, and never sent. Each batch teaches it once the server's
answer is there, and without KD_G where the server is silent.
"""

from __future__ import annotations

import math
from copy import deepcopy
from functools import lru_cache

import torch
from torch import Tensor, nn

from edge_sdk.bundles.namespaces import AUXILIARY, Namespace
from edge_sdk.errors import ConfigurationError, FrameError
from edge_sdk.nets.supernet import Supernet
from edge_sdk.training.client.companion import Companion, OpenBatch
from edge_sdk.training.client.state import ClientState
from edge_sdk.training.formulas.distillation import kd_client, kd_global
from edge_sdk.training.formulas.evidence import evidential_losses, kl_weight_at
from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.protocol.plan import Distillation, Plan, network_of, optimiser_of
from edge_sdk.training.protocol.weights import load_weights, read_weights


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
        return AUXILIARY.prefixed(
            {
                Namespace(part).key(name): tensor
                for part, module in self.named_children()
                for name, tensor in read_weights(module).items()
            }
        )

    def load(self, personal: Weights) -> bool:
        """Take the weights kept among a client's personal ones, if they are there.

        Raises: FrameError where they do not fit: they were kept for another cut or network.
        """
        kept = AUXILIARY.select(personal)
        if kept:
            for part, module in self.named_children():
                load_weights(module, Namespace(part).select(kept))
        return bool(kept)


def build_auxiliary(plan: Plan) -> Auxiliary:
    """A new W_A with the weights of the plan's seed: those of the network, and a fresh linear.

    Raises: ConfigurationError for a plan without one, or a head its features do not allow.
    """
    return deepcopy(_template(plan))


class AuxiliaryTrainer(Companion):
    """Trains W_A with every batch of the round; the prefix does not notice.

    KD_G is learnt from the whole network's logits: those that the server returns or, where the last
    layer or the loss is on the client, those that the client sees itself.
    """

    learns_alone = True

    def __init__(self, state: ClientState, plan: Plan, number: int) -> None:
        self._distil = _distillation(plan)
        self._client = state.name
        self.model = build_auxiliary(plan).to(state.device)
        self.model.load(state.personal)
        self.model.train()
        self._parameters = list(self.model.parameters())
        self._optimiser = optimiser_of(plan, self._parameters)
        self._kl_weight = kl_weight_at(number, self._distil.anneal_rounds)

    def close(self, batch: OpenBatch) -> None:
        """One step of W_A on L_evid + lam_C * KD_C + lam_G * KD_G    Eq. 18

        KD_G is left out while nobody has said what the whole network answers.
        """
        how, answers = self._distil, batch.logits
        features = self.model.extractor(batch.x)
        logits = self.model.head(features)
        loss = evidential_losses(logits, batch.y, self._kl_weight).mean()
        if how.client_share:
            loss = loss + how.client_share * kd_client(features, batch.z.detach(), how.tau)
        if how.server_share and answers is not None:
            if answers.shape != logits.shape or not math.isfinite(float(answers.sum())):
                raise FrameError(
                    f"client {self._client}: feedback: expected finite outputs of shape"
                    f" {tuple(logits.shape)}, got shape {tuple(answers.shape)}"
                )
            loss = loss + how.server_share * kd_global(logits, answers, how.tau)
        gradients = torch.autograd.grad(loss, self._parameters)
        if math.isfinite(float(loss.detach())):  # a batch that is not must not spoil what is kept
            self._optimiser.step(gradients)

    def kept(self) -> Weights:
        """W_A."""
        return self.model.read()


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
