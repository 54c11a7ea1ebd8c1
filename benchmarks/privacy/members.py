"""Membership inference, and the noise against it: what it costs, and the epsilon it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.attacks.membership import by_loss
from benchmarks.compare import train
from benchmarks.paper.tables.table import over
from benchmarks.privacy.worlds import Trial, World
from edge_sdk.errors import ConfigurationError
from server.training.report.report import report_of

# at the rate of the others it leaves the finite numbers
_SLOWER: Final[Mapping[str, Any]] = {"train": {"learning_rate": 0.02}}
_UPDATES: Final = {"update_clip": 1.0}
_FEATURES: Final = {"feature_clip": 10.0}
TRAINED: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "FedAvg": ("fedavg", {}),
    "FedAvg, updates clipped": ("fedavg", {"privacy": _UPDATES}),
    **{
        f"FedAvg, noise {sigma} on updates": (
            "fedavg",
            {"privacy": {**_UPDATES, "update_sigma": sigma}},
        )
        for sigma in (0.05, 0.2)
    },
    "SplitFedV1": ("splitfed-v1", {}),
    "SplitFedV1, noise 0.05 on updates and features": (
        "splitfed-v1",
        {"privacy": {**_UPDATES, "update_sigma": 0.05, **_FEATURES, "feature_sigma": 0.05}},
    ),
    "SuperSFL": ("supersfl", _SLOWER),
    "SuperSFL, noise 0.05 on updates and features": (
        "supersfl",
        {
            **_SLOWER,
            "privacy": {**_UPDATES, "update_sigma": 0.05, **_FEATURES, "feature_sigma": 0.05},
        },
    ),
}


def found_members(world: World) -> Iterator[Trial]:
    """Attack the final answer of each network, and the exit head if one was trained."""
    scale = world.scale
    few = {
        "data": {"train_max": scale.members},
        "train": {"rounds": scale.member_rounds, "epochs": 5},
    }
    for name, (method, changes) in TRAINED.items():
        try:
            recipe = world.recipe(method, over(few, changes))
            simulation, rows = train(recipe)
        except ConfigurationError as err:
            nothing = {"accuracy": None, "epsilon": None, "auc": None, "true_rate": None}
            yield Trial("members", name, world.seed, nothing, why=str(err))
            continue
        privacy = report_of(simulation, rows)["privacy"] or {}
        net = simulation.state.net
        net.eval()
        x = np.concatenate([client.x for client in simulation.clients.values()])
        y = np.concatenate([client.y for client in simulation.clients.values()])
        order = np.random.default_rng(world.seed).permutation(len(x))[: scale.attacked]
        inside = _losses(net.forward_exits, x[order], y[order])
        others = slice(0, scale.attacked)
        outside = _losses(net.forward_exits, simulation.x_test[others], simulation.y_test[others])
        for answer in inside:
            trained = simulation.method.client.exit_head and answer == f"exit {scale.depth}"
            if answer != "final" and not trained:
                continue
            result = by_loss(inside[answer], outside[answer])
            yield Trial(
                "members",
                name if answer == "final" else f"{name}, {answer}",
                world.seed,
                {
                    "accuracy": rows[-1]["accuracy"] if answer == "final" else None,
                    "epsilon": privacy.get("epsilon") if answer == "final" else None,
                    "auc": result.auc,
                    "true_rate": result.true_rate,
                },
                why=privacy.get("why"),
            )


@torch.no_grad()
def _losses(forward: Any, x: Any, y: Any) -> dict[str, Tensor]:
    """Cross-entropy of every answer to each sample, (n,), by the answer's name."""
    exits, final = forward(torch.from_numpy(np.ascontiguousarray(x)))
    labels = torch.from_numpy(np.ascontiguousarray(y))
    answers = {f"exit {depth}": logits for depth, logits in exits.items()} | {"final": final}
    return {
        name: nn.functional.cross_entropy(logits, labels, reduction="none")
        for name, logits in answers.items()
    }
