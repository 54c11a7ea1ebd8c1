"""SuperSFL: a weight-sharing super-network, three-phase gradient fusion, a client that goes on
without its server. docs/methods/supersfl.md; the paper's Alg. 1-3.

    allocate (Eq. 1)      profiles.supersfl_depth, once, before training
    client, forward       z = f(x);  Lc = CE(h(z), y);  g_c = clip(dLc/df, 0.5);  step h
    server                Ls = CE(S_d(z), y);  step stages d+1..L and head, in client order
    client, backward      g_s = J_f^T dLs/dz;  f -= lr * (w_c * g_c + (1 - w_c) * g_s)   (Eq. 2-4)
       no reply           f -= lr * g_c                                                  (Alg. 3)
    aggregate             per layer, by depth and loss, the server's vote lambda         (Eq. 6-8)
"""

from __future__ import annotations

from typing import Final, Literal

from edge_sdk.training.protocol.client_part import ClientPart
from server.training.core.weighted_mean import by_depth_and_loss, normalised
from server.training.methods.method import Method
from server.training.methods.steps import shared

CLIP: Final = 0.5
SERVER_WEIGHT: Final = 0.01


def supersfl(
    fusion: Literal["tpgf", "no_loss", "no_depth", "equal"] = "tpgf",
    server_weight: float = SERVER_WEIGHT,
    normalise_weights: bool = False,
    clip: float = CLIP,
    share_exits: bool = False,
) -> Method:
    """The method, or one of the ablations of its Fig. 6 by `fusion`.

    Args:
        server_weight: lambda.
        normalise_weights: scale Eq. 6 to sum 1 before lambda joins; False is literal.
        share_exits: have the server hold the exit heads too, merged by Eq. 8 among the clients of
            one depth and without lambda, so that it can deploy them (docs/decisions/0007).
            Differs: the paper's heads never leave their clients, which is False.
    """
    part = ClientPart(exit_head=True, fusion=fusion, clip=clip)
    return Method(
        "supersfl",
        client=part,
        server_step=shared,
        weigh=normalised(by_depth_and_loss) if normalise_weights else by_depth_and_loss,
        server_weight=server_weight,
        share_exits=share_exits,
    )
