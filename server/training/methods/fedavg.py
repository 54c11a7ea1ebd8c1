"""FedAvg and FedProx: every client trains the whole network, the server averages.

Labels are not sent; an update's change of the last layer still tells which a client has.
"""

from __future__ import annotations

from edge_sdk.training.protocol.client_part import ClientPart
from server.training.methods.method import Method


def fedavg() -> Method:
    """Weights averaged by n_k after local SGD."""
    return _whole("fedavg", ClientPart(whole=True))


def fedprox(mu: float = 0.01) -> Method:
    """FedAvg with mu/2 * |w - w_round|^2 in the client's loss; mu 0 is FedAvg."""
    return _whole("fedprox", ClientPart(whole=True, prox_mu=mu))


def _whole(name: str, part: ClientPart) -> Method:
    return Method(name, labels="derivable", client=part, server_step=None)
