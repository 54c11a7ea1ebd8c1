"""Every method trains a user's own network: residual, with BatchNorm and dropout; and 1-D."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from edge_sdk.errors import ConfigurationError
from server.training.recipe.recipe import METHODS, Recipe, read_recipe
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds

EXAMPLES = Path(__file__).parents[3] / "examples" / "own_network"


def recipe(method: str, backbone: str, depth: int = 2, **data: Any) -> Recipe:
    return read_recipe(
        {
            "method": method,
            "data": {"name": "digits", "clients": 2, "train_max": 80, "test_max": 20, **data},
            "train": {
                "backbone": backbone,
                "backbone_folder": str(EXAMPLES),
                "depth": depth,
                "rounds": 1,
                "iterations": 2,
                "batch": 16,
                "learning_rate": 0.05,
            },
        }
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_method_trains_an_own_residual_network(method: str) -> None:
    simulation = build_simulation(recipe(method, "residual:network"))
    before = simulation.state.read()
    (row,) = run_rounds(simulation, [])
    assert row["merged"]
    assert row["participants"] == ["client-0", "client-1"]
    assert not simulation.failures
    after = simulation.state.read()
    assert all(bool(torch.isfinite(tensor).all()) for tensor in after.values())
    assert any(not torch.equal(after[name], before[name]) for name in before if "stage1" in name)


def sensor(classes: int, input_shape: tuple[int, ...]) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv1d(input_shape[0], 8, 5, padding=2), nn.BatchNorm1d(8), nn.ReLU()),
        *(nn.MaxPool1d(2), nn.Conv1d(8, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.ReLU()),
        *(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, classes)),
    )


def windows() -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    y = np.arange(80) % 3
    x = random.normal(size=(80, 4, 32)).astype(np.float32) + y[:, None, None]
    return x[:60], y[:60], x[60:], y[60:]


def tokens(classes: int) -> nn.Sequential:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    flat = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (8, 8)), nn.Linear(8, 8))
    return nn.Sequential(flat, layer, nn.Flatten(), nn.Linear(64, 16), nn.Linear(16, classes))


@pytest.mark.parametrize("method", ["supersfl", "besplit", "splitlpf"])
def test_a_network_of_one_dimension_trains(method: str) -> None:
    given = recipe(method, f"{__name__}:sensor", 1, name=f"{__name__}:windows")
    simulation = build_simulation(given)
    (row,) = run_rounds(simulation, [])
    assert row["merged"]
    assert not simulation.failures


def test_a_method_that_pools_maps_refuses_tokens() -> None:
    given = recipe("besplit", f"{__name__}:tokens")
    with pytest.raises(ConfigurationError, match="expected distil head exit"):
        build_simulation(given)
