"""FedPer and Ditto: clients that train the whole network, and keep a part or a copy of it.
docs/methods/fedper.md, docs/methods/ditto.md

FedPer: Arivazhagan et al., "Federated Learning with Personalization Layers", 2019, Algorithms 1-2:

    client      SGD on base and last layer together; the last layer never leaves the client
    server      base layers averaged by n_k

Differs: the paper tries one to four personal blocks; here the last linear layer is personal, which
is what SplitLPF compares with.

Ditto: Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021,
Algorithm 1:

    client      w_k by SGD on F_k from w_t;   v_k <- v_k - lr * (dF_k(v_k) + lambda * (v_k - w_t))
    server      w averaged by n_k;  v_k stays on its client and answers there

Differs: v_k takes as many steps as w_k, on the same batches; it starts from the average of the
client's first round. The client's lines are edge_sdk.training.client.whole.
"""

from __future__ import annotations

from edge_sdk.training.protocol.client_part import ClientPart
from server.training.methods.method import Method


def fedper() -> Method:
    """FedAvg but for the last layer, which each client keeps."""
    return _whole("fedper", ClientPart(whole=True, own_head=True))


def ditto(strength: float = 0.1) -> Method:
    """FedAvg, and next to it a network of each client's own.

    Args:
        strength: lambda, the pull of a client's network towards the average; 0 trains it alone.
    """
    return _whole("ditto", ClientPart(whole=True, own_network=strength))


def _whole(name: str, part: ClientPart) -> Method:
    return Method(name, labels="derivable", client=part, server_step=None)
