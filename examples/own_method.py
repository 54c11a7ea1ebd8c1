"""A method of one's own: SplitFed that looks at hard samples, and at clients that lag behind.

The recipe `own_method.toml` names `own_method:focal_splitfed`. A method is a record of functions,
one for each seam; a seam that is left out is plain SplitFed's. docs/own-method.md lists the seams.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from edge_sdk.training.protocol.client_part import ClientPart
from server.training.core.round_view import RoundView
from server.training.core.server_state import ServerState
from server.training.core.weighted_mean import Contributions, by_samples
from server.training.methods.method import Method
from server.training.methods.steps import Answers, ClientBatches, per_client_step


def focal_splitfed(gamma: float = 1.0, power: float = 0.5, mu: float = 0.0) -> Method:
    """The method; with gamma 0, power 0 and mu 0 it is SplitFedV1.

    A recipe sets the arguments in `[method_numbers]`; types and names are checked.

    Args:
        gamma: how much less a sample counts that is already right. power: how much more a client
            counts whose loss is large. mu: pull of each prefix towards the start of the round.
    """
    return Method(
        "focal-splitfed",
        # the client's half is data, never code: devices get it with their plan
        client=ClientPart(prox_mu=mu),
        # the server's answer to the features of all participants of a step
        server_step=partial(focal_step, gamma=gamma),
        # how much each client counts when prefixes and the server's copies are averaged
        weigh=partial(by_loss, power=power),
    )


def focal_step(
    state: ServerState, batches: ClientBatches, _now: RoundView, *, gamma: float
) -> Answers:
    """Each client's batch steps that client's copy of the server's half, by the focal loss."""
    return per_client_step(state, batches, partial(focal_loss, gamma=gamma))


def focal_loss(_client: str, logits: Tensor, labels: Tensor, *, gamma: float) -> Tensor:
    """Mean over the batch of (1 - p)^gamma * -ln p, p the probability of the true class.

    Args:
        logits: (B, N). labels: (B,).
    """
    if not gamma:
        return nn.functional.cross_entropy(logits, labels)
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    return ((1 - torch.exp(-losses)) ** gamma * losses).mean()


def by_loss(contributions: Contributions, now: RoundView, *, power: float) -> dict[str, float]:
    """Weights n_k * L_k^power, scaled to sum 1; L_k is the client's mean loss in the round.

    Under `[privacy]` losses stay on the clients and come as 0: then weights are by samples.
    """
    votes = {
        name: each.update.samples * each.update.loss**power for name, each in contributions.items()
    }
    total = sum(votes.values())
    if not total:
        return by_samples(contributions, now)
    return {name: vote / total for name, vote in votes.items()}
