"""Clients score the network on their own held-out samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from edge_sdk.errors import FrameError
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.data.load import load_dataset
from edge_sdk.training.protocol.client_part import ClientPart, PersonalBack
from edge_sdk.training.protocol.messages import Evaluate, Scores
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.training import Training
from edge_sdk.training.protocol.weights import read_weights, tensors_of

DATA = load_dataset("digits")
X, Y = DATA.x_test[:150], DATA.y_test[:150]


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
