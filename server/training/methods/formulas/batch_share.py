"""Shares of the clients in a joint batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from server.training.core.round_view import RoundView

# n_k by participant, the plan's batch and the round, to the batch of each participant
BatchShare = Callable[[Mapping[str, int], int, RoundView], Mapping[str, int]]


def proportional(samples: Mapping[str, int], batch: int, _now: RoundView) -> dict[str, int]:
    """Batches in proportion to the clients' samples.

    B_k = max(1, floor(B * n_k / sum n_j))    SCALA, Eq. 3

    Every client is through its data after the same number of steps.

    Differs: at least 1, so that a small client among large ones is heard; with fewer samples in B
    than clients the joint batch is therefore larger than B.

    Args:
        samples: n_k by client, each at least 1. batch: B, of all clients together.
    """
    total = sum(samples.values())
    return {client: max(1, batch * count // total) for client, count in samples.items()}
