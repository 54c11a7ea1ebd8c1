"""Out-of-Client drift: counted by hand on eight samples, with a gate and without."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from server.training.recipe.partition import RhoTest
from server.training.recipe.recipe import read_recipe
from server.training.report.evaluate import Evaluator
from server.training.report.report import report_of
from server.training.run.run import Simulation
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds


def simulation_of(method: str, split: str = "local", rho: float = 0.4) -> Simulation:
    return build_simulation(
        read_recipe(
            {
                "method": method,
                "data": {"name": "digits", "clients": 2, "train_max": 90, "test_max": 30}
                | {"split": split},
                "train": {
                    "backbone": "tiny",
                    "rounds": 1,
                    "learning_rate": 0.1,
                    "batch": 20,
                    "depth": 2,
                },
                "evaluate": {"rho": rho},
            }
        )
    )


def of_eight(simulation: Simulation) -> Simulation:
    """A server that always says 9; exits that say 0 and are not sure: p = 0.8, entropy 0.94.

    Own samples, drift and held-out samples of the two, by their labels:

        client-0    0 0 0 9    9 9 9 1    0 0 9
        client-1    9 9 9 1    9 9 9 0    9 9 0
    """
    with torch.no_grad():
        last = [m for m in simulation.state.net.head.modules() if isinstance(m, nn.Linear)][-1]
        last.weight.zero_()
        last.bias.copy_(nn.functional.one_hot(torch.tensor(9), 10).float())
    bias = torch.zeros(10)
    bias[0] = math.log(36)  # 0.8 against 0.2 / 9 each
    simulation.state.write({"exit2.2.weight": torch.zeros(10, 64), "exit2.2.bias": bias})
    labels = np.array([0, 0, 0, 9, 9, 9, 9, 1])
    tests = [
        RhoTest(np.arange(4), np.arange(4, 8)),
        RhoTest(np.arange(4, 8), np.array([3, 3, 3, 0])),
    ]
    named = dict(zip(simulation.clients, tests, strict=True))
    held_out = {"client-0": np.arange(3), "client-1": np.arange(3, 6)}
    return replace(
        simulation,
        x_test=simulation.x_test[:8],
        y_test=labels,
        tests=named,
        x_held_out=simulation.x_test[:6],
        y_held_out=np.array([0, 0, 9, 9, 9, 0]),
        held_out=held_out,
    )


@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_drift_moves_the_oracles_thresholds_alone(rho: float) -> None:
    """client-0: by exits alone 3 of 4 and 3 of 8, by the server alone 1 of 4 and 4 of 8.
    client-1: by exits alone none and 1 of 8, by the server alone 3 of 4 and 6 of 8.

    Held-out samples have client-0 exit (2 of 3) and client-1 ask the server (2 of 3). For both
    together either is right in 3 of 6, and the looser threshold is taken: exit.
    """
    found = Evaluator(of_eight(simulation_of("multi-exit", rho=rho))).drift(supervised=True)
    assert found == {
        "without_drift": 3 / 4,
        "with_drift": (3 / 8 + 6 / 8) / 2,
        "by_threshold": {
            "held_out": {"without_drift": 3 / 4, "with_drift": (3 / 8 + 6 / 8) / 2},
            "fleet": {"without_drift": (3 / 4 + 0) / 2, "with_drift": (3 / 8 + 1 / 8) / 2},
            "oracle": {"without_drift": 3 / 4, "with_drift": (4 / 8 + 6 / 8) / 2},
        },
        "each": {
            "client-0": {"without_drift": 3 / 4, "with_drift": 3 / 8},
            "client-1": {"without_drift": 3 / 4, "with_drift": 6 / 8},
        },
    }


def test_without_a_gate_the_server_answers_all() -> None:
    found = Evaluator(of_eight(simulation_of("splitfed-v2"))).drift(supervised=True)
    assert found is not None
    assert found["by_threshold"] is None
    assert (found["without_drift"], found["with_drift"]) == ((1 / 4 + 3 / 4) / 2, (4 + 6) / 16)


@pytest.mark.parametrize("split", ["local", "global"])
def test_a_report_has_it_where_clients_have_tests_of_their_own(split: str) -> None:
    simulation = simulation_of("fedavg", split)
    rows: list[dict[str, Any]] = []
    list(run_rounds(simulation, rows))
    found = report_of(simulation, rows)["final"]["out_of_client"]
    assert (found is None) == (split == "global")
    if found is not None:
        assert found["each"].keys() == simulation.clients.keys()
