"""A refit of a client's own last layer: against a loop by hand, and what it leaves as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from edge_sdk.errors import ConfigurationError
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.client.fine_tuning import refitted_back
from edge_sdk.training.data.load import load_dataset
from edge_sdk.training.protocol.client_part import ClientPart, PersonalBack
from edge_sdk.training.protocol.fine_tuning import FineTuning
from edge_sdk.training.protocol.messages import Evaluate, Scores
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.training import Training
from edge_sdk.training.protocol.weights import read_weights, tensors_of
from edge_sdk.training.streams import Stream
from server.training.methods.splitlpf import splitlpf
from tests.training.client.test_evaluate import plan_with as plan_of

DATA = load_dataset("digits")
SAMPLES = 50


def plan_with(**back: Any) -> Plan:
    plan = plan_of(ClientPart(back=PersonalBack(**back)))
    return replace(plan, training=Training(0.1, 20, momentum=0.5))


def client(back: nn.Linear) -> TrainingClient:
    held_out = DATA.x_test[:100], DATA.y_test[:100]
    found = TrainingClient("pi", DATA.x_train[:SAMPLES], DATA.y_train[:SAMPLES], held_out=held_out)
    found.personal = {f"back.{name}": t.clone() for name, t in tensors_of(back).items()}
    return found


@pytest.fixture
def base() -> nn.Module:
    """A network up to the embeddings, of other weights than the plan's seed gives."""
    net = network_of(replace(plan_with(), seed=6))
    return nn.Sequential(net.prefix(2), net.suffix(2).neck)


@pytest.fixture
def own() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(64, 10)


def by_hand(base: nn.Module, own: nn.Linear, rate: float, epochs: int) -> torch.Tensor:
    """Softmax regression with momentum, its gradient as (p - y) e^T / B."""
    with torch.no_grad():
        e = base.eval()(torch.from_numpy(DATA.x_train[:SAMPLES])).double()
    y = torch.nn.functional.one_hot(torch.from_numpy(DATA.y_train[:SAMPLES]), 10).double()
    w = torch.cat([own.weight, own.bias[:, None]], 1).detach().double()
    velocity = torch.zeros_like(w)
    generator = Stream.REFIT.generator(5, client="pi")
    for _ in range(epochs):
        order = generator.permutation(SAMPLES)
        for rows in (order[:20], order[20:40], order[40:]):
            inputs = torch.cat([e[rows], torch.ones(len(rows), 1, dtype=torch.float64)], 1)
            p = torch.softmax(inputs @ w.T, 1)
            velocity = 0.5 * velocity + (p - y[rows]).T @ inputs / len(rows)
            w = w - rate * velocity
    return w


@pytest.mark.parametrize(("accuracy", "rate"), [(None, 0.1), (0.75, 0.025)])
def test_refit_is_softmax_regression_on_the_networks_embeddings(
    base: nn.Module, own: nn.Linear, accuracy: float | None, rate: float
) -> None:
    """The rate follows the accuracy of the last round, as it does in training."""
    device = client(own)
    if accuracy is not None:
        device.personal["back.accuracy"] = torch.tensor(accuracy)
    found = refitted_back(device, plan_with(dropout=0.0), base, 2)
    expected = by_hand(base, own, rate, 2)
    assert (expected[:, :-1] - own.weight).abs().max() > 1e-3
    torch.testing.assert_close(found.weight.double(), expected[:, :-1], atol=1e-6, rtol=0)
    torch.testing.assert_close(found.bias.double(), expected[:, -1], atol=1e-6, rtol=0)


def test_refit_changes_neither_the_network_nor_what_the_client_keeps(
    base: nn.Module, own: nn.Linear
) -> None:
    device, before = client(own), read_weights(base)
    base.train()
    first, again = (refitted_back(device, plan_with(), base, 1) for _ in range(2))
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, own.weight)
    assert torch.equal(device.personal["back.weight"], own.weight)
    assert base.training
    assert all(torch.equal(before[name], t) for name, t in read_weights(base).items())
    assert torch.equal(refitted_back(device, plan_with(), base, 0).weight, own.weight)


def test_dropout_leaves_out_its_share_of_the_embeddings(base: nn.Module, own: nn.Linear) -> None:
    device = client(own)
    with_, without = (
        refitted_back(device, plan_with(dropout=share), base, 1).weight for share in (0.5, 0.0)
    )
    assert not torch.allclose(with_, without, atol=1e-3)


def test_a_device_answers_with_the_refitted_layer_and_trains_on_from_the_other(
    base: nn.Module, own: nn.Linear
) -> None:
    device, plan = client(own), plan_with()
    device.fine_tuning = FineTuning(refit_epochs=3)
    net = network_of(replace(plan, seed=6))
    scores = device.handle(Evaluate(1, plan, read_weights(net.segment(0, None))))
    assert isinstance(scores, Scores)
    back = refitted_back(client(own), plan, base, 3)
    with torch.no_grad():
        labels = back(base(torch.from_numpy(DATA.x_test[:100]))).argmax(1).numpy()
    assert scores.right == int((labels == DATA.y_test[:100]).sum())
    assert torch.equal(device.personal["answers2.back.weight"], back.weight)
    assert torch.equal(device.personal["back.weight"], own.weight)


def test_a_device_without_held_out_samples_refits_too(own: nn.Linear) -> None:
    device, plan = client(own), plan_with()
    device.held_out, device.fine_tuning = None, FineTuning(refit_epochs=1)
    net = network_of(plan)
    device.handle(Evaluate(1, plan, read_weights(net.segment(0, None))))
    assert not np.array_equal(device.personal["answers2.back.weight"], own.weight.detach())


def test_wrong_numbers_of_passes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="refit_epochs: expected a whole number"):
        splitlpf(refit_epochs=-1)
    assert splitlpf(refit_epochs=2).fine_tuning == FineTuning(refit_epochs=2)
