"""SplitFed, and its variants with exit heads: the prefix on the client, the suffix on the server.

SplitFed's seams are neutral. Multi-exit and SplitGP minimise one objective on both sides:

    g * Lc + (1 - g) * Ls        g = exit_share; SplitGP, and HARMONY's Eq. 1-2
    exit head  steps by g * dLc
    server     steps by (1 - g) * dLs, each client's copy
    prefix     steps by g * dLc + (1 - g) * dLs
      no reply   exit head and prefix step by dLc, as HARMONY's and SuperSFL's do
"""

from __future__ import annotations

from edge_sdk.training.protocol.client_part import ClientPart
from server.training.methods.method import Method
from server.training.methods.steps import PerClient, concatenated, per_client, shared


def splitfed_v1() -> Method:
    """A copy of the suffix for each client, averaged by n_k after the round."""
    return Method("splitfed-v1", server_step=per_client)


def splitfed_v2() -> Method:
    """One suffix, stepped by the clients' batches one after another."""
    return Method("splitfed-v2", server_step=shared)


def minibatch() -> Method:
    """Minibatch-SFL: one suffix, one step over all participants' features (SCALA unadjusted)."""
    return Method("minibatch-sfl", server_step=concatenated)


def multi_exit(exit_share: float = 0.5) -> Method:
    """SplitFedV1 with exit heads, on g * Lc + (1 - g) * Ls; SplitGP with lambda 0."""
    part = ClientPart(exit_head=True, fusion="fixed", exit_share=exit_share)
    step = PerClient(1 - part.exit_share)
    return Method("multi-exit", client=part, server_step=step, share_exits=True)


def splitgp(
    personal_share: float = 0.2,
    exit_share: float = 0.5,
    finetune_steps: int = 0,
    finetune_rate: float | None = None,
) -> Method:
    """Personal models that carry over rounds as lambda * own + (1 - lambda) * average.

    Args:
        personal_share: lambda. exit_share: g.
        finetune_steps, finetune_rate: SplitGP + FT of HARMONY's tables; the clients' own rate
            where None.
    """
    part = ClientPart(
        exit_head=True, fusion="fixed", exit_share=exit_share, personal_share=personal_share
    )
    return Method(
        "splitgp",
        client=part,
        server_step=PerClient(1 - part.exit_share),
        share_exits=True,
        finetune_steps=finetune_steps,
        finetune_rate=finetune_rate,
    )
