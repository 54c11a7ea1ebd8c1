"""A simulation whose accuracies are of held-out samples, so that no choice sees the test part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edge_sdk.nets.memory_format import ChosenFormat
from edge_sdk.training.streams import Stream
from server.training.recipe.partition import RhoTest
from server.training.recipe.recipe import Recipe
from server.training.report.client_scores import summary_of
from server.training.report.evaluate import Evaluator
from server.training.report.rows import ever_supervised
from server.training.run.build import load_data
from server.training.run.run import Row, Simulation
from server.training.simulation.build import build_simulation

# `accuracy` is the whole network's on all held-out samples; `accuracy_clients` the mean over
# clients, each on samples of its own classes.
Measure = Literal["accuracy", "accuracy_clients"]


def build_on_held_out(
    recipe: Recipe, device: str, folder: Path, memory_format: ChosenFormat | None = None
) -> Simulation:
    """A recipe's simulation, with its held-out samples in the place of the test samples.

    A client is not tested on those by which its gate's threshold is chosen.

    Raises: SplitedgeError saying what does not go together.
    """
    data = load_data(recipe)
    simulation = build_simulation(recipe, device, folder, memory_format)
    y = data.y_held_out
    return replace(simulation, x_test=data.x_held_out, y_test=y, tests=_tests(simulation, y))


def held_out_score(simulation: Simulation, rows: list[Row], measure: Measure) -> float:
    """The measure of a simulation that `build_on_held_out` gave, after its rounds; 0 to 1.

    Args:
        rows: of all its rounds.
    """
    supervised = ever_supervised(rows)
    evaluator = Evaluator(simulation)
    if measure == "accuracy":
        return evaluator.accuracy(supervised=supervised)
    return summary_of(evaluator.clients(supervised=supervised)).accuracy


def _tests(simulation: Simulation, y: NDArray[np.int64]) -> dict[str, RhoTest]:
    """Samples of each client's classes, without its own held-out ones, and samples of others."""
    tests = {}
    for number, (name, client) in enumerate(simulation.clients.items()):
        known = np.isin(y, np.unique(client.y))
        draw = Stream.UNSEEN_CLASSES.generator(simulation.recipe.seed, index=number)
        tests[name] = RhoTest(
            np.setdiff1d(np.flatnonzero(known), simulation.held_out[name]),
            draw.permutation(np.flatnonzero(~known)),
        )
    return tests
