"""Labels that gradients give away, where a client keeps its labels and returns gradients.

HARMONY's clients return gradients of the server's logits, SplitLPF's gradients of embeddings, whose
last layer the server does not have. The attacks are in `benchmarks.attacks.labels`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.attacks.labels import auc, by_norm, direction_scores
from benchmarks.compare import train
from benchmarks.privacy.worlds import Trial, World
from edge_sdk.nets.supernet import Supernet
from edge_sdk.training.formulas.gradient_noise import isotropic
from server.training.simulation.build import build_simulation

NOISES: Final = (0.0, 1.0, 10.0, 1_000.0)
KNOWN: Final = 10  # labelled gradients of each class that the attacker has
_LABELLED: Final = 200  # gradients among which these are found
_BATCH: Final = 32


def read_labels(world: World) -> Iterator[Trial]:
    """Attack the gradients at the first weights and at the last, with each strength of noise."""
    recipe = world.recipe("splitfed-v1")
    fresh = build_simulation(recipe)
    x = np.concatenate([client.x for client in fresh.clients.values()])
    y = np.concatenate([client.y for client in fresh.clients.values()])
    order = np.random.default_rng(world.seed).permutation(len(x))
    order = order[: world.scale.attacked + _LABELLED]
    inputs, labels = torch.from_numpy(x[order]), torch.from_numpy(y[order])
    yield from _attacked(world, "first weights", fresh.state.net, inputs, labels)
    simulation, _ = train(recipe)
    yield from _attacked(world, "trained", simulation.state.net, inputs, labels)


def _attacked(
    world: World, when: str, net: Supernet, inputs: Tensor, labels: Tensor
) -> Iterator[Trial]:
    by_logits, by_embeddings = gradients(net, inputs, labels)
    classes = by_logits.shape[1]
    for noise in NOISES:
        generator = np.random.default_rng([world.seed, int(noise)])
        for name, clean in (("logits", by_logits), ("embeddings", by_embeddings)):
            seen = torch.cat(
                [isotropic(rows, noise, generator) for rows in torch.split(clean, _BATCH)]
            )
            head = min(_LABELLED, len(seen) // 2)
            rest = slice(head, None)
            known = [seen[:head][labels[:head] == label][:KNOWN] for label in range(classes)]
            scores = direction_scores(seen[rest], known)
            if name == "logits":
                scores = -seen[rest]
            guessed = (scores.argmax(1) == labels[rest]).double().mean()
            yield Trial(
                "labels",
                f"gradients of {name}, {when}, noise {noise:g}",
                world.seed,
                {
                    "read": float(guessed),
                    "auc": auc(scores.nan_to_num(neginf=-2.0), labels[rest]),
                    "auc_norm": auc(by_norm(seen[rest], classes), labels[rest]),
                },
            )


def gradients(net: Supernet, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the mean cross-entropy of batches, by logits (n, N) and by embeddings (n, D).

    Args:
        inputs: (n, ...) raw. labels: (n,) int64.
    """
    whole = net.segment(0, None)
    net.eval()
    pairs = []
    for x, y in zip(torch.split(inputs, _BATCH), torch.split(labels, _BATCH), strict=True):
        embeddings = whole.neck(x)
        logits = whole.classifier(embeddings)
        loss = nn.functional.cross_entropy(logits, y)
        pairs.append(torch.autograd.grad(loss, [logits, embeddings]))
    by_logits, by_embeddings = (torch.cat(each).detach() for each in zip(*pairs, strict=True))
    return by_logits, by_embeddings.flatten(1)
