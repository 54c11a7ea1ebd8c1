"""Bias-compensated collaboration: biased clients, their pairs, and how many samples they exchange.
BESplit, 4.2 and D.2.

All of it is arithmetic on label shares P (N,) float64; what moves is the server step's business.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Final

import torch
from torch import Tensor

# reductions of L1 norms of a few float64 shares: below this, rounding
NOTHING: Final = 1e-12

Pair = tuple[str, str]


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence of two label shares.

    JS(p, q) = (KL(p || m) + KL(q || m)) / 2, m = (p + q) / 2, in nats: from 0 to ln 2.

    Args:
        p, q: (..., N), each sums to 1; 0 ln 0 is 0.
    """
    middle = (p + q) / 2
    return (_kl(p, middle) + _kl(q, middle)) / 2


def biased_clients(shares: Mapping[str, Tensor], overall: Tensor) -> list[str]:
    """Clients with a divergence from P_g above the largest gap in the sorted ones.    Eq. 11

    Args:
        shares: P_k of every client there is a record of. overall: P_g.
    Returns: in the order given; none where there are fewer than 3 clients (one gap of one is no
        gap to speak of), or all diverge alike.
    """
    if len(shares) < 3:
        return []
    clients = list(shares)
    stacked = torch.stack([shares[client] for client in clients])
    divergences = jensen_shannon(stacked, overall)
    ordered = divergences.sort().values
    gaps = ordered.diff()
    widest = int(gaps.argmax())
    if not float(gaps[widest]) > NOTHING:
        return []
    bound = float(ordered[widest])
    return [c for c, d in zip(clients, divergences.tolist(), strict=True) if d > bound]


def complementarity(p: Tensor, q: Tensor, overall: Tensor) -> float:
    """Complementarity: by how much two clients' deviations from P_g cancel.

    G = |p-P_g| + |q-P_g| - |(p-P_g) + (q-P_g)|, L1 norms.    Eq. 33

    By how much the two deviations from P_g cancel: 0 where they point the same way in every class.
    """
    a, b = p - overall, q - overall
    return float(a.abs().sum() + b.abs().sum() - (a + b).abs().sum())


def matched_pairs(shares: Mapping[str, Tensor], overall: Tensor) -> list[Pair]:
    """Greedy matching: the most complementary pair, then the best pair of the others.

    Pairs that do not make up for each other at all are left out; of equal ones, the first in the
    order given is taken.

    Args:
        shares: P_k of the clients that may be paired.
    """
    clients = list(shares)
    edges = [
        (complementarity(shares[one], shares[other], overall), one, other)
        for place, one in enumerate(clients)
        for other in clients[place + 1 :]
    ]
    left = set(clients)
    pairs: list[Pair] = []
    for weight, one, other in sorted(edges, key=lambda edge: -edge[0]):
        if weight > NOTHING and one in left and other in left:
            pairs.append((one, other))
            left -= {one, other}
    return pairs


def counts_to_move(
    counts: Tensor, own: Tensor, partner: Tensor, overall: Tensor, advantage: float
) -> Tensor:
    """Samples of each class that move from a batch to the partner's.    Eq. 13, 29-32

    floor(rho * count + 1/2) of each class with P_i > P_j, with rho clamped to [0, 1]:

        (P_i - P_g) / P_i    where w_i > w_j: i comes down to P_g
        (P_g - P_j) / P_i    where w_j > w_i: j comes up to P_g
        the smaller of both  where they are equal

    Args:
        counts: (N,) int64, samples of each class in i's batch.
        own, partner, overall: P_i, P_j, P_g.
        advantage: w_i - w_j, of the round before; 0 where it is not known.
    Returns: (N,) int64, at most `counts`.
    """
    down, up = own - overall, overall - partner
    if advantage > 0:
        ratio = down
    elif advantage < 0:
        ratio = up
    else:
        ratio = torch.minimum(down, up)
    over = own > partner  # so own is above 0
    ratio = torch.where(over, ratio / own.clamp(min=NOTHING), 0.0).clamp(0, 1)
    return torch.floor(ratio * counts + 0.5).long()


def pairs_present(
    shares: Mapping[str, Tensor], overall: Tensor, present: Collection[str]
) -> list[Pair]:
    """The pairs of a step: biased clients, matched among those present.

    Args:
        shares: P_k of every client there is a record of.
        present: in client order.
    """
    biased = set(biased_clients(shares, overall))
    return matched_pairs({c: shares[c] for c in present if c in biased}, overall)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return torch.xlogy(p, p / q.clamp(min=math.ulp(0.0))).sum(-1)
