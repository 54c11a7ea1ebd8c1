"""Gradient fusion: a client joins its own gradient of the prefix with the server's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edge_sdk.training.protocol.plan import Plan

EPS = 1e-8


def client_weight(plan: Plan, stages: int, own_loss: float, server_loss: float) -> float:
    """w_c, the weight of the client's own gradient; the server's is 1 - w_c.

    tpgf      d/L * (Lc+eps)^-1 / ((Lc+eps)^-1 + (Ls+eps)^-1)    SuperSFL, Eq. 3
    no_loss   d/L                                                 SuperSFL, Fig. 6
    no_depth  Ls / (Lc + Ls)                                      SuperSFL, Fig. 6
    equal     1/2                                                 SuperSFL, Fig. 6
    fixed     gamma                                               HARMONY, Eq. 1-2; SplitGP
    server    0                                                   SplitFed

    Differs: SuperSFL's prose has the depth term the other way round; Eq. 3 is followed.

    Args:
        stages: L. own_loss, server_loss: Lc and Ls, nats, at least 0.
    """
    depth = plan.depth / stages
    # (Lc+eps)^-1 / ((Lc+eps)^-1 + (Ls+eps)^-1), without dividing by tiny numbers
    by_loss = (server_loss + EPS) / (own_loss + server_loss + 2 * EPS)
    match plan.part.fusion:
        case "tpgf":
            return depth * by_loss
        case "no_loss":
            return depth
        case "no_depth":
            return by_loss
        case "equal":
            return 0.5
        case "fixed":
            return plan.part.exit_share
        case "server":
            return 0.0


def fuse(own: Sequence[Tensor], servers: Sequence[Tensor], own_share: float) -> list[Tensor]:
    """w_c * g_c + (1 - w_c) * g_s, parameter by parameter.    SuperSFL, Eq. 4"""
    return [torch.lerp(theirs, mine, own_share) for mine, theirs in zip(own, servers, strict=True)]
