"""Networks and last layers that clients keep to themselves, as they answer.

The last layer is SplitLPF's (3.2) and FedPer's, the whole network Ditto's.
"""

from __future__ import annotations

from copy import deepcopy

from torch import nn

from edge_sdk.training.client.fine_tuning import refitted_back
from edge_sdk.training.client.personal_head import personal_classifier
from edge_sdk.training.client.whole.own_network import load_own
from server.training.run.run import Simulation


def own_back(run: Simulation, name: str) -> nn.Linear:
    """A client's own last layer, refitted behind the averaged network where the method does so.

    Neither the client's weights nor the run's change. Before its first round a client has the layer
    of the seed.
    """
    plan, client = run.last_plan(name), run.clients[name]
    if plan.part.back is None or not run.method.refit_epochs:
        return personal_classifier(plan, client.personal).to(run.device)
    return refitted_back(client, plan, base_of(run, plan.depth), run.method.refit_epochs)


def own_network(run: Simulation, name: str) -> nn.Module:
    """A client's own whole network, a copy; the average before its first round."""
    net = deepcopy(run.state.net.segment(0, None))
    load_own(net, run.clients[name].personal)
    return net


def base_of(run: Simulation, depth: int) -> nn.Module:
    """The averaged network up to the embeddings, cut at that depth: (B, ...) raw inputs to (B, E).

    It shares its parts with the run's networks.
    """
    if run.method.client.whole:
        return run.state.net.segment(0, None).neck
    return nn.Sequential(run.state.net.prefix(depth), run.state.trunk.suffix(depth).neck)
