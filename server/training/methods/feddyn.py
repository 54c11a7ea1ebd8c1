"""FedDyn: regularisation that follows each client's gradient. docs/methods/feddyn.md

Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1:

    client      theta_k = argmin of L_k(theta) - <g_k, theta> + a/2 * |theta - theta_t|^2
                g_k    <- g_k - a * (theta_k - theta_t)                   kept, never sent
    server      h      <- h - a/m * sum over the participants of (theta_k - theta_t)
                theta   = mean over the participants of theta_k - h/a

m counts all clients. The client's lines are edge_sdk.training.client.prefix.

Differs: the minimum is approached by the plan's SGD, as in the authors' code. BatchNorm's
statistics are averaged and not corrected. The sum over the participants is taken from their merged
mean, so a robust merge guards h too. Clients that stay away keep their g_k. A client commits g_k
when it sends its update, before that counts: an update that is lost, refused, clipped, noised or
coded with loss leaves g_k and h apart for good. Recipes by which updates may count late (`buffer`,
`staleness_max`) are refused.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import torch

from edge_sdk.training.protocol.client_part import ClientPart
from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.protocol.weights import is_statistic
from server.training.core.memory import MemoryPart
from server.training.core.round_view import RoundView
from server.training.core.weighted_mean import equal
from server.training.methods.method import Method

ALPHA: Final = 0.01
# the kind of memory that holds h
SERVER: Final = "server gradient"


def feddyn(alpha: float = ALPHA) -> Method:
    """The method; alpha 0 is FedAvg with equal weights.

    Args:
        alpha: a; the authors try 0.1, 0.01 and 0.001.
    """
    return Method(
        "feddyn",
        labels="derivable",
        client=ClientPart(whole=True, dynamic=alpha),
        server_step=None,
        weigh=equal,
        correct=partial(corrected, alpha=alpha) if alpha else None,
    )


def corrected(average: Weights, participants: int, now: RoundView, *, alpha: float) -> Weights:
    """The average less h/a, with h brought up to this round; h is in the view's memory."""
    memory, share = MemoryPart(now.memory, SERVER), participants / len(now.plans)
    weights = dict(average)
    for name, tensor in average.items():
        if name.startswith("exit") or is_statistic(name):
            continue  # nobody trains it, or no gradient changes it
        before = memory.get(name, torch.zeros_like(tensor))
        memory[name] = before - alpha * share * (tensor - now.sent[name])
        weights[name] = tensor - memory[name] / alpha
    return weights
