"""First weights for `[train] start`: a recipe's network, trained on held-out samples alone."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import nn

from edge_sdk.durable import make_folder
from server.training.recipe.recipe import Recipe
from server.training.run.build import build_network, load_data

EPOCHS: Final = 60
BATCH: Final = 16  # samples of a step, at least
RATE: Final = 0.05
MOMENTUM: Final = 0.8


def write_first_weights(recipe: Recipe, path: Path) -> None:
    """Train the recipe's network by torch's SGD, and write its weights.

    Exit heads are left out, so that they keep the weights of the seed.

    Args:
        recipe: holds samples out; its seed is that of the first weights and of the order.
    """
    data = load_data(recipe)
    net = build_network(recipe, data)
    whole = net.segment(0, None).train()
    optimiser = torch.optim.SGD(whole.parameters(), RATE, MOMENTUM)
    order = torch.Generator().manual_seed(recipe.seed)
    x, y = torch.from_numpy(data.x_held_out).float(), torch.from_numpy(data.y_held_out)
    batches = max(1, len(y) // BATCH)
    for _ in range(EPOCHS):
        for rows in torch.tensor_split(torch.randperm(len(y), generator=order), batches):
            optimiser.zero_grad()
            nn.functional.cross_entropy(whole(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimiser.step()
    make_folder(path.parent)
    kept = {n: t for n, t in net.state_dict().items() if not n.startswith("exits.")}
    save_file({name: tensor.contiguous() for name, tensor in kept.items()}, path)
