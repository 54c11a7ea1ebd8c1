"""FedAvg, FedProx and FedLC: every client trains the whole network, the server averages.

FedLC is of Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration",
ICML 2022, Eq. 6-7; docs/methods/fedlc.md. Its loss is edge_sdk.training.formulas.calibration:

    client      L = CE(s - tau * n^(-1/4), y)       n_c: its samples of class c
    server      weights averaged by n_k

Differs: the denominator has the true class too, and a class that a client lacks counts 1e-8
samples; both as in public code.

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


def fedlc(tau: float = 1.0) -> Method:
    """FedAvg with logits calibrated by the client's own label counts; tau 0 is FedAvg."""
    return _whole("fedlc", ClientPart(whole=True, calibration=tau))


def _whole(name: str, part: ClientPart) -> Method:
    return Method(name, labels="derivable", client=part, server_step=None)
