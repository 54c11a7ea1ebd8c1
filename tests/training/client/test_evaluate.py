"""Devices score the network on their own held-out samples, and report the cost of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from edge_sdk.errors import FrameError
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.data.load import load_dataset
from edge_sdk.training.device.work_meter import WorkMeter
from edge_sdk.training.protocol.messages import Evaluate, Scores, from_bytes, to_bytes
from edge_sdk.training.protocol.plan import ClientPart, PersonalBack, Plan, network_of
from edge_sdk.training.protocol.training import Training
from edge_sdk.training.protocol.weights import read_weights, tensors_of
from profiles import DeviceProfile, load_reference
from profiles.energy import EnergyMeter, PowerModel
from server.training.recipe.recipe import read_recipe
from server.training.report.device_scores import ask_scores, energy_of, scores_fault, summarise
from server.training.rounds.traffic import TrafficCounter
from server.training.simulation.build import build_simulation

DATA = load_dataset("digits")
X, Y = DATA.x_test[:150], DATA.y_test[:150]
RECIPE = {
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


def plan_with(part: ClientPart) -> Plan:
    return Plan(
        backbone="tiny",
        input_shape=(1, 8, 8),
        classes=10,
        mean=DATA.mean,
        std=DATA.std,
        depth=2,
        training=Training(0.1, 32),
        part=part,
        seed=5,
    )


def client() -> TrainingClient:
    return TrainingClient("pi", DATA.x_train[:96], DATA.y_train[:96], held_out=(X, Y))


def right(model: nn.Module) -> int:
    model.eval()
    with torch.no_grad():
        return int((model(torch.from_numpy(X)).argmax(1).numpy() == Y).sum())


def scores_of(client: TrainingClient, part: ClientPart, net: nn.Module) -> Scores:
    reply = client.handle(Evaluate(1, plan_with(part), read_weights(net)))
    assert isinstance(reply, Scores)
    return reply


@pytest.fixture
def other() -> Any:
    """A network of other weights than the plan's seed gives."""
    return network_of(replace(plan_with(ClientPart()), seed=6))


def test_device_counts_right_answers_of_the_network_it_is_sent(other: Any) -> None:
    net = other.segment(0, None)
    scores = scores_of(client(), ClientPart(), net)
    assert (scores.samples, scores.right, scores.right_exit) == (150, right(net), None)


def test_personal_exit_head_and_last_layer_are_used(other: Any) -> None:
    net = other.segment(0, None)
    device = client()
    head = network_of(replace(plan_with(ClientPart()), seed=7)).exit_head(2)
    device.personal = {f"exit2.{name}": t for name, t in tensors_of(head).items()}
    scores = scores_of(device, ClientPart(exit_head=True, fusion="tpgf"), net)
    assert scores.right == right(net)
    assert scores.right_exit == right(nn.Sequential(other.prefix(2), head))

    torch.manual_seed(3)
    back = nn.Linear(64, 10)
    device.personal = {f"back.{name}": t for name, t in tensors_of(back).items()}
    scores = scores_of(device, ClientPart(back=PersonalBack()), net)
    assert scores.right == right(nn.Sequential(other.prefix(2), other.suffix(2).neck, back))
    assert scores.right_exit is None


def test_prefix_is_mixed_with_the_personal_one_as_in_a_round(other: Any) -> None:
    net, device = other.segment(0, None), client()
    own = network_of(replace(plan_with(ClientPart()), seed=8)).prefix(2)
    device.personal = read_weights(own)
    scores = scores_of(device, ClientPart(personal_share=1.0), net)
    assert scores.right == right(nn.Sequential(own, other.suffix(2)))


def test_exit_head_is_mixed_with_the_personal_one_too(other: Any) -> None:
    own = network_of(replace(plan_with(ClientPart()), seed=8))
    marked = {f"exit2.{name}": t for name, t in tensors_of(own.exit_head(2)).items()}
    device = client()
    device.personal = read_weights(own.prefix(2)) | marked
    part = ClientPart(exit_head=True, fusion="fixed", personal_share=1.0)
    shared = {f"exit2.{name}": t for name, t in tensors_of(other.exit_head(2)).items()}
    sent = read_weights(other.segment(0, None)) | shared
    reply = device.handle(Evaluate(1, plan_with(part), sent))
    assert isinstance(reply, Scores)
    assert reply.right_exit == right(nn.Sequential(own.prefix(2), own.exit_head(2)))


def test_device_without_held_out_samples_scores_none_and_its_round_goes_on(other: Any) -> None:
    device = TrainingClient("pi", DATA.x_train[:96], DATA.y_train[:96])
    assert scores_of(device, ClientPart(), other.segment(0, None)) == Scores(1, 0, 0, None)
    narrow = TrainingClient("pi", X, Y, held_out=(X[:, :, :4], Y))
    with pytest.raises(FrameError, match="held-out data"):
        scores_of(narrow, ClientPart(), other.segment(0, None))
    with pytest.raises(FrameError, match="missing"):
        client().handle(Evaluate(1, plan_with(ClientPart()), {}))


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
    assert "numbers from 0 up" in str(scores_fault(replace(scores, energy_j=-1.0)))
    assert "numbers from 0 up" in str(scores_fault(replace(scores, seconds=float("inf"))))
    forged = to_bytes(scores).replace(b"rapl", b"moon")
    with pytest.raises(FrameError, match="source of energy"):
        from_bytes(forged)
