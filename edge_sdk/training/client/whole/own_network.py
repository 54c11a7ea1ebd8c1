"""A whole network of the client's own, next to the one that is averaged.    Ditto, Alg. 1

    v -= lr * (dF(v) + lambda * (v - w))        w: the average at the start of the round

Ours: v takes the same batches as the averaged network, in the same order, and its BatchNorm keeps
statistics of its own.
"""

from __future__ import annotations

import torch
from torch import nn

from edge_sdk.bundles.namespaces import OWN
from edge_sdk.nets.copying import copy_module
from edge_sdk.training.client.companion import Companion, OpenBatch
from edge_sdk.training.client.optimiser import optimiser_of
from edge_sdk.training.client.state import ClientState
from edge_sdk.training.client.whole.last_layer import with_last_layer
from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.weights import load_weights, read_weights


class OwnNetwork(Companion):
    """Trains v with every batch of the round; the averaged network learns the same without it.

    Args:
        sent: the whole network, as the server sent it.
    """

    def __init__(self, state: ClientState, plan: Plan, sent: Weights) -> None:
        strength = plan.part.own_network
        assert strength is not None, "the plan asks for a network of the client's own"
        self._strength = strength
        sent = with_last_layer(sent, plan, state.personal) if plan.part.own_head else sent
        self._module = copy_module(network_of(plan).segment(0, None)).to(state.device)
        load_weights(self._module, sent)
        self._parameters = list(self._module.parameters())
        self._start = [parameter.detach().clone() for parameter in self._parameters]
        load_own(self._module, state.personal)
        self._module.train()
        self._optimiser = optimiser_of(plan, self._parameters)

    def close(self, batch: OpenBatch) -> None:
        """One step of v on cross-entropy + lambda/2 * |v - w|^2."""
        loss = nn.functional.cross_entropy(self._module(batch.x), batch.y)
        gradients = [
            gradient + self._strength * (parameter.detach() - start)
            for gradient, parameter, start in zip(
                torch.autograd.grad(loss, self._parameters),
                self._parameters,
                self._start,
                strict=True,
            )
        ]
        self._optimiser.step(gradients)

    def kept(self) -> Weights:
        """V for the client's next round."""
        return OWN.prefixed(read_weights(self._module))


def load_own(module: nn.Module, personal: Weights) -> bool:
    """Load a client's own network from its personal weights; whether it has one.

    Raises: FrameError if they are of another network.
    """
    own = OWN.select(personal)
    if own:
        load_weights(module, own)
    return bool(own)
