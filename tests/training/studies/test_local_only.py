"""Clients trained alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from torch import nn

from benchmarks.jobs.clock import Clock, OutOfTimeError
from benchmarks.paper.local_only import KeptAlone, local_only_accuracies, local_only_scores
from edge_sdk.nets import build
from edge_sdk.state import StateLock
from server.training.recipe.recipe import read_recipe
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds

RECIPE: dict[str, Any] = {
    "method": "splitlpf",
    "data": {"name": "digits", "clients": 2, "train_max": 40, "test_max": 100},
    "train": {
        "backbone": "tiny",
        "rounds": 3,
        "learning_rate": 0.2,
        "batch": 99,
        "depth": 2,
        "memory_format": "contiguous",
    },
    "evaluate": {"rho": 0.0},
}


def test_a_client_alone_is_plain_sgd_on_its_own_samples() -> None:
    recipe = read_recipe(RECIPE)
    scores = local_only_scores(recipe)
    simulation = build_simulation(recipe)
    for name, score in zip(simulation.clients, scores, strict=True):
        client, plan = simulation.clients[name], simulation.plans[name]
        net = build("tiny", classes=10, input_shape=(1, 8, 8), mean=plan.mean, std=plan.std, seed=0)
        optimiser = torch.optim.SGD(net.parameters(), 0.2)
        for _ in range(3):  # one batch a round, of all samples
            optimiser.zero_grad()
            logits = net(torch.from_numpy(client.x))
            nn.functional.cross_entropy(logits, torch.from_numpy(client.y)).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimiser.step()
        known = np.isin(simulation.y_test, np.unique(client.y))
        with torch.no_grad():
            answers = net.eval()(torch.from_numpy(simulation.x_test[known])).argmax(1).numpy()
        assert score.client == name
        assert score.inside.samples == known.sum()
        # an answer may turn where two logits are equal up to the order of additions
        assert score.inside.correct == pytest.approx(
            (answers == simulation.y_test[known]).sum(), abs=1
        )


def test_one_client_with_the_others_is_as_good_as_alone() -> None:
    one = {"method": "fedavg", "data": RECIPE["data"] | {"clients": 1}}
    recipe = read_recipe(RECIPE | one)
    (score,) = local_only_scores(recipe)
    rows: list[Any] = []
    for _ in run_rounds(build_simulation(recipe), rows):
        pass
    assert score.inside.accuracy == rows[-1]["accuracy"]


class Ending(Clock):
    """A time that is over after so many checks."""

    def __init__(self, checks: int) -> None:
        super().__init__()
        self._left = checks

    def check(self, next_s: float = 0.0) -> None:
        """Count, and end."""
        self._left -= 1
        if self._left < 0:
            raise OutOfTimeError


def test_clients_that_were_trained_before_a_stop_are_kept(tmp_path: Path) -> None:
    recipe = read_recipe(RECIPE)
    folder, rounds = tmp_path / "alone", recipe.train.rounds
    with pytest.raises(OutOfTimeError):
        KeptAlone(recipe, "cpu", folder, tmp_path, Ending(rounds)).accuracies()
    (path,) = folder.iterdir()
    assert list(orjson.loads(path.read_bytes())) == ["client-0"]
    kept = KeptAlone(
        recipe, "cpu", folder, tmp_path, Ending(rounds)
    )  # enough for the other client alone
    assert kept.accuracies() == local_only_accuracies(recipe)


def test_a_second_process_begins_with_the_last_client(tmp_path: Path) -> None:
    recipe = read_recipe(RECIPE)
    with pytest.raises(OutOfTimeError):
        KeptAlone(recipe, "cpu", tmp_path / "alone", tmp_path, Ending(0)).accuracies()
    (lock,) = tmp_path.glob("alone-*")
    kept = KeptAlone(recipe, "cpu", tmp_path / "alone", tmp_path, Ending(recipe.train.rounds))
    with StateLock(lock, "simulation"), pytest.raises(OutOfTimeError):
        kept.accuracies()
    (path,) = (tmp_path / "alone").iterdir()
    assert list(orjson.loads(path.read_bytes())) == ["client-1"]
