"""FedAvg and FedProx: every client trains the whole network, the server averages."""

from __future__ import annotations

from edge_sdk.training.plan import ClientPart
from server.training.method import Method


def fedavg() -> Method:
    """Weights averaged by n_k after local SGD."""
    return Method("fedavg", client=ClientPart(whole=True), server_step=None)


def fedprox(mu: float = 0.01) -> Method:
    """FedAvg with mu/2 * |w - w_round|^2 in the client's loss; mu 0 is FedAvg."""
    return Method("fedprox", client=ClientPart(whole=True, prox_mu=mu), server_step=None)
