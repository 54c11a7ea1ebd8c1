"""Central training of a whole super-network with all its exits: what a deployment starts from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edge_sdk.nets.supernet import Supernet
from edge_sdk.training.datasets import Array


def multi_exit_loss(
    exits: dict[int, Tensor], final: Tensor, labels: Tensor, exit_weight: float
) -> Tensor:
    """Cross-entropy of the final head plus the mean of the exits'.

    L = CE(S(x), y) + w * mean_d CE(h_d(f_d(x)), y)

    Args:
        exits: (B, C) logits by depth. final: (B, C) logits.
        labels: (B,) int64. exit_weight: w; 0 trains the final head alone.
    Returns: () float32, mean over B.
    """
    loss = nn.functional.cross_entropy(final, labels)
    if exits and exit_weight:
        parts = [nn.functional.cross_entropy(logits, labels) for logits in exits.values()]
        loss = loss + exit_weight * torch.stack(parts).mean()
    return loss


def train_multi_exit(
    net: Supernet,
    x: Array,
    y: NDArray[np.int64],
    *,
    epochs: int,
    batch: int = 64,
    learning_rate: float = 3e-3,
    exit_weight: float = 1.0,
    seed: int = 0,
    progress: Callable[[int, float], None] | None = None,
) -> None:
    """Train `net` in place with Adam and a one-cycle learning rate.

    Args:
        x: raw inputs, (n, ...). y: (n,) labels.
        learning_rate: at its peak.
        progress: called after each epoch with its number from 1 and its mean loss.
    """
    inputs, labels = torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(y)
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(net.parameters(), lr=learning_rate)
    steps = epochs * -(-len(labels) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, learning_rate, total_steps=steps)
    net.train()
    for epoch in range(1, epochs + 1):
        total = 0.0
        order = torch.randperm(len(labels), generator=generator)
        for rows in torch.split(order, batch):
            optimiser.zero_grad()
            exits, final = net.forward_exits(inputs[rows])
            loss = multi_exit_loss(exits, final, labels[rows], exit_weight)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimiser.step()
            schedule.step()
            total += float(loss.detach()) * len(rows)
        if progress is not None:
            progress(epoch, total / len(labels))
    net.eval()
