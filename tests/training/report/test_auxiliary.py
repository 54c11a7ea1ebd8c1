"""Measures of a run with auxiliary models and malignant classes, recomputed by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from edge_sdk.errors import ConfigurationError
from edge_sdk.training.client.auxiliary import build_auxiliary
from server.training.recipe.recipe import read_recipe
from server.training.report.evaluate import Evaluator
from server.training.report.metrics import benign_rate
from server.training.report.report import report_of
from server.training.run.run import Simulation
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds


def simulation_of(
    method: str = "besplit",
    participation: float = 1.0,
    *,
    auxiliary: str = "personal",
    depths: tuple[int, ...] = (2,),
    **data: Any,
) -> Simulation:
    recipe = {
        "method": method,
        "method_numbers": {"auxiliary": auxiliary} if method == "besplit" else {},
        "data": {"name": "digits", "clients": 3, "train_max": 120, "test_max": 60} | data,
        "train": {
            "backbone": "tiny",
            "rounds": 2,
            "learning_rate": 0.1,
            "batch": 16,
            "depths": depths,
        },
        "round": {"participation": participation, "quorum": 0.0},
    }
    return build_simulation(read_recipe(recipe))


def test_benign_rate_is_of_malignant_samples_alone() -> None:
    labels = np.array([0, 0, 1, 2, 2, 2])
    predictions = np.array([1, 0, 0, 2, 1, 0])
    # of 1 and 2: the 1 that is called 0, and of three 2s the one called 0; a 2 called 1 is an
    # error, but no missed one
    assert benign_rate(predictions, labels, {1, 2}) == 2 / 4
    assert benign_rate(predictions, labels, {0}) == 1 / 2
    assert benign_rate(predictions, labels, {0, 1, 2}) == 0
    assert math.isnan(benign_rate(predictions, labels, {7}))
    assert math.isnan(benign_rate(predictions, labels, ()))


def test_every_auxiliary_model_is_evaluated() -> None:
    simulation = simulation_of(malignant=[3, 8])
    assert Evaluator(simulation).auxiliary() is None  # none has been trained yet
    list(run_rounds(simulation, []))
    report = Evaluator(simulation).auxiliary()
    assert report is not None
    assert list(report["each"]) == list(simulation.clients)
    x = torch.from_numpy(simulation.x_test)
    rates = []
    for name, client in simulation.clients.items():
        model = build_auxiliary(simulation.plans[name]).eval()
        model.load(client.personal)
        with torch.no_grad():
            labels = model(x).argmax(1).numpy()
        assert report["each"][name] == pytest.approx((labels == simulation.y_test).mean())
        rates.append(benign_rate(labels, simulation.y_test, {3, 8}))
    assert report["accuracy"] == pytest.approx(np.mean(list(report["each"].values())))
    assert report["bmr"] == pytest.approx(np.mean(rates))


def test_averaged_ones_are_means_of_each_cut_s_clients_by_the_round_s_weights() -> None:
    """The first round's models are those that clients would have kept, and nothing else changes."""
    runs = {
        auxiliary: simulation_of(auxiliary=auxiliary, clients=5, depths=(2, 3))
        for auxiliary in ("personal", "averaged")
    }
    results = {auxiliary: run.loop.run_round(1, 0) for auxiliary, run in runs.items()}
    own, averaged = runs["personal"], runs["averaged"]
    weights = results["averaged"].weights
    assert weights == results["personal"].weights
    assert len(set(weights.values())) > 1
    assert sorted(averaged.state.auxiliaries) == [2, 3]
    for depth, model in averaged.state.auxiliaries.items():
        names = [name for name, plan in own.plans.items() if plan.depth == depth]
        total = sum(weights[name] for name in names)
        for key, tensor in model.read().items():
            mean = sum(weights[name] / total * own.clients[name].personal[key] for name in names)
            torch.testing.assert_close(tensor, mean)
    for name, tensor in own.state.read().items():
        assert torch.equal(averaged.state.read()[name], tensor)
    assert not any(client.personal for client in averaged.clients.values())
    report = Evaluator(averaged).auxiliary()
    assert report is not None
    assert list(report["each"]) == [f"client-{i}" for i in (0, 2, 4, 1, 3)]  # by cut
    x = torch.from_numpy(averaged.x_test)
    with torch.no_grad():
        right = averaged.state.auxiliaries[2](x).argmax(1).numpy() == averaged.y_test
    assert report["each"]["client-4"] == pytest.approx(right.mean())


def test_a_client_that_never_took_part_has_no_auxiliary_model() -> None:
    simulation = simulation_of(participation=0.34)
    simulation.loop.run_round(1, 0)
    report = Evaluator(simulation).auxiliary()
    assert report is not None
    assert len(report["each"]) == 1
    assert report["bmr"] is None


def test_a_report_names_both_models() -> None:
    simulation = simulation_of(malignant=[3])
    rows: list[dict[str, Any]] = []
    list(run_rounds(simulation, rows))
    final = report_of(simulation, rows)["final"]
    assert final["auxiliary"] == Evaluator(simulation).auxiliary()
    assert final["bmr"] == Evaluator(simulation).benign_rate()
    assert 0 <= final["bmr"] <= 1


@pytest.mark.parametrize("method", ["fedavg", "splitfed-v1"])
def test_other_methods_have_the_whole_network_alone(method: str) -> None:
    simulation = simulation_of(method, malignant=[3, 8])
    list(run_rounds(simulation, []))
    assert Evaluator(simulation).auxiliary() is None
    labels = Evaluator(simulation).labels(simulation.state.net)
    assert (labels == simulation.y_test).mean() == Evaluator(simulation).accuracy(supervised=True)
    assert Evaluator(simulation).benign_rate() == benign_rate(labels, simulation.y_test, {3, 8})


def test_malignant_classes_are_those_of_the_data() -> None:
    with pytest.raises(ConfigurationError, match="malignant: expected classes from 0 to 9, got 10"):
        simulation_of(malignant=[1, 10])
    with pytest.raises(ConfigurationError, match="malignant: expected a whole number"):
        simulation_of(malignant=[-1])
