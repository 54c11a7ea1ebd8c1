"""Clients' own networks before the last average, against each client trained alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from edge_sdk.errors import ConfigurationError
from server.training.recipe.recipe import read_recipe
from server.training.report.evaluate import Evaluator
from server.training.report.report import report_of
from server.training.rounds.loop import RoundLoop
from server.training.run.run import Simulation
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds
from server.training.simulation.transport import MemoryTrimmingTransport


def recipe_of(method: str, rounds: int = 1, **tables: Any) -> dict[str, Any]:
    return {
        "method": method,
        "data": {"name": "digits", "clients": 3, "partition": "udds", "train_max": 200}
        | {"test_max": 200, "split": "own-mix"},
        "train": {"backbone": "tiny", "rounds": rounds, "learning_rate": 0.1, "batch": 16}
        | {"depth": 2, "momentum": 0.5, "epochs": 4},
        "evaluate": {"local": True, "rho": 0.1},
    } | tables


def trained(recipe: dict[str, Any]) -> tuple[Simulation, list[dict[str, Any]]]:
    simulation, rows = build_simulation(read_recipe(recipe)), list[dict[str, Any]]()
    for _ in run_rounds(simulation, rows):
        pass
    return simulation, rows


@pytest.mark.parametrize("method", ["splitlpf", "splitgp", "splitfed-v1", "fedavg"])
def test_local_models_are_those_of_each_client_trained_alone(method: str) -> None:
    """In the first round all start alike, so a client's networks do not depend on the others."""
    recipe = recipe_of(method)
    simulation, rows = trained(recipe)
    for name, accuracy in rows[-1]["local"]["each"].items():
        alone = build_simulation(read_recipe(recipe))
        transport = MemoryTrimmingTransport(alone.clients)
        RoundLoop(alone.method, {name: alone.plans[name]}, alone.state, transport).run_round(1, 0)
        scores = {score.client: score for score in Evaluator(alone).clients(supervised=True)}
        assert accuracy == pytest.approx(scores[name].accuracy)
    if method != "splitlpf":  # which takes more steps than these to beat one class
        averaged = Evaluator(simulation).clients(supervised=True)
        assert {score.client: score.accuracy for score in averaged} != rows[-1]["local"]["each"]


def test_scoring_them_changes_no_weight_and_is_in_the_report_once() -> None:
    recipe = recipe_of("splitlpf", 2)
    simulation, rows = trained(recipe)
    plain, _ = trained(recipe | {"evaluate": {"rho": 0.1}})
    before = plain.state.read()
    assert all(torch.equal(before[name], t) for name, t in simulation.state.read().items())
    assert "local" not in rows[0]
    final = report_of(simulation, rows)["final"]["local"]
    assert final["accuracy_clients"] == pytest.approx(sum(final["each"].values()) / 3)
    assert report_of(plain, rows[:1])["final"]["local"] is None


def test_clients_without_a_common_end_have_no_such_models() -> None:
    with pytest.raises(ConfigurationError, match=r"local: expected false with round\.buffer"):
        read_recipe(recipe_of("splitlpf", round={"buffer": 2}))
