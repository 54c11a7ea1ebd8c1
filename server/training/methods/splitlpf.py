"""SplitLPF: a network split in three, the last layer personal, the average fair.
docs/methods/splitlpf.md; the paper's Alg. 1-3.

    client, front     z = f(x)                                           x, y never leave
    server, middle    e = S_k(z), this client's copy of the middle
    client, back      L = CE(b_k(dropout(e)), y);  b_k -= lr_k * dL/db_k    (Eq. 7)
    server, middle    S_k -= lr * dL/dS_k;  dL/dz goes back                 (Eq. 4)
    client, front     f -= lr * J_f^T dL/dz                                 (Eq. 6)
    aggregate         f and S by p_k, from data size and direction          (Eq. 8-11)

The client's lines are edge_sdk.training.client.personal_head. What comes up at the end of a round
may be coded as synthetic samples (Eq. 5): `[train] update_codec = "synthetic"`.

Differs: Algorithm 2 compares the backs' gradients. Backs are personal and have no average to be
compared with, so the fronts' are (docs/methods/splitlpf.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from edge_sdk.checks import check_value
from edge_sdk.training.protocol.client_part import ClientPart, PersonalBack
from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.protocol.weights import without_auxiliary
from profiles.checks import share
from server.training.core.memory import MemoryPart
from server.training.core.round_view import RoundView
from server.training.core.weighted_mean import Contributions, WeightRule
from server.training.methods.ask_clients import ask_clients
from server.training.methods.formulas.contribution import (
    ALPHA,
    contribution_weights,
    cosine,
    global_gradient,
    gradient_of,
)
from server.training.methods.method import Method

# the kind of memory that holds the last round's global gradient of the front
PREVIOUS: Final = "previous gradient"
# 10 honest clients, digits, 40 rounds: the sign alone takes the vote from 1.6 (IID) to 2.4 (UDS) of
# them a round, with this zone from 0.8 (docs/decisions/0027)
DEAD_ZONE: Final = 0.2
_BACK: Final = PersonalBack()  # the source of the defaults


def splitlpf(  # noqa: PLR0917 - the numbers of a recipe
    alpha: float = ALPHA,
    signed: bool = True,
    dead_zone: float = DEAD_ZONE,
    dropout: float = _BACK.dropout,
    back_rate: float | None = _BACK.learning_rate,
    follow_accuracy: bool = _BACK.follow_accuracy,
    refit_epochs: int = 0,
) -> Method:
    """The method.

    Args:
        alpha: 1 weighs clients by their samples alone, 0 by their direction alone.
        signed: keep the sign of Eq. 8's cosine; False is Eq. 9 as printed, with a `dead_zone` of 0.
        dead_zone: a smaller cosine, of either sign, counts as 0.
        dropout: before the personal layer; the paper does not state its share.
        back_rate: the personal layer's learning rate; None for `train.learning_rate`.
        follow_accuracy: lower that rate as a client's accuracy grows.
        refit_epochs: passes over a client's samples that train the personal layer behind the
            averaged network, before it answers; a test trains a copy.
    """
    back = PersonalBack(dropout, back_rate, follow_accuracy)
    return Method(
        "splitlpf",
        labels="derivable",
        client=ClientPart(back=back),
        server_step=ask_clients(),
        weigh=by_contribution(alpha, signed=signed, dead_zone=dead_zone),
        asks=("embeddings",),
        refit_epochs=refit_epochs,
    )


def by_contribution(
    alpha: float = ALPHA, *, signed: bool = True, dead_zone: float = DEAD_ZONE
) -> WeightRule:
    """Weights p_k by data size and by the direction of the front    Eq. 8-11

    The direction is compared with that of the last round.
    """
    check_value("alpha", alpha, share)
    check_value("dead_zone", dead_zone, share)

    def weigh(contributions: Contributions, now: RoundView) -> dict[str, float]:
        def gradients() -> Iterator[tuple[str, Weights]]:
            # one at a time: a round in cohorts has its updates on the disk
            for client, c in contributions.items():
                # of the front alone: an averaged auxiliary model is a network of its own
                yield client, without_auxiliary(gradient_of(now.sent, c.own), c.depth)

        previous = MemoryPart(now.memory, PREVIOUS)
        remembered = dict(previous)
        weights = contribution_weights(
            {client: c.update.samples for client, c in contributions.items()},
            {client: cosine(gradient, remembered) for client, gradient in gradients()},
            alpha,
            signed=signed,
            dead_zone=dead_zone,
        )
        average = global_gradient(gradients(), weights)
        previous.update(average)
        return weights

    return weigh
