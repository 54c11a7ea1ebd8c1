"""The stages that a client trains in a round: everything up to the cut, or the whole network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from edge_sdk.bundles.namespaces import DYNAMIC
from edge_sdk.errors import FrameError
from edge_sdk.nets.copying import copy_module
from edge_sdk.nets.supernet import View
from edge_sdk.training.client.optimiser import optimiser_of
from edge_sdk.training.client.state import ClientState
from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.protocol.noise import clip_samples
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.weights import check_weights, load_weights


class Prefix:
    """A copy of the plan's stages, with an optimiser.

    Args:
        weights: of the stages, at the start of the round.

    Attributes:
        module: raw input (B, ...) to smashed data, in train mode; in eval mode where it is frozen.
    """

    def __init__(self, state: ClientState, plan: Plan, weights: Weights) -> None:
        net, part = network_of(plan), plan.part
        stages = net.segment(0, None) if part.whole else net.prefix(plan.depth)
        self.module: View = copy_module(stages).to(state.device)
        load_weights(self.module, weights)
        # a frozen BatchNorm uses its running statistics and does not move them
        self.module.train(not part.frozen)
        self.parameters = list(self.module.parameters())
        self._optimiser = optimiser_of(plan, self.parameters)
        self._client = state.name
        self._clip = None if part.whole or part.noise is None else part.noise.feature_clip
        self._frozen = part.frozen
        self._pull = part.prox_mu + part.dynamic
        self._start = [p.detach().clone() for p in self.parameters] if self._pull else []
        self._dynamic = part.dynamic
        self._linear = self._kept_linear(state.personal) if part.dynamic else {}

    def run(self, x: Tensor, module: nn.Module | None = None) -> Tensor:
        """Smashed data of a batch; each sample is clipped where the plan limits its norm.

        Args:
            module: a copy of the prefix to use in its place.
        Raises: FrameError for a batch that BatchNorm cannot train on.
        """
        try:
            z: Tensor = (self.module if module is None else module)(x)
        except ValueError as err:  # BatchNorm, where one sample leaves one value per channel
            raise FrameError(
                f"client {self._client}: a batch of {len(x)} cannot be trained: {err};"
                ' give it more samples or build the network with norm = "group"'
            ) from err
        return z if self._clip is None else clip_samples(z, self._clip)

    def step(self, gradients: Sequence[Tensor]) -> None:
        """One optimiser step, none where the prefix is frozen.

        With FedProx, the gradient of mu/2 * |w - w_start|^2 is added; with FedDyn that of
        -<g, w> + alpha/2 * |w - w_start|^2.
        """
        if self._frozen:
            return
        if self._start:
            gradients = [
                gradient + self._pull * (parameter.detach() - start)
                for gradient, parameter, start in zip(
                    gradients, self.parameters, self._start, strict=True
                )
            ]
        if self._linear:
            linear = self._linear.values()
            gradients = [g - own for g, own in zip(gradients, linear, strict=True)]
        self._optimiser.step(gradients)

    def kept(self) -> Weights:
        """FedDyn's g for the client's next round: g - alpha * (w - w_start)."""
        if not self._dynamic:
            return {}
        return DYNAMIC.prefixed(
            {
                name: linear - self._dynamic * (parameter.detach() - start)
                for (name, linear), parameter, start in zip(
                    self._linear.items(), self.parameters, self._start, strict=True
                )
            }
        )

    def _kept_linear(self, personal: Weights) -> Weights:
        """g as the client keeps it, by parameter; zeros before its first round.

        Raises: FrameError if it is of another network.
        """
        named = {n: torch.zeros_like(p) for n, p in self.module.named_parameters()}
        kept = DYNAMIC.select(personal)
        if not kept:
            return named
        check_weights(kept, named)
        return {name: kept[name] for name in named}
