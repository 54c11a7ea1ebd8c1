"""Server-side batches that may hold samples of two clients.    BESplit, 4.2

Each batch is trained on by one client's copy of the suffix; gradients go back to the client that a
sample is of.

    pair i, j     i's batch: own rows that stay, then those moved in from j; j's likewise
    step          each batch through its host's copy, evidential loss, backward to both clients
    all or none   where one batch cannot be learnt from, nothing is stepped, BatchNorm's running
                  statistics are restored, and the caller may try the clients apart
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from server.training.core.server_state import ServerState, Suffix
from server.training.methods.formulas.contrastive import Gradients, added
from server.training.methods.steps import Attempt, ClientBatch, ClientBatches, Pairs

# by host, the client that lends its copy to the batch: the rows taken of each client's features
HostBatches = Mapping[str, Mapping[str, Tensor]]
Draws = Callable[[str], np.random.Generator]
# logits (B, N) and labels (B,) to the loss of each sample, (B,) float64
Losses = Callable[[Tensor, Tensor], Tensor]

# Least samples of a batch after the exchange: one leaves BatchNorm nothing to work with.
MIN_ROWS: Final = 2


@dataclass(slots=True, eq=False)
class BatchResult:
    """The result of one client's samples, in its own order, through whichever copy they went.

    Attributes:
        z, labels: (B, ...) and (B,) as the client sent them; z is a leaf of its own graph.
        outputs: (B, N) logits. losses: (B,) float64.
        gradient: (B, ...) of the mean losses of the batches they lay in, with respect to z.
        pairs: second samples that the copies align these with; None if there are none.
    """

    z: Tensor
    labels: Tensor
    outputs: Tensor
    losses: Tensor
    gradient: Tensor
    pairs: Pairs | None = None

    @classmethod
    def of(cls, batch: ClientBatch, classes: int) -> BatchResult:
        """The result before any sample has gone through a copy."""
        z = batch.z
        losses = torch.zeros(len(z), dtype=torch.float64, device=z.device)
        outputs, gradient = z.new_zeros(len(z), classes), torch.zeros_like(z)
        return cls(z, batch.labels, outputs, losses, gradient, batch.pairs)

    @property
    def loss(self) -> float:
        """Mean loss over the client's samples."""
        return float(self.losses.mean())


def own_batch(client: str, batch: ClientBatch) -> HostBatches:
    """All of a client's rows on its own copy."""
    return {client: {client: torch.arange(len(batch.labels))}}


def exchanged(
    clients: ClientBatches, moves: Mapping[tuple[str, str], Tensor], draws: Draws
) -> HostBatches | None:
    """The batches of a pair after so many samples of each class have changed sides.

    Args:
        moves: (N,) counts by class: from the one to the other, and back.
        draws: by a client's name, what chooses the samples that leave it.
    Returns: None where nothing moves, or too little would be left on a side.
    """
    going = {
        (one, other): _chosen(clients[one].labels, counts, draws(one))
        for (one, other), counts in moves.items()
    }
    batches: dict[str, dict[str, Tensor]] = {}
    for one, other in moves:
        stays = torch.ones(len(clients[one].labels), dtype=torch.bool)
        stays[going[one, other]] = False
        batches[one] = {one: stays.nonzero().squeeze(1), other: going[other, one]}
    sizes = [sum(map(len, rows.values())) for rows in batches.values()]
    if min(sizes) < MIN_ROWS or not any(map(len, going.values())):
        return None
    return batches


def step_hosts(
    state: ServerState, clients: ClientBatches, batches: HostBatches, losses_of: Losses
) -> dict[str, BatchResult] | None:
    """One step of every host's copy on its batch, all from the features that the clients sent.

    Args:
        batches: every row of each host's features lies in one of them.
        losses_of: the evidential loss of the round.
    Returns: by client; None, and nothing is stepped, where one batch cannot be learnt from.
    """
    results = {host: BatchResult.of(clients[host], state.net.classes) for host in batches}
    suffixes = {host: state.copy_for(host, clients[host].depth) for host in batches}
    attempt = Attempt(state, list(batches), *suffixes.values())
    found = attempt.run(
        lambda: [
            _gradients(suffixes[host], rows, results, losses_of) for host, rows in batches.items()
        ]
    )
    if found is None:
        return None
    finite = [tensor for result in results.values() for tensor in (result.losses, result.gradient)]
    if any(result.pairs is not None for result in results.values()):
        finite += [gradient for own in found for gradient in own if gradient is not None]
    return results if attempt.step(found, *finite) else None


def _gradients(
    suffix: Suffix,
    rows: Mapping[str, Tensor],
    results: Mapping[str, BatchResult],
    losses_of: Losses,
) -> Gradients:
    """Gradients of the copy's parameters; the clients' go into their results."""
    taken = [(results[client], which) for client, which in rows.items()]
    z = torch.cat([result.z[which] for result, which in taken])
    labels = torch.cat([result.labels[which] for result, which in taken])
    neck, classifier = suffix.neck, suffix.classifier
    second = neck(z)
    logits = classifier(second)
    losses = losses_of(logits, labels)
    leaves = [result.z for result, _ in taken]
    paired = [(result.pairs, which) for result, which in taken if result.pairs is not None]
    aligned = len(paired) == len(taken)
    found = torch.autograd.grad(losses.mean(), [*leaves, *suffix.parameters], retain_graph=aligned)
    sizes = [len(which) for _, which in taken]
    parts = zip(taken, torch.split(logits, sizes), torch.split(losses, sizes), found, strict=False)
    for (result, which), outputs, some, gradient in parts:
        result.outputs[which] = outputs.detach()
        result.losses[which] = some.detach()
        result.gradient += gradient  # 0 for rows that lie in other batches
    own = list(found[len(leaves) :])
    if not aligned:
        return [*own]
    views = torch.cat([pairs.z[which] for pairs, which in paired])
    same = torch.cat([pairs.same[which] for pairs, which in paired])
    align = paired[0][0].align
    return added(own, align.gradients(neck(views), second, same, suffix.parameters))


def _chosen(labels: Tensor, counts: Tensor, generator: np.random.Generator) -> Tensor:
    """Rows of so many samples of each class, drawn at random, in ascending order."""
    of_class = labels.cpu().numpy()
    drawn = [
        generator.choice(np.flatnonzero(of_class == label), count, replace=False)
        for label, count in enumerate(counts.tolist())
        if count
    ]
    rows = np.sort(np.concatenate(drawn)) if drawn else np.empty(0, np.int64)
    return torch.from_numpy(rows.astype(np.int64))
