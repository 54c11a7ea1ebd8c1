"""What BESplit is judged by beside the whole network (`Evaluator`): the clients' auxiliary models,
and malignant samples called benign. METHODS.md, "Data, tests, metrics".

    BESplit-G    the whole network on the global test set: `final.accuracy`
    BESplit-A    the mean over clients' auxiliary models, on the same
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edge_sdk.training.client.auxiliary import Auxiliary, auxiliary_of
from server.training.report.evaluate import BATCH
from server.training.report.metrics import benign_rate, score
from server.training.simulation.build import World


def auxiliary_report(world: World) -> dict[str, Any] | None:
    """Accuracy of the auxiliary models on the global test set, and BMR if the recipe asks for it.

    Clients that have not taken part yet have none and are left out.

    Returns: None for a method without auxiliary models, or before the first has been taught.
    """
    accuracies: dict[str, float] = {}
    rates: list[float] = []
    for name, model in _auxiliaries(world):
        labels = answers(model, world)
        accuracies[name] = score(labels, world.y_test).accuracy
        rates.append(benign_rate(labels, world.y_test, world.recipe.data.malignant))
    if not accuracies:
        return None
    return {
        "accuracy": statistics.fmean(accuracies.values()),
        "bmr": statistics.fmean(rates) if world.recipe.data.malignant else None,
        "each": accuracies,
    }


def benign_rate_of(world: World) -> float:
    """BMR of the whole network on the global test set: the mean over the clients' cuts.

    NaN where the recipe names no malignant class, or the test set has none of them.
    """
    malignant = world.recipe.data.malignant
    depths = {plan.depth for plan in world.plans.values() if not plan.part.whole}
    wholes = [world.state.whole(depth) for depth in sorted(depths)] or [world.state.net]
    return statistics.fmean(
        benign_rate(answers(whole, world), world.y_test, malignant) for whole in wholes
    )


def answers(model: nn.Module, world: World) -> NDArray[np.int64]:
    """(n_test,) classes that a network from raw inputs to logits says of the global test set."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    said = []
    with torch.no_grad():
        for at in range(0, len(world.x_test), BATCH):
            x = torch.from_numpy(np.ascontiguousarray(world.x_test[at : at + BATCH]))
            said.append(model(x.to(world.device)).argmax(1).cpu())
    for part, training in modes:
        part.training = training
    labels: NDArray[np.int64] = torch.cat(said).numpy()
    return labels


def _auxiliaries(world: World) -> Iterator[tuple[str, Auxiliary]]:
    for name, client in world.clients.items():
        plan = world.plans[name]
        if plan.part.distil is not None:
            model = auxiliary_of(plan).to(world.device)
            if model.load(client.personal):
                yield name, model
