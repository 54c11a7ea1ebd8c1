"""Scores that a run collects from its devices, and the cost of training that they report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from edge_sdk.errors import FrameError
from edge_sdk.training.data.load import load_dataset
from edge_sdk.training.device.work_meter import WorkMeter
from edge_sdk.training.protocol.messages import Scores, from_bytes, to_bytes
from edge_sdk.training.protocol.weights import tensors_of
from profiles import DeviceProfile, load_reference
from profiles.energy import EnergyMeter, PowerModel
from server.training.recipe.recipe import read_recipe
from server.training.report.device_scores import ask_scores, energy_of, scores_fault, summarise
from server.training.report.own_backs import own_back
from server.training.rounds.traffic import TrafficCounter
from server.training.rounds.transport import LocalTransport
from server.training.simulation.build import build_simulation

DATA = load_dataset("digits")
X, Y = DATA.x_test[:150], DATA.y_test[:150]
RECIPE: dict[str, Any] = {
    "method": "supersfl",
    "data": {"name": "digits", "clients": 2},
    "train": {
        "backbone": "tiny",
        "rounds": 1,
        "batch": 32,
        "learning_rate": 0.1,
        "depth": 2,
    },
}


def test_real_devices_scores_are_those_of_the_simulation(make_trainer: Callable[..., Any]) -> None:
    world = build_simulation(read_recipe(RECIPE))
    names = list(world.clients)
    for at, device in enumerate(world.clients.values()):
        device.held_out = (X[at::2], Y[at::2])
    world.loop.run_round(1, 0)
    trainer = make_trainer()
    trainer.join(world.clients)
    profiles = dict.fromkeys(names, load_reference("raspberry-pi-4"))
    ledger = TrafficCounter()
    scores = ask_scores(world, trainer.transport, profiles, 1, ledger)
    size = sum(t.numel() * 4 for t in tensors_of(world.state.net.segment(0, None)).values())
    assert ledger.by_kind == {"down weights": 2 * size}
    assert [score.device for score in scores] == names
    net = world.state.net.eval()
    for at, score in enumerate(scores):
        with torch.no_grad():
            answers = net(torch.from_numpy(X[at::2])).argmax(1).numpy()
        assert (score.whole.samples, score.whole.correct) == (75, int((answers == Y[at::2]).sum()))
        assert score.alone is not None
        assert score.energy.seconds > 0
    summary = summarise(scores, alone=False)
    assert summary.accuracy_id == pytest.approx(
        np.mean([score.whole.correct / 75 for score in scores])
    )
    (row, _) = (score.to_dict() for score in scores)
    assert row["accuracy_id"] == scores[0].whole.accuracy
    assert row["energy_source"] in {"rapl", "ina", "declared"}


def test_a_device_refits_its_last_layer_as_the_simulation_does_after_a_decay() -> None:
    train = RECIPE["train"] | {"rounds": 3, "decay": 0.5}
    method = {"method": "splitlpf", "method_numbers": {"refit_epochs": 1}}
    world = build_simulation(read_recipe(RECIPE | method | {"train": train}))
    # a quarter of the rate without a decay: that of the third round
    slower = train | {"learning_rate": 0.025, "decay": 1.0}
    by_hand = build_simulation(read_recipe(RECIPE | method | {"train": slower}))
    for device in world.clients.values():
        device.fine_tuning = world.method.fine_tuning
    profiles = dict.fromkeys(world.clients, load_reference("raspberry-pi-4"))
    ask_scores(world, LocalTransport(world.clients), profiles, 3, TrafficCounter())
    for name, device in world.clients.items():
        assert torch.equal(
            device.personal["answers2.back.weight"], own_back(by_hand, name).weight
        ), name


def test_energy_is_measured_or_comes_from_the_boards_model() -> None:
    """2.7 W idle and 6.4 W busy: 100 s with half the cores busy are 100 * (2.7 + 0.5 * 3.7) J."""
    board = load_reference("raspberry-pi-4")
    assert board.cores == 4
    modelled = energy_of(Scores(1, 10, 5, None, 100.0, 200.0), board)
    assert modelled.source == "declared"
    assert modelled.joules == pytest.approx(455.0)
    measured = energy_of(Scores(1, 10, 5, None, 100.0, 200.0, 321.0, "ina"), board)
    assert (measured.joules, measured.source) == (321.0, "ina")
    unknown: DeviceProfile = replace(board, name="toaster")
    nothing = energy_of(Scores(1, 10, 5, None, 100.0, 200.0), unknown)
    assert (nothing.joules, nothing.source) == (None, "none")
    assert "toaster" in nothing.detail


def test_only_work_is_counted() -> None:
    now = 0.0
    always = PowerModel(2.0, 2.0, "always 2 W")
    with EnergyMeter(declared=always, clock=lambda: now) as meter:
        spent = WorkMeter(meter)
        for begin, end in ((5.0, 7.0), (30.0, 31.0)):
            now = begin
            with spent.working():
                now = end
        assert spent.seconds == pytest.approx(3.0)
        if meter.source == "declared":  # where this machine has no counters of its own
            assert spent.joules == pytest.approx(6.0)


def test_scores_travel_and_impossible_ones_do_not_count() -> None:
    scores = Scores(3, 10, 7, 6, 1.5, 2.5, 3.5, "rapl")
    assert from_bytes(to_bytes(scores)) == scores
    assert scores_fault(scores) is None
    assert scores_fault(replace(scores, right=11)) == "11 right of 10"
    assert scores_fault(replace(scores, right_exit=11)) == "11 right of 10"
    for impossible in (
        replace(scores, energy_j=-1.0),
        replace(scores, seconds=float("inf")),
        replace(scores, energy_j=1.7e308),  # two of them have no sum
        replace(scores, seconds=1.7e308),
        replace(scores, cpu_s=1e13),
    ):
        assert "numbers from 0 to 1e+12" in str(scores_fault(impossible))
    assert scores_fault(replace(scores, energy_j=1e12, seconds=1e12)) is None
    forged = to_bytes(scores).replace(b"rapl", b"moon")
    with pytest.raises(FrameError, match="source of energy"):
        from_bytes(forged)
