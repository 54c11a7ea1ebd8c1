"""Clients unlike the others in a server step: features that are too large, or labels of their own.

size     A client's features are, at its cut, at most a number of times as large as the median's, by
         their root mean square. Of clients with an earlier cut, the features that the server's
         stages make of theirs count.
labels   With the server's half as it stands at the first batch of a client's round, its answers
         are the client's labels at least half as often as they are the others' labels of the same
         classes. So a client with rare or hard classes is like the others that have them. Labels
         are not compared before the others' are mostly met, nor for classes that fewer than three
         clients have.

Half of the known clients, or more, are no outliers: where so many would stand out, none does.

An outlier gets its gradient; nothing is learnt from its batch, nor from its update of that round
(server.training.rounds.suspects). Looking changes nothing: where no client stands out no bit of the
training differs.

Labels are compared at the first features of a client's round. Later ones come from a prefix that
the client's labels have trained, and after a few batches the server agrees with any. On digits
(Dirichlet 0.5, two of ten with flipped labels) agreement was 1 % for these and 97 % for the others
by the first batch, 90 % and 95 % by all. A client that is honest in its first batch alone is
therefore not found by its labels.

The last look at each client is kept in the server's state and in checkpoints, since a cohort of one
has no other client to compare with; the first client of the first step has none either. A client
that left, or that was in none of the last rounds, is forgotten: features grow, and so does what the
server knows.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

import torch
from torch import Tensor

from server.training.core.memory import MemoryPart
from server.training.core.round_view import RoundView
from server.training.core.server_state import ServerState
from server.training.methods.steps import ClientBatch, ClientBatches

# Times `clip_factor`. Within a round an honest prefix may let its features grow: one that was alone
# at its depth reached 4.5 times the median (Dirichlet 0.1, the first rounds); all others less.
MAX_SIZE_RATIO: Final = 2.0
# Samples by which a client's labels are known: older ones fade over the window, and below the
# minimum the labels are not known.
LABEL_WINDOW: Final = 64
MIN_SAMPLES: Final = 16
# Clients that have a class, below which the server cannot tell which of them labels it right.
MIN_CLIENTS: Final = 3
# Share of the others' labels that the server has to meet before any client is compared with them.
MIN_AGREEMENT: Final = 0.5
# Share of the others' agreement below which a client stands out.
LEAST_SHARE: Final = 0.5
# Rounds for which a client that takes part in none is remembered. In that many an honest client's
# features do not outgrow `MAX_SIZE_RATIO`, and with a tenth of the clients in a round half are
# still known.
ROUNDS_REMEMBERED: Final = 5


class _Seen:
    """The last look at each client, in the server's state.

    Attributes:
        rounds: the round of the look.
        sizes: (L,) float64, root mean square of the features after each stage; 0 where not known.
        sent: (L,) float64, those of `sizes` that the client sent itself.
        labels: (2, N), by class: labels that the server's answers met, and labels.
    """

    def __init__(self, state: ServerState) -> None:
        self.rounds = MemoryPart(state.seen, "round")
        self.sizes = MemoryPart(state.seen, "sizes")
        self.sent = MemoryPart(state.seen, "sent")
        self.labels = MemoryPart(state.seen, "labels")


def outliers(
    state: ServerState, batches: ClientBatches, now: RoundView, clip_factor: float
) -> dict[str, str]:
    """The clients that stand out in this step, with the reasons; the looks are kept in `state`."""
    seen = _Seen(state)
    for client, batch in batches.items():
        if int(seen.rounds.get(client, torch.tensor(-1))) != now.round:
            seen.rounds[client] = torch.tensor(now.round)
            _look(state, seen, client, batch)
        for part in (seen.sizes, seen.sent):
            sizes = part[client].clone()  # it may be a checkpoint's, which stays as it is
            for stage, size in _sizes_sent(batch).items():
                sizes[stage] = size
            part[client] = sizes
    found = _too_large(seen, MAX_SIZE_RATIO * clip_factor) | _contradicted(seen)
    if 2 * len(found) >= len(seen.sent):
        return {}
    return {client: found[client] for client in batches if client in found}


def forget(state: ServerState, clients: Container[str], before: int) -> None:
    """Keep the looks at these clients alone, and only those since round `before`."""
    rounds = _Seen(state).rounds
    recent = {client for client, r in rounds.items() if client in clients and int(r) >= before}
    state.seen = {
        name: seen for name, seen in state.seen.items() if name.partition("/")[2] in recent
    }


def _look(state: ServerState, seen: _Seen, client: str, batch: ClientBatch) -> None:
    """Run a round's first features through the server's half: how large they become there, and
    whether its answers are their labels.
    """
    net, z = state.trunk, batch.features.features
    sizes = torch.zeros(net.L, dtype=torch.float64)
    net.eval()
    with torch.no_grad():
        for stage in range(batch.depth, net.L):
            z = net.stages[stage](z)
            sizes[stage] = _size(z)
        answers = net.head(z).argmax(1).cpu()
    net.train()
    seen.sizes[client] = sizes
    seen.sent[client] = torch.zeros_like(sizes)
    if batch.features.labels is None:
        return
    labels = batch.features.labels.cpu()
    counts = [
        torch.bincount(some, minlength=net.classes) for some in (labels[answers == labels], labels)
    ]
    old = seen.labels.get(client, 0.0)
    faded = old * max(0.0, 1 - len(labels) / LABEL_WINDOW)
    seen.labels[client] = faded + torch.stack(counts)


def _too_large(seen: _Seen, most: float) -> dict[str, str]:
    """Known clients with features that are too large at their cut."""
    _, sizes = _stacked(seen.sizes)
    median = torch.where(sizes > 0, sizes, torch.nan).nanmedian(0).values
    clients, sent = _stacked(seen.sent)
    ratios = torch.where(sent > 0, sent / median, 0.0).amax(1)
    return {
        client: f"features {ratio:.3g} times as large as the median's"
        for client, ratio in zip(clients, ratios.tolist(), strict=True)
        if ratio > most
    }


def _contradicted(seen: _Seen) -> dict[str, str]:
    """Known clients with labels that the server contradicts."""
    clients, labels = _stacked(seen.labels)
    if not clients:
        return {}  # they stay on the clients
    met, counts = labels.unbind(1)
    compared = (counts > 0).sum(0) >= MIN_CLIENTS
    usual = torch.where(counts > 0, met / counts, torch.nan).nanmedian(0).values[compared]
    met, counts = met[:, compared], counts[:, compared]
    found = {}
    for client, own_met, own in zip(clients, met, counts, strict=True):
        total = float(own.sum())
        if total < MIN_SAMPLES:
            continue
        share, others = float(own_met.sum()) / total, float(own @ usual) / total
        if others >= MIN_AGREEMENT and share < LEAST_SHARE * others:
            found[client] = (
                f"the server's answers are {share:.0%} of its labels,"
                f" and {others:.0%} of the others' of these classes"
            )
    return found


def _sizes_sent(batch: ClientBatch) -> dict[int, float]:
    """Sizes of what the client sent, by the stage it comes from, counted from 0."""
    features = batch.features
    sizes = {batch.depth - 1: _size(features.features)}
    if features.view is not None and features.entry is not None:
        stage = features.entry - 1
        sizes[stage] = max(sizes.get(stage, 0.0), _size(features.view))
    return sizes


def _stacked(part: MemoryPart) -> tuple[list[str], Tensor]:
    """The clients of a part and their tensors, one upon the other."""
    found = dict(part)
    return list(found), torch.stack([*found.values()]) if found else torch.empty(0)


def _size(z: Tensor) -> float:
    return float(z.square().mean(dtype=torch.float64).sqrt())
