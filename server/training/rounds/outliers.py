"""Who is unlike the others in a step of the server's half: too large, or with labels of its own.

size     a client's features are at its cut at most so many times as large, by their root mean
         square, as the median's are there; of clients with an earlier cut, what the server's stages
         make of theirs.
labels   with the server's half as it stands at the first batch of a client's round, its answers
         are the client's labels at least half as often as they are the others' labels of the same
         classes. So a client with rare or hard classes is like the others that have them. Not
         judged before the others' labels are mostly met, nor by classes that fewer than three
         clients have.

Half of those who are known, or more, are no outliers: where so many would stand out, nobody does.

Who stands out gets its gradient; nothing is learnt from its batch, nor from its update of that
round (server.training.rounds.loop). Looking changes nothing: where nobody stands out no bit of the
training differs.

Labels are judged by the first features of a client's round: later ones come from a prefix that its
own labels have trained, and after a few batches the server agrees with any. On digits (Dirichlet
0.5, two of ten with flipped labels) agreement was 1 % for these and 97 % for the others by the
first batch, 90 % and 95 % by all. Who is honest in its first batch alone is therefore not found by
its labels.

What was last seen of each is kept in the server's state and in checkpoints, since in cohorts of one
nobody is beside it: in the first step of all the first of them is compared with nobody. Who left,
or was in none of the last rounds, is forgotten: features grow, and so does what the server knows.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

import torch
from torch import Tensor

from server.training.core.round_view import RoundView
from server.training.core.server_state import ServerState
from server.training.methods.steps import ClientBatch, ClientBatches

# Times `clip_factor`. Within a round an honest prefix may let its features grow: one that was alone
# at its depth reached 4.5 times the median (Dirichlet 0.1, the first rounds); all others less.
MAX_SIZE_RATIO: Final = 2.0
# Samples by which a client's labels are known, the older the less, and below which they are not
LABEL_WINDOW: Final = 64
MIN_SAMPLES: Final = 16
# Of a class, below which there is no saying whose labels are right
MIN_CLIENTS: Final = 3
# Share of the others' labels that the server has to meet before anybody is judged by them
MIN_AGREEMENT: Final = 0.5
MAX_DISAGREEMENT: Final = 0.5
# Rounds for which a client that takes part in none is remembered. In that many an honest client's
# features do not outgrow `MAX_SIZE_RATIO`, and with a tenth of the clients in a round half are
# still known
ROUNDS_REMEMBERED: Final = 5


def outliers(
    state: ServerState, arrivals: ClientBatches, now: RoundView, clip_factor: float
) -> dict[str, str]:
    """Who stands out in this step, and why in words; what was seen of each is kept in `state`."""
    for client, arrival in arrivals.items():
        round_seen = state.seen.get(f"round/{client}")
        if round_seen is None or int(round_seen) != now.round:
            state.seen[f"round/{client}"] = torch.tensor(now.round)
            _let_through(state, client, arrival)
        for kind in ("sizes", "sent"):
            # it may be a checkpoint's, which stays as it is
            state.seen[f"{kind}/{client}"] = state.seen[f"{kind}/{client}"].clone()
            for stage, size in _sizes(arrival).items():
                state.seen[f"{kind}/{client}"][stage] = size
    found = _by_size(state, MAX_SIZE_RATIO * clip_factor) | _by_labels(state)
    known = sum(name.startswith("sent/") for name in state.seen)
    if 2 * len(found) >= known:
        return {}
    return {client: found[client] for client in arrivals if client in found}


def forget(state: ServerState, clients: Container[str], before: int) -> None:
    """Keep what was seen of these clients alone, and only since round `before`."""
    rounds = {
        name.removeprefix("round/"): int(seen)
        for name, seen in state.seen.items()
        if name.startswith("round/")
    }
    recent = {client for client, seen in rounds.items() if client in clients and seen >= before}
    state.seen = {
        name: seen for name, seen in state.seen.items() if name.partition("/")[2] in recent
    }


def _let_through(state: ServerState, client: str, arrival: ClientBatch) -> None:
    """Let a round's first features through the server's half, to see how large they become there
    and whether its answers are their labels.
    """
    net, z = state.trunk, arrival.features.features
    sizes = torch.zeros(net.L, dtype=torch.float64)  # by stage, from 0; 0 where nothing is known
    net.eval()
    with torch.no_grad():
        for stage in range(arrival.depth, net.L):
            z = net.stages[stage](z)
            sizes[stage] = _size(z)
        answers = net.head(z).argmax(1).cpu()
    net.train()
    state.seen[f"sizes/{client}"] = sizes
    state.seen[f"sent/{client}"] = torch.zeros_like(sizes)
    if arrival.features.labels is None:
        return
    labels = arrival.features.labels.cpu()
    counts = [
        torch.bincount(some, minlength=net.classes) for some in (labels[answers == labels], labels)
    ]
    old = state.seen.get(f"labels/{client}", 0.0)
    state.seen[f"labels/{client}"] = old * max(0.0, 1 - len(labels) / LABEL_WINDOW) + torch.stack(
        counts
    )


def _by_size(state: ServerState, most: float) -> dict[str, str]:
    """Of all who are known, whose features are too large where they come from."""
    _, sizes = _kept(state, "sizes")
    median = torch.where(sizes > 0, sizes, torch.nan).nanmedian(0).values
    clients, sent = _kept(state, "sent")
    ratios = torch.where(sent > 0, sent / median, 0.0).amax(1)
    return {
        client: f"features {ratio:.3g} times as large as the median's"
        for client, ratio in zip(clients, ratios.tolist(), strict=True)
        if ratio > most
    }


def _by_labels(state: ServerState) -> dict[str, str]:
    """Of all who are known, whose labels the server contradicts."""
    clients, seen = _kept(state, "labels")
    if not clients:
        return {}  # they stay on the clients
    met, counts = seen.unbind(1)
    compared = (counts > 0).sum(0) >= MIN_CLIENTS
    usual = torch.where(counts > 0, met / counts, torch.nan).nanmedian(0).values[compared]
    met, counts = met[:, compared], counts[:, compared]
    found = {}
    for client, own_met, own in zip(clients, met, counts, strict=True):
        total = float(own.sum())
        if total < MIN_SAMPLES:
            continue
        share, others = float(own_met.sum()) / total, float(own @ usual) / total
        if others >= MIN_AGREEMENT and share < MAX_DISAGREEMENT * others:
            found[client] = (
                f"the server's answers are {share:.0%} of its labels,"
                f" and {others:.0%} of the others' of these classes"
            )
    return found


def _sizes(arrival: ClientBatch) -> dict[int, float]:
    """Of what arrived, by the stage it comes from, counted from 0."""
    features = arrival.features
    sizes = {arrival.depth - 1: _size(features.features)}
    if features.view is not None and features.entry is not None:
        stage = features.entry - 1
        sizes[stage] = max(sizes.get(stage, 0.0), _size(features.view))
    return sizes


def _kept(state: ServerState, kind: str) -> tuple[list[str], Tensor]:
    """What is known under that name: of which clients, and one upon the other."""
    start = f"{kind}/"
    found = {n.removeprefix(start): each for n, each in state.seen.items() if n.startswith(start)}
    return list(found), torch.stack([*found.values()]) if found else torch.empty(0)


def _size(z: Tensor) -> float:
    return float(z.square().mean(dtype=torch.float64).sqrt())
