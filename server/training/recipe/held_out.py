"""Held-out samples of each client: of its own classes in its own shares, for its own threshold.

The held-out part of the data set (`[data] held_out`) is dealt out as the training part was: of each
class, a client gets the share of the held-out samples that it has of the training samples. No
client trains on any of them, and none is at two clients.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_sdk.training.streams import Stream
from server.training.recipe.partition import Indices, Labels, Parts


def held_out_parts(
    y_train: Labels, parts: Sequence[Indices], y_held_out: Labels, seed: int
) -> Parts:
    """Deal the held-out part out to the clients by their shares of each class.

    A class of which a client trains on the share s gives it s of its held-out samples, rounded so
    that no sample is dealt twice. What belongs to training samples that the partition left out is
    left out too.

    Args:
        y_train: (n,) labels of the training part. parts: the rows that each client trains on.
        y_held_out: (m,) labels of the held-out part.
    Returns: rows of the held-out part by client, ascending; none for a client with too few samples.
    """
    rng = Stream.HELD_OUT.generator(seed)
    classes = 1 + max(y_train.max(initial=0), y_held_out.max(initial=0))
    counts = np.stack([np.bincount(y_train[part], minlength=classes) for part in parts])
    trained = np.bincount(y_train, minlength=classes)
    dealt: list[list[Indices]] = [[] for _ in parts]
    for label in np.unique(y_held_out):
        pool = rng.permutation(np.flatnonzero(y_held_out == label))
        order = rng.permutation(len(parts))  # so that rounding favours no client in every class
        shares = counts[order, label].cumsum() / max(1, trained[label])
        ends = np.rint(shares * len(pool)).astype(np.int64)
        for client, piece in zip(order, np.split(pool, ends)[:-1], strict=True):
            dealt[client].append(piece)
    none = np.zeros(0, np.int64)
    return [np.sort(np.concatenate([none, *pieces])) for pieces in dealt]
