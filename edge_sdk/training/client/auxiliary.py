"""The auxiliary model: a small model that answers on the device.    BESplit, 4.3

The auxiliary model W_A is an extractor of the same form as the client's prefix W_C, and a head. It
learns from each batch after the server's feedback, and without KD_G if there is none. The server
averages it over the clients of a cut, or it is the client's own: never averaged, never sent
(`Distillation.averaged`). An averaged one travels with its client's update, and an update of a
round in which the server answered no batch brings nothing: what it learnt there is lost.
"""

from __future__ import annotations

import math
from copy import deepcopy
from functools import lru_cache

import torch
from torch import Tensor, nn

from edge_sdk.bundles import namespaces
from edge_sdk.bundles.namespaces import AUXILIARY, Namespace
from edge_sdk.errors import ConfigurationError, FrameError
from edge_sdk.nets.supernet import Supernet
from edge_sdk.training.client.companion import Companion, OpenBatch
from edge_sdk.training.client.optimiser import optimiser_of
from edge_sdk.training.client.state import ClientState
from edge_sdk.training.formulas.distillation import kd_client, kd_global
from edge_sdk.training.formulas.evidence import evidential_losses
from edge_sdk.training.protocol.client_part import AuxiliaryHead, Distillation
from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.weights import contiguous_copy, load_weights, tensors_of


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

    def tensors(self) -> Weights:
        """The live tensors that travel, by `extractor.…` and `head.…`."""
        return {
            Namespace(part).key(name): tensor
            for part, module in self.named_children()
            for name, tensor in tensors_of(module).items()
        }

    def read(self, namespace: Namespace = AUXILIARY) -> Weights:
        """Contiguous copies of the weights, by the keys under which a client keeps them.

        Args:
            namespace: of the keys; that of the cut for a W_A that is averaged.
        """
        return namespace.prefixed({n: contiguous_copy(t) for n, t in self.tensors().items()})

    def load(self, weights: Weights, namespace: Namespace = AUXILIARY) -> bool:
        """Load W_A from weights that have it under the keys of `read`.

        Returns: whether they have a W_A.
        Raises: FrameError if the W_A is of another cut or network.
        """
        kept = namespace.select(weights)
        if kept:
            for part, module in self.named_children():
                load_weights(module, Namespace(part).select(kept))
        return bool(kept)


def build_auxiliary(plan: Plan) -> Auxiliary:
    """A new W_A, with weights drawn from the plan's seed.

    Raises: ConfigurationError for a plan without an auxiliary model, and for features that the
        plan's head cannot pool.
    """
    return deepcopy(_template(plan))


class AuxiliaryTrainer(Companion):
    """Trains W_A with every batch of the round; the prefix learns the same as without it.

    KD_G needs the logits of the whole network. The server returns them or, where the client answers
    the server's outputs, the client knows them already.

    Args:
        number: of the round. sent: weights that the server sent; with W_A where it averages it.
    """

    learns_alone = True

    def __init__(self, state: ClientState, plan: Plan, number: int, sent: Weights) -> None:
        self._distil = _distillation(plan)
        self._client = state.name
        self.model = build_auxiliary(plan).to(state.device)
        self._namespace = namespace_of(plan)
        self.model.load(sent if self._distil.averaged else state.personal, self._namespace)
        self.model.train()
        self._parameters = list(self.model.parameters())
        self._optimiser = optimiser_of(plan, self._parameters)
        self._number = number

    def close(self, batch: OpenBatch) -> None:
        """One step of W_A on L_evid + lam_C * KD_C + lam_G * KD_G    Eq. 18

        KD_G is left out where the logits of the whole network are not known.
        """
        how, answers = self._distil, batch.logits
        features = self.model.extractor(batch.x)
        logits = self.model.head(features)
        evidence = how.loss
        kl_weight = evidence.kl_weight(self._number)
        loss = evidential_losses(logits, batch.y, kl_weight, evidence.activation).mean()
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
        if math.isfinite(float(loss.detach())):  # else the batch would spoil the kept weights
            self._optimiser.step(gradients)

    def kept(self) -> Weights:
        """W_A, where it is the client's own."""
        return {} if self._distil.averaged else self.model.read()

    def sent(self) -> Weights:
        """W_A, where the server averages it."""
        return self.model.read(self._namespace) if self._distil.averaged else {}


def namespace_of(plan: Plan) -> Namespace:
    """The namespace under which the plan's W_A is kept, or travels where it is averaged."""
    return namespaces.auxiliary(plan.depth) if _distillation(plan).averaged else AUXILIARY


@lru_cache(maxsize=8)
def _template(plan: Plan) -> Auxiliary:
    return auxiliary_of(network_of(plan), plan.depth, _distillation(plan).head, plan.seed)


def auxiliary_of(net: Supernet, depth: int, head: AuxiliaryHead, seed: int) -> Auxiliary:
    """A W_A for a cut: a copy of the prefix as it is, and a head of that form.

    Args:
        seed: of the weights of a `global` head; an `exit` head is a copy of the network's.
    Raises: ConfigurationError for features that the head cannot pool.
    """
    extractor = deepcopy(net.prefix(depth))
    if head == "exit":
        return Auxiliary(extractor, deepcopy(net.exit_head(depth)))
    return Auxiliary(extractor, _global_head(net, depth, seed))


def _global_head(net: Supernet, depth: int, seed: int) -> nn.Sequential:
    """Global average pool and linear layer, whatever form the network's exit heads have."""
    channels, *sides = net.shape_at(depth)
    pools = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d}
    own = [part for part in net.exit_head(depth).modules() if isinstance(part, nn.Linear)]
    tokens = len(sides) + 1 != len(net.input_shape)
    if tokens or len(sides) not in pools or own[-1].in_features % channels:
        raise ConfigurationError(
            f"{net.name}: expected distil head exit, because its features are no maps to pool over"
        )
    linear = nn.Linear(channels, net.classes, device="meta").to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    bound = 1 / math.sqrt(channels)  # torch's bound for a linear layer; the seed is the plan's
    nn.init.uniform_(linear.weight, -bound, bound, generator=generator)
    nn.init.uniform_(linear.bias, -bound, bound, generator=generator)
    return nn.Sequential(pools[len(sides)](1), nn.Flatten(), linear)


def _distillation(plan: Plan) -> Distillation:
    if plan.part.distil is None:
        raise ConfigurationError("auxiliary model: expected a plan with distil, got one without")
    return plan.part.distil
