"""SCALA: concatenated activations and logit adjustments. The paper's Alg. 1; docs/methods/scala.md.

    start              B_k = max(1, floor(B * n_k / sum n_j)) for the participants         (Eq. 3)
    each of T iterations
      clients          z_k = f_k(x_k) of B_k samples; z_k and y_k go up                    (Eq. 4)
      server           s = S([z_1, ..., z_K]), one forward
                       g_k = d/dz_k of the mean over k's of CE(s + ln P_k, y)             (Eq. 13)
                       S steps by the mean over all of CE(s + ln P_s, y)              (Eq. 5, 12)
      clients          f_k steps by g_k taken back through f_k, of norm 10 at most      (Eq. 6-7)
        missed         left out of this concatenation and of its P_s, back at the next
    aggregate          prefixes by n_k                                                     (Eq. 8)

P_k is the share of each label in all of k's data, P_s their mean by n_k over the clients present.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from edge_sdk.checks import check_value
from edge_sdk.errors import ConfigurationError
from edge_sdk.training.protocol.client_part import ClientPart, Inversion
from edge_sdk.training.protocol.messages import Feedback
from profiles.checks import number, one_of
from server.training.core.round_view import RoundView
from server.training.core.server_state import ServerState
from server.training.methods.formulas.adjustment import (
    LEAST_SHARE,
    adjusted_losses,
    adjustment,
    joint_share,
    label_share,
)
from server.training.methods.formulas.batch_share import proportional
from server.training.methods.method import Method
from server.training.methods.steps import (
    ClientBatches,
    ClientLoss,
    Joint,
    ServerStep,
    concatenated,
    joint_step,
    per_client,
    per_client_step,
    shared,
    shared_step,
)

CLIP: Final = 10.0  # inferred, for clients and server alike: the paper's settings are lost
Adjust = Literal["both", "local", "none"]
ADJUSTS: Final = get_args(Adjust)
Server = Literal["joint", "copies", "in_turn"]
SERVERS: Final = get_args(Server)
# a share of labels, (N,), to what is added to the logits, (N,)
Added = Callable[[Tensor], Tensor]
EachStep = Callable[[ServerState, ClientBatches, ClientLoss], dict[str, Feedback]]


def scala(
    adjust: Adjust = "both",
    *,
    server: Server = "joint",
    share_batches: bool = True,
    clip: float = CLIP,
    strength: float = 1.0,
    least_share: float = LEAST_SHARE,
    bottleneck: int | None = None,
    inversion: float = 0.0,
) -> Method:
    """The method, its ablations and its privacy-enhanced variant.

    Args:
        adjust: the losses with adjusted logits: `both` the server's and the clients', `local` the
            clients' alone, `none` neither, which is Minibatch-SFL in shared-out batches.
        server: `joint` sees all activations together; `copies` has a copy of the suffix for each
            client, as SplitFedV1 (with `local` the paper's LLA-SFL); `in_turn` has one that each
            client's batch steps, as SplitFedV2 and SuperSFL (ours).
        clip: largest L2 norm of the gradient by which a client's prefix steps; `inf` for no limit.
            The server's own limit is `server_clip` of the training.
        share_batches: whether the participants share one batch out; if not, each has its own.
        strength, least_share: of the adjustment: strength * ln(max(P, least_share)) is added.
        bottleneck: channels to which the cut is narrowed, 8 in the paper's variant; None leaves it.
        inversion: weight of the clients' guard against inversion, 0.3 in the paper's variant; 0
            for none.
    """
    check_value("adjust", adjust, one_of(ADJUSTS))
    check_value("server", server, one_of(SERVERS))
    check_value("strength", strength, number(least=0))
    check_value("least_share", least_share, number(above=0, most=1))
    if adjust == "both" and server != "joint":
        raise ConfigurationError(
            "adjust: expected local or none where nothing is concatenated: there is no joint"
            " distribution of labels to adjust by"
        )
    added = partial(adjustment, strength=strength, least=least_share)
    steps: dict[Server, ServerStep] = {
        "joint": concatenated,
        "copies": per_client,
        "in_turn": shared,
    }
    each = per_client_step if server == "copies" else shared_step
    apart = partial(_apart, step=each, added=added)
    joint = partial(_joint, server=adjust == "both", added=added)
    adjusted = joint if server == "joint" else apart
    return Method(
        "scala",
        client=ClientPart(
            clip=clip,
            bottleneck=bottleneck,
            inversion=Inversion(weight=inversion) if inversion else None,
        ),
        server_step=steps[server] if adjust == "none" else adjusted,
        batch_share=proportional if share_batches else None,
    )


def _joint(
    state: ServerState, batches: ClientBatches, now: RoundView, *, server: bool, added: Added
) -> dict[str, Feedback]:
    """Eq. 12-13 over the participants that are there."""
    shares = _shares(batches, now, state.net.classes)

    def losses(joint: Joint) -> tuple[Tensor, Tensor]:
        sizes = torch.tensor(joint.sizes)
        local = torch.stack([added(shares[client]) for client in joint.clients])
        of_clients = adjusted_losses(joint.logits, joint.labels, local.repeat_interleave(sizes, 0))
        of_all = added(joint_share(shares, now.samples)) if server else None
        return of_clients, adjusted_losses(joint.logits, joint.labels, of_all)

    return joint_step(state, batches, losses)


def _apart(
    state: ServerState,
    batches: ClientBatches,
    now: RoundView,
    *,
    step: EachStep,
    added: Added,
) -> dict[str, Feedback]:
    """Eq. 13 for each client by itself, on both sides."""
    shares = _shares(batches, now, state.net.classes)

    def loss(client: str, logits: Tensor, labels: Tensor) -> Tensor:
        return adjusted_losses(logits, labels, added(shares[client])).mean()

    return step(state, batches, loss)


def _shares(batches: ClientBatches, now: RoundView, classes: int) -> dict[str, Tensor]:
    """P_k of those present; all labels alike of one that does not say."""
    silent = (0,) * classes
    return {client: label_share(now.label_counts.get(client) or silent) for client in batches}
