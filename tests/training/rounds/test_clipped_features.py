"""Features beyond half precision's range are clipped and counted, whatever codec carries them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from edge_sdk.errors import FrameError
from server.training.recipe.recipe import read_recipe
from server.training.rounds.reply_checks import LARGEST_FEATURE, clip_features
from server.training.run.run import Simulation
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds


def simulation_of(codec: str, scale: float) -> Simulation:
    """Two clients whose first weights are that many times too large, and who learn nothing."""
    recipe: dict[str, Any] = {
        "method": "splitfed-v1",
        "data": {"name": "digits", "clients": 2, "train_max": 80, "test_max": 20, "held_out": 0},
        "train": {"backbone": "tiny", "rounds": 1, "learning_rate": 1e-30, "batch": 16, "depth": 2}
        | {"codec": codec},
    }
    simulation = build_simulation(read_recipe(recipe))
    first = "stage1.0.weight"
    simulation.state.write({first: simulation.state.read()[first] * scale})
    return simulation


def beyond(simulation: Simulation) -> dict[str, int]:
    """Values of each client's features that half precision cannot hold."""
    prefix = simulation.state.net.prefix(2).eval()
    with torch.no_grad():
        z = {name: prefix(torch.from_numpy(c.x)) for name, c in simulation.clients.items()}
    return {name: int((each.abs() > 65504).sum()) for name, each in z.items()}


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
def test_a_client_whose_features_overflow_stays_in_the_round(codec: str) -> None:
    simulation = simulation_of(codec, 3e5)
    expected, rows = beyond(simulation), list[dict[str, Any]]()
    assert min(expected.values()) > 100
    for _ in run_rounds(simulation, rows):
        pass
    (row,) = rows
    assert row["participants"] == list(simulation.clients)
    assert (row["refused"], row["missing"]) == ({}, [])
    if codec == "int8":  # rounds values to 256 steps, so a few cross the end of the range
        assert row["clipped"] == {n: pytest.approx(v, rel=0.05) for n, v in expected.items()}
    else:
        assert row["clipped"] == expected
    assert np.isfinite(row["loss"])


def test_nothing_is_counted_where_features_fit() -> None:
    simulation, rows = simulation_of("fp16", 1.0), list[dict[str, Any]]()
    for _ in run_rounds(simulation, rows):
        pass
    assert rows[0]["clipped"] == {}


def test_what_is_not_finite_is_still_refused() -> None:
    values = torch.tensor([[1.0, -7e4, 65504.0]])
    clipped, count = clip_features(values, "features")
    assert clipped.tolist() == [[1.0, -LARGEST_FEATURE, 65504.0]]
    assert count == 2
    for wrong in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(FrameError, match="features: expected finite values"):
            clip_features(torch.tensor([[1.0, wrong]]), "features")
