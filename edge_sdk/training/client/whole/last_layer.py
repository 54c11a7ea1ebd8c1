"""The last layer of a client that trains the whole network and keeps that layer.    FedPer"""

from __future__ import annotations

from torch import nn

from edge_sdk.bundles.namespaces import BACK
from edge_sdk.training.client.personal_head import personal_classifier
from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.protocol.plan import Plan, network_of, without_last_layer
from edge_sdk.training.protocol.weights import load_weights, read_weights


def with_last_layer(weights: Weights, plan: Plan, personal: Weights) -> Weights:
    """The stages that the server sent, with the client's own last layer, by their names in the net.

    Args:
        personal: the client's personal weights; before its first round it takes the layer of the
            plan's seed.
    """
    mark = network_of(plan).segment(0, None).classifier_prefix
    own = read_weights(personal_classifier(plan, personal))
    return weights | {f"{mark}{name}": tensor for name, tensor in own.items()}


def split_last_layer(weights: Weights, plan: Plan) -> tuple[Weights, Weights]:
    """The tensors that a client sends of its whole network, and its last layer as it keeps it."""
    sent = without_last_layer(weights, plan)
    mark = network_of(plan).segment(0, None).classifier_prefix
    own = {name.removeprefix(mark): t for name, t in weights.items() if name not in sent}
    return sent, BACK.prefixed(own)


def load_whole(module: nn.Module, plan: Plan, sent: Weights, personal: Weights) -> None:
    """Load the whole network as a client uses it: the server's, with what is the client's own.

    Args:
        sent: the average, from the server.
    Raises: FrameError if the weights are of another network.
    """
    load_weights(module, with_last_layer(sent, plan, personal) if plan.part.own_head else sent)
