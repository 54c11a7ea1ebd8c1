"""Second views for alignment, and exit heads that learn evidence, on clients that do not adapt."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edge_sdk.errors import ConfigurationError
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.formulas.evidential_loss import EvidentialLoss
from edge_sdk.training.protocol.client_part import ClientPart, MetaAdaptation, Noise
from edge_sdk.training.protocol.messages import (
    EndRound,
    Features,
    Feedback,
    StartRound,
    Step,
    Update,
)
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.training import Training
from edge_sdk.training.protocol.weights import read_weights
from server.training.recipe.recipe import read_recipe
from server.training.report.evaluate import Evaluator
from server.training.rounds.reply_checks import shapes_fault
from server.training.simulation.build import build_simulation

CLASSES, BATCH, RATE = 4, 6, 0.05


def plan_for(net: str = "tiny", depth: int = 2, codec: Any = "fp32", **part: Any) -> Plan:
    shape = {"tiny": (1, 8, 8), "resnet18": (1, 28, 28)}[net]
    return Plan(
        net,
        shape,
        CLASSES,
        (0.0,),
        (1.0,),
        depth,
        Training(RATE, BATCH, codec=codec),
        part=ClientPart(**part),
        seed=7,
    )


def client_of(plan: Plan, samples: int = 12) -> TrainingClient:
    generator = np.random.default_rng(3)
    x = generator.standard_normal((samples, *plan.input_shape)).astype(np.float32)
    return TrainingClient("ada", x, generator.integers(0, CLASSES, samples))


def first_features(plan: Plan, client: TrainingClient, number: int = 1) -> Features:
    net = network_of(plan)
    weights = read_weights(net.prefix(plan.depth))
    if plan.part.exit_head:
        heads = read_weights(net.exit_head(plan.depth))
        weights |= {f"exit{plan.depth}.{name}": tensor for name, tensor in heads.items()}
    client.handle(StartRound(number, plan, weights))
    reply = client.handle(Step(number, 0))
    assert isinstance(reply, Features)
    return reply


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_view_equals_that_of_a_harmony_client_with_0_steps(codec: str) -> None:
    exit_part: dict[str, Any] = {"exit_head": True, "fusion": "fixed", "views": True}
    plain = plan_for(codec=codec, **exit_part)
    meta = MetaAdaptation(steps=0, early=False)
    theirs = first_features(plan_for(codec=codec, **exit_part, meta=meta), client_of(plain))
    ours = first_features(plain, client_of(plain))
    for name in ("view", "view_ranges", "same"):
        mine, its = getattr(ours, name), getattr(theirs, name)
        assert (mine is None) == (its is None)
        assert mine is None or torch.equal(mine, its)
    assert ours.entry == theirs.entry == 2
    assert ours.same is not None
    assert 0 < int(ours.same.sum()) < BATCH


def test_a_view_changes_nothing_that_the_client_learns() -> None:
    """BatchNorm's statistics too: those of the second view are no part of the update."""
    updates = []
    for views in (False, True):
        plan = plan_for("resnet18", 1, views=views)
        client = client_of(plan)
        got = first_features(plan, client)
        feedback = Feedback(torch.ones_like(got.features), 0.0)
        updates.append(client.handle(EndRound(1, feedback)))
    plain, ours = updates
    assert isinstance(plain, Update)
    assert isinstance(ours, Update)
    assert any("running_var" in name for name in plain.weights)
    assert all(torch.equal(ours.weights[name], t) for name, t in plain.weights.items())


@pytest.mark.parametrize(
    ("views", "entry", "expected"),
    [
        (False, 2, "view: expected none, nothing is aligned by it"),
        (True, 1, "view: expected an entry depth of 2 to 2, got 1"),
        (True, 2, None),
    ],
)
def test_a_view_that_no_plan_asks_for_is_refused(views: bool, entry: int, expected: str) -> None:
    plan = plan_for(views=True)
    got = first_features(plan, client_of(plan))
    told = replace(plan, part=ClientPart(views=views))
    fault = shapes_fault(replace(got, entry=entry), told, network_of(plan).shape_at)
    assert fault == expected


def dirichlet_loss(logits: Tensor, labels: Tensor, weight: float) -> Tensor:
    """BESplit, Eq. 5, by torch's own distributions: mean over the samples."""
    alpha = logits.double().exp() + 1  # no logit here is near 10
    true = nn.functional.one_hot(labels, CLASSES).double()
    fit = (true * (alpha.sum(1, keepdim=True).digamma() - alpha.digamma())).sum(1)
    others = torch.distributions.Dirichlet(true + (1 - true) * alpha)
    uniform = torch.distributions.Dirichlet(torch.ones(CLASSES, dtype=torch.float64))
    return (fit + weight * torch.distributions.kl_divergence(others, uniform)).mean()


def test_an_exit_behind_an_evidential_gate_learns_by_eq_5() -> None:
    """One batch in round 3 of 10: lam_t = 0.003; the head's step and the loss that is reported."""
    plan = plan_for(exit_head=True, fusion="equal", evidence=EvidentialLoss())
    client = client_of(plan, BATCH)
    got = first_features(plan, client, 3)
    net = deepcopy(network_of(plan))
    assert got.labels is not None
    head = net.exit_head(2)
    loss = dirichlet_loss(head(got.features), got.labels, 0.003)
    assert got.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    found = torch.autograd.grad(loss, list(head.parameters()))
    update = client.handle(EndRound(3))
    assert isinstance(update, Update)
    for (name, before), gradient in zip(head.named_parameters(), found, strict=True):
        stepped = before - RATE * gradient
        torch.testing.assert_close(update.weights[f"exit2.{name}"], stepped, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"views": True, "whole": True}, "views: expected none where nothing is cut"),
        ({"views": True, "noise": Noise(1.0, 1.0)}, "none where a second view"),
        (
            {"evidence": EvidentialLoss()},
            "evidence: expected none where no exit head learns evidence",
        ),
        ({"evidence_rounds": 0, "exit_head": True, "fusion": "tpgf"}, "of at least 1, got 0"),
    ],
)
def test_parts_that_exclude_each_other_are_refused(part: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        ClientPart(**part)


def test_an_evidential_gate_goes_by_vacuity() -> None:
    """Exits with no evidence at all but for class 0, of which they have much: N / S by hand."""
    world = build_simulation(
        read_recipe(
            {
                "method": "multi-exit",
                "parts": {"gate": "besplit"},
                "data": {"name": "digits", "clients": 2, "train_max": 100, "test_max": 60},
                "train": {
                    "backbone": "tiny",
                    "rounds": 1,
                    "learning_rate": 0.1,
                    "batch": 20,
                    "depth": 2,
                },
            }
        )
    )
    bias = torch.full((10,), -100.0)
    bias[0] = math.log(30)  # so S = 40 and vacuity 10 / 40
    world.state.write({"exit2.2.weight": torch.zeros(10, 64), "exit2.2.bias": bias})
    for found in Evaluator(world).clients(supervised=True):
        # of the grid, as shares of ln 10 = 2.3026, the first above 0.25 is 0.8: 0.347
        assert found.exit_rate in {0.0, 1.0}
        assert found.threshold is not None
        assert (found.threshold > 0.25) == (found.exit_rate == 1.0)
        assert found.threshold <= 2.3 / np.log(10)
