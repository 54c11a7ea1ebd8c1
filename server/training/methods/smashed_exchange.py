"""Server-side batches that may hold samples of two clients. Each is trained on by one client's copy
of the suffix; gradients go back to the client a sample came from.    BESplit, 4.2

    pair i, j     i's batch: own rows that stay, then those moved in from j; j's likewise
    step          each batch through its host's copy, evidential loss, backward to both clients
    all or none   where one batch cannot be learnt from, nothing is stepped, BatchNorm's running
                  statistics are put back, and the caller may try the clients apart
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from edge_sdk.training.formulas.evidence import evidential_losses
from edge_sdk.training.formulas.sgd import clip_l2
from server.training.core.server_state import BatchNormSnapshot, ServerState, Suffix
from server.training.methods.formulas.contrastive import added
from server.training.methods.steps import ClientBatch, ClientBatches, Pairs, neck_of

logger = logging.getLogger(__name__)

# by the client whose copy trains on it: the rows it takes of each client's features
Batches = Mapping[str, Mapping[str, Tensor]]

# of a batch after the exchange: one sample leaves BatchNorm nothing to work with
LEFT_AT_LEAST: Final = 2


@dataclass(slots=True, eq=False)
class Lesson:
    """What one client's samples came to, in its own order, through whichever copy they went.

    Attributes:
        z, labels: (B, ...) and (B,) as they came; z is a leaf of its own graph.
        outputs: (B, N) logits. losses: (B,) float64.
        gradient: (B, ...) of the mean losses of the batches they lay in, with respect to z.
        pairs: what else the copies align each sample by, whichever it goes through; None if
            nothing.
    """

    z: Tensor
    labels: Tensor
    outputs: Tensor
    losses: Tensor
    gradient: Tensor
    pairs: Pairs | None = None

    @classmethod
    def of(cls, arrival: ClientBatch, classes: int) -> Lesson:
        """Nothing learnt yet."""
        z = arrival.features.features.detach().requires_grad_()
        losses = torch.zeros(len(z), dtype=torch.float64, device=z.device)
        outputs, gradient = z.new_zeros(len(z), classes), torch.zeros_like(z)
        return cls(z, arrival.labels, outputs, losses, gradient, arrival.pairs)

    @property
    def loss(self) -> float:
        """Mean over its samples."""
        return float(self.losses.mean())

    @property
    def sound(self) -> bool:
        """Whether losses and gradient are finite."""
        sums = (self.losses.sum(), self.gradient.sum())
        return all(math.isfinite(float(total)) for total in sums)


def own_batch(client: str, arrival: ClientBatch) -> Batches:
    """All of a client's rows on its own copy."""
    return {client: {client: torch.arange(len(arrival.labels))}}


def exchanged(
    arrivals: ClientBatches, moves: Mapping[tuple[str, str], Tensor], key: Sequence[int]
) -> Batches | None:
    """The batches of a pair after so many samples of each class have changed sides.

    Args:
        moves: (N,) counts by class: from the one to the other, and back.
        key: of the draw, beside the client's name.
    Returns: None where nothing moves, or too little would be left on a side.
    """
    going = {
        (one, other): _chosen(arrivals[one].labels, counts, [*key, crc32(one.encode())])
        for (one, other), counts in moves.items()
    }
    batches: dict[str, dict[str, Tensor]] = {}
    for one, other in moves:
        stays = torch.ones(len(arrivals[one].labels), dtype=torch.bool)
        stays[going[one, other]] = False
        batches[one] = {one: stays.nonzero().squeeze(1), other: going[other, one]}
    sizes = [sum(map(len, rows.values())) for rows in batches.values()]
    if min(sizes) < LEFT_AT_LEAST or not any(map(len, going.values())):
        return None
    return batches


def learn(
    state: ServerState, arrivals: ClientBatches, batches: Batches, kl_weight: float
) -> dict[str, Lesson] | None:
    """One step of every host's copy on its batch, all from the features as they came.

    Args:
        batches: every row of each host's features lies in one of them.
        kl_weight: lam_t of the evidential loss.
    Returns: by client; None, and nothing is stepped, where one batch cannot be learnt from.
    """
    lessons = {c: Lesson.of(arrivals[c], state.net.classes) for c in batches}
    suffixes = {c: state.copy_for(c, arrivals[c].depth) for c in batches}
    before = [BatchNormSnapshot(suffix.module) for suffix in suffixes.values()]
    try:
        steps = [
            (suffixes[host], _gradients(suffixes[host], rows, lessons, kl_weight))
            for host, rows in batches.items()
        ]
        sound = all(lesson.sound for lesson in lessons.values())
        sound = sound and all(statistics.sound for statistics in before)
        if any(lesson.pairs is not None for lesson in lessons.values()):
            own = [float(gradient.sum()) for _, gradients in steps for gradient in gradients]
            sound = sound and all(map(math.isfinite, own))
        reason = "a loss is not finite"
    except ValueError as err:  # BatchNorm, where one sample leaves one value per channel
        sound, reason = False, str(err)
    if not sound:
        logger.warning("clients=%s cannot be learnt from: %s", ",".join(batches), reason)
        for statistics in before:
            statistics.restore()
        return None
    for suffix, gradients in steps:
        suffix.step(clip_l2(gradients, state.clip))
    return lessons


def _gradients(
    suffix: Suffix, rows: Mapping[str, Tensor], lessons: Mapping[str, Lesson], kl_weight: float
) -> list[Tensor]:
    """Of the copy's parameters; what concerns the clients goes into their lessons."""
    taken = [(lessons[client], which) for client, which in rows.items()]
    z = torch.cat([lesson.z[which] for lesson, which in taken])
    labels = torch.cat([lesson.labels[which] for lesson, which in taken])
    neck, classifier = neck_of(suffix.module)
    second = neck(z)
    logits = classifier(second)
    losses = evidential_losses(logits, labels, kl_weight)
    leaves = [lesson.z for lesson, _ in taken]
    paired = [(lesson.pairs, which) for lesson, which in taken if lesson.pairs is not None]
    aligned = len(paired) == len(taken)
    found = torch.autograd.grad(losses.mean(), [*leaves, *suffix.parameters], retain_graph=aligned)
    sizes = [len(which) for _, which in taken]
    parts = zip(taken, torch.split(logits, sizes), torch.split(losses, sizes), found, strict=False)
    for (lesson, which), outputs, some, gradient in parts:
        lesson.outputs[which] = outputs.detach()
        lesson.losses[which] = some.detach()
        lesson.gradient += gradient  # 0 for rows that lie in other batches
    own = list(found[len(leaves) :])
    if not aligned:
        return own
    views = torch.cat([pairs.z[which] for pairs, which in paired])
    same = torch.cat([pairs.same[which] for pairs, which in paired])
    align = paired[0][0].align
    return added(own, align.gradients(neck(views), second, same, suffix.parameters))


def _chosen(labels: Tensor, counts: Tensor, key: Sequence[int]) -> Tensor:
    """Rows of so many samples of each class, drawn by the key; ascending."""
    generator = np.random.default_rng(list(key))
    of_class = labels.cpu().numpy()
    drawn = [
        generator.choice(np.flatnonzero(of_class == label), count, replace=False)
        for label, count in enumerate(counts.tolist())
        if count
    ]
    rows = np.sort(np.concatenate(drawn)) if drawn else np.empty(0, np.int64)
    return torch.from_numpy(rows.astype(np.int64))
