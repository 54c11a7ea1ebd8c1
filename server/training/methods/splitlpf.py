"""SplitLPF: a network split in three, the last layer personal, the average fair.
docs/methods.md, SplitLPF; the paper's Alg. 1-3.

    client, front     z = f(x)                                           x, y never leave
    server, middle    e = S_k(z), this client's copy of the middle
    client, back      L = CE(b_k(dropout(e)), y);  b_k -= lr_k * dL/db_k    (Eq. 7)
    server, middle    S_k -= lr * dL/dS_k;  dL/dz goes back                 (Eq. 4)
    client, front     f -= lr * J_f^T dL/dz                                 (Eq. 6)
    aggregate         f and S by p_k, from data size and direction          (Eq. 8-11)

The client's lines are edge_sdk.training.client.personal_head. What comes up at the end of a round
may be coded as synthetic samples (Eq. 5): `[train] update_codec = "synthetic"`.

Differs: Algorithm 2 compares the backs' gradients. Backs are personal and have no average to be
compared with, so the fronts' are (docs/methods.md).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from edge_sdk.checks import check_value
from edge_sdk.nets.supernet import View
from edge_sdk.training.formulas.sgd import clip_l2
from edge_sdk.training.protocol.messages import Feedback, Weights
from edge_sdk.training.protocol.plan import ClientPart, PersonalBack
from profiles.checks import share
from server.training.core.round_view import RoundView
from server.training.core.server_state import BatchNormSnapshot, ServerState, Suffix
from server.training.core.weighted_mean import Contributions, WeightRule
from server.training.methods.formulas.contrastive import added
from server.training.methods.formulas.contribution import (
    ALPHA,
    contribution_weights,
    cosine,
    global_gradient,
    gradient_of,
)
from server.training.methods.method import Method
from server.training.methods.steps import Asking, ClientBatches

logger = logging.getLogger(__name__)

# where the last round's global gradient of the front is remembered
PREVIOUS: Final = "previous gradient/"
_BACK: Final = PersonalBack()  # whose numbers are the defaults


def splitlpf(
    alpha: float = ALPHA,
    signed: bool = True,
    dropout: float = _BACK.dropout,
    back_rate: float | None = _BACK.learning_rate,
    follow_accuracy: bool = _BACK.follow_accuracy,
) -> Method:
    """The method.

    Args:
        alpha: 1 weighs clients by their samples alone, 0 by their direction alone.
        signed: keep the sign of Eq. 8's cosine; False is Eq. 9 as printed.
        dropout: before the personal layer.
        back_rate: the personal layer's learning rate; None for `train.learning_rate`.
        follow_accuracy: lower that rate as a client's accuracy grows.
    """
    back = PersonalBack(dropout, back_rate, follow_accuracy)
    return Method(
        "splitlpf",
        labels="derivable",
        client=ClientPart(back=back),
        server_step=through_the_middle,
        weigh=by_contribution(alpha, signed=signed),
        asks=("embeddings",),
    )


def through_the_middle(state: ServerState, arrivals: ClientBatches, _now: RoundView) -> Asking:
    """Each client's features through its copy of the middle, and its gradient back through it."""
    under_way: dict[str, tuple[Suffix, BatchNormSnapshot, Tensor, Tensor | None, Tensor]] = {}
    for client, arrival in arrivals.items():
        middle = _middle(state.copy_for(client, arrival.depth))
        statistics = BatchNormSnapshot(middle.module)
        z, pairs = arrival.features.features.detach().requires_grad_(), arrival.pairs
        try:
            e = middle.module(z)
            first = None if pairs is None else middle.module(pairs.z)
            under_way[client] = middle, statistics, z, first, e
        except ValueError as err:  # BatchNorm, where one sample leaves one value per channel
            statistics.restore()
            logger.warning("client=%s gets no feedback: a batch of %d: %s", client, len(z), err)
    replies = yield {client: e.detach().contiguous() for client, (*_, e) in under_way.items()}
    feedback = {}
    for client, reply in replies.items():
        middle, statistics, z, first, e = under_way[client]
        gradient, *own = torch.autograd.grad(
            e, [z, *middle.parameters], reply.gradient, retain_graph=first is not None
        )
        sound = bool(torch.isfinite(gradient.sum()))
        pairs = arrivals[client].pairs
        if own and first is not None and pairs is not None:
            own = added(own, pairs.align.gradients(first, e, pairs.same, middle.parameters))
            sound = sound and all(bool(torch.isfinite(each.sum())) for each in own)
        if not sound or not statistics.sound:
            statistics.restore()
            logger.warning("client=%s gets no feedback: its gradient is not finite", client)
            continue
        if own:
            middle.step(clip_l2(own, state.clip))
        feedback[client] = Feedback(gradient.contiguous(), reply.loss)
    return feedback


def by_contribution(alpha: float = ALPHA, *, signed: bool = True) -> WeightRule:
    """p_k by data size and by the direction of the front against the last round's    Eq. 8-11"""
    check_value("alpha", alpha, share)

    def weigh(contributions: Contributions, now: RoundView) -> dict[str, float]:
        def gradients() -> Iterator[tuple[str, Weights]]:
            # one at a time: a round in cohorts has its updates on the disk
            for client, c in contributions.items():
                yield client, gradient_of(now.sent, c.own)

        previous = {
            name.removeprefix(PREVIOUS): tensor
            for name, tensor in now.memory.items()
            if name.startswith(PREVIOUS)
        }
        weights = contribution_weights(
            {client: c.update.samples for client, c in contributions.items()},
            {client: cosine(gradient, previous) for client, gradient in gradients()},
            alpha,
            signed=signed,
        )
        average = global_gradient(gradients(), weights)
        now.memory |= {PREVIOUS + name: tensor for name, tensor in average.items()}
        return weights

    return weigh


def _middle(suffix: Suffix) -> Suffix:
    """A copy of the server's half without its classifier, which clients have of their own."""
    assert isinstance(suffix.module, View), "a suffix is a view of the network"
    neck = suffix.module.neck
    return Suffix(neck, list(neck.parameters()), suffix.optimiser)
