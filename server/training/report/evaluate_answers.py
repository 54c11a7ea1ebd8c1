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
from server.training.run.run import Simulation


def auxiliary_report(run: Simulation) -> dict[str, Any] | None:
    """Accuracy of the auxiliary models on the global test set, and BMR if the recipe asks for it.

    Clients that have not taken part yet have none and are left out.

    Returns: None for a method without auxiliary models, or before the first has been taught.
    """
    accuracies: dict[str, float] = {}
    rates: list[float] = []
    for name, model in _auxiliaries(run):
        labels = answers(model, run)
        accuracies[name] = score(labels, run.y_test).accuracy
        rates.append(benign_rate(labels, run.y_test, run.recipe.data.malignant))
    if not accuracies:
        return None
    return {
        "accuracy": statistics.fmean(accuracies.values()),
        "bmr": statistics.fmean(rates) if run.recipe.data.malignant else None,
        "each": accuracies,
    }


def benign_rate_of(run: Simulation) -> float:
    """BMR of the whole network on the global test set: the mean over the clients' cuts.

    NaN where the recipe names no malignant class, or the test set has none of them.
    """
    malignant = run.recipe.data.malignant
    depths = {plan.depth for plan in run.plans.values() if not plan.part.whole}
    wholes = [run.state.whole(depth) for depth in sorted(depths)] or [run.state.net]
    return statistics.fmean(
        benign_rate(answers(whole, run), run.y_test, malignant) for whole in wholes
    )


def answers(model: nn.Module, run: Simulation) -> NDArray[np.int64]:
    """(n_test,) classes that a network from raw inputs to logits says of the global test set."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    said = []
    with torch.no_grad():
        for at in range(0, len(run.x_test), BATCH):
            x = torch.from_numpy(np.ascontiguousarray(run.x_test[at : at + BATCH]))
            said.append(model(x.to(run.device)).argmax(1).cpu())
    for part, training in modes:
        part.training = training
    labels: NDArray[np.int64] = torch.cat(said).numpy()
    return labels


def _auxiliaries(run: Simulation) -> Iterator[tuple[str, Auxiliary]]:
    for name, client in run.clients.items():
        plan = run.plans[name]
        if plan.part.distil is not None:
            model = auxiliary_of(plan).to(run.device)
            if model.load(client.personal):
                yield name, model
