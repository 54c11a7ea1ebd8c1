"""A simulation whose accuracies are of held-out samples, so that no choice sees the test part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from server.training.recipe.recipe import Recipe
from server.training.run.build import load_data
from server.training.run.run import Simulation
from server.training.simulation.build import build_simulation


def build_on_held_out(recipe: Recipe, device: str, folder: Path) -> Simulation:
    """A recipe's simulation, with its held-out samples in the place of the test samples.

    Raises: SplitedgeError saying what does not go together.
    """
    data = load_data(recipe)
    simulation = build_simulation(recipe, device, folder)
    return replace(simulation, x_test=data.x_held_out, y_test=data.y_held_out)
