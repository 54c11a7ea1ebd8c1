"""Companions: a round without one is SplitFed's, and those that a plan asks for train together."""

from __future__ import annotations

from copy import deepcopy
from itertools import combinations
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import Tensor

from edge_sdk.bundles.namespaces import AUXILIARY, BACK
from edge_sdk.errors import ConfigurationError, FrameError
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.client.auxiliary import build_auxiliary
from edge_sdk.training.client.client_round import ClientRound
from edge_sdk.training.client.companion import Companion
from edge_sdk.training.formulas.distillation import kd_client, kd_global
from edge_sdk.training.formulas.evidence import evidential_losses
from edge_sdk.training.formulas.evidential_loss import EvidentialLoss
from edge_sdk.training.protocol.client_part import (
    EXCLUSIONS,
    ClientPart,
    Distillation,
    Inversion,
    MetaAdaptation,
    Noise,
    PersonalBack,
)
from edge_sdk.training.protocol.messages import (
    EndRound,
    Feedback,
    FinishAlone,
    Outputs,
    StartRound,
    Step,
    Update,
    Weights,
)
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.training import Training
from edge_sdk.training.protocol.weights import read_weights

DEPTH, CLASSES, RATE = 2, 3, 0.1


def plan_of(**part: Any) -> Plan:
    return Plan(
        backbone="tiny", input_shape=(1, 8, 8), classes=CLASSES, mean=(0.0,), std=(1.0,),
        depth=DEPTH, training=Training(RATE, 4, momentum=0.9, weight_decay=1e-3), seed=3,
        part=ClientPart(**part),
    )  # fmt: skip


def client_of(samples: int = 12) -> TrainingClient:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(samples, 1, 8, 8)).astype(np.float32)
    return TrainingClient("ada", x, generator.integers(0, CLASSES, samples))


def start_of(plan: Plan) -> StartRound:
    return StartRound(1, plan, read_weights(network_of(plan).prefix(DEPTH)))


def gradient_of(step: int, shape: torch.Size) -> Tensor:
    """The gradient that the server returns for a step."""
    return 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(step))


def play(round_: ClientRound) -> Weights:
    """The weights after a round in which the server answers every step."""
    feedback = None
    for step in range(round_.batches.steps):
        features = round_.step(Step(1, step, feedback))
        feedback = Feedback(gradient_of(step, features.features.shape), 1.0)
    return round_.end(EndRound(1, feedback)).weights


def test_no_companion_equals_splitfed() -> None:
    plan, client = plan_of(), client_of()
    weights = play(ClientRound(client, start_of(plan)))
    assert not client.personal

    prefix = deepcopy(network_of(plan).prefix(DEPTH))
    optimiser = torch.optim.SGD(prefix.parameters(), RATE, momentum=0.9, weight_decay=1e-3)
    rows = np.random.default_rng([3, 1, crc32(b"ada")]).permutation(12)
    for step in range(3):
        z = prefix(torch.from_numpy(client.x[rows[4 * step : 4 * step + 4]]))
        optimiser.zero_grad()
        z.backward(gradient_of(step, z.shape))
        optimiser.step()
    expected = read_weights(prefix)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "part",
    [
        {},
        {"exit_head": True, "fusion": "tpgf", "clip": 0.5},
        {"distil": Distillation()},
        {"exit_head": True, "fusion": "fixed", "meta": MetaAdaptation(), "views": True},
    ],
)
def test_a_companion_that_does_nothing_changes_no_bit(part: dict[str, Any]) -> None:
    plan = plan_of(**part)
    plain, accompanied = client_of(), client_of()
    round_ = ClientRound(accompanied, start_of(plan))
    round_.companions = (*round_.companions, Companion())
    weights, expected = play(round_), play(ClientRound(plain, start_of(plan)))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert accompanied.personal.keys() == plain.personal.keys()
    for name, tensor in plain.personal.items():
        assert torch.equal(accompanied.personal[name], tensor), name


def test_an_auxiliary_model_learns_from_the_answers_of_the_personal_head() -> None:
    """One batch by hand: SplitLPF's last layer teaches BESplit's auxiliary model."""
    back = PersonalBack(dropout=0.0, follow_accuracy=False)
    plan = plan_of(distil=Distillation(evidence=EvidentialLoss(anneal_rounds=4)), back=back)
    client = client_of(4)
    round_ = ClientRound(client, start_of(plan))
    z = round_.step(Step(1, 0)).features
    classifier = deepcopy(network_of(plan).suffix(DEPTH).classifier)
    embeddings = torch.randn(4, classifier.in_features, generator=torch.Generator().manual_seed(1))
    reply = round_.answer(Outputs(1, 0, embeddings))
    round_.end(EndRound(1, Feedback(gradient_of(0, z.shape), reply.loss)))

    rows = np.random.default_rng([3, 1, crc32(b"ada")]).permutation(4)
    x, y = torch.from_numpy(client.x[rows]), torch.from_numpy(client.y[rows])
    with torch.no_grad():
        teacher = classifier(embeddings)  # as the last layer was before its own step
    twin = build_auxiliary(plan)
    features = twin.extractor(x)
    logits = twin.head(features)
    loss = (
        evidential_losses(logits, y, 0.01 / 4).mean()
        + 0.2 * kd_client(features, z, 5.0)
        + 0.3 * kd_global(logits, teacher, 5.0)
    )
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    torch.optim.SGD(twin.parameters(), RATE, momentum=0.9, weight_decay=1e-3).step()
    for name, tensor in AUXILIARY.select(twin.read()).items():
        kept = AUXILIARY.select(client.personal)[name]
        torch.testing.assert_close(kept, tensor, rtol=1e-5, atol=1e-7)
    assert not torch.equal(BACK.select(client.personal)["weight"], classifier.weight)


def test_of_several_companions_one_that_learns_alone_is_enough_to_go_on() -> None:
    client = client_of()
    client.handle(start_of(plan_of(distil=Distillation(), back=PersonalBack())))
    client.handle(Step(1, 0))
    update = client.handle(FinishAlone(1))
    assert isinstance(update, Update)
    assert (update.steps, update.supervised) == (0, 0)
    assert AUXILIARY.select(client.personal)
    lone = client_of()
    lone.handle(start_of(plan_of(back=PersonalBack(), inversion=Inversion())))
    lone.handle(Step(1, 0))
    with pytest.raises(FrameError, match="without an exit head cannot go on alone"):
        lone.handle(FinishAlone(1))


def test_an_auxiliary_model_and_a_guard_change_nothing_of_each_other() -> None:
    """The guard pulls at the prefix; the auxiliary model has only its features."""
    guard, distil = Inversion(threshold=0.0), Distillation()
    both, guarded = client_of(), client_of()
    weights = play(ClientRound(both, start_of(plan_of(inversion=guard, distil=distil))))
    expected = play(ClientRound(guarded, start_of(plan_of(inversion=guard))))
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    for name, tensor in guarded.personal.items():
        assert torch.equal(both.personal[name], tensor), name
    assert AUXILIARY.select(both.personal)


PARTS: dict[str, dict[str, Any]] = {
    "whole": {"whole": True},
    "exit_head": {"exit_head": True},
    "distil": {"distil": Distillation()},
    "back": {"back": PersonalBack()},
    "frozen": {"frozen": True},
    "bottleneck": {"bottleneck": 4},
    "inversion": {"inversion": Inversion()},
    "views": {"views": True},
    "meta": {"meta": MetaAdaptation(), "exit_head": True, "fusion": "fixed"},
    "noise": {"noise": Noise(1.0, 1.0)},
}


@pytest.mark.parametrize(("part", "other", "reason"), EXCLUSIONS)
def test_parts_that_exclude_each_other_are_refused_with_the_reason(
    part: str, other: str, reason: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ClientPart(**PARTS[part] | PARTS[other])
    assert str(caught.value) == f"{part}: expected none where {reason}"


def test_all_other_pairs_of_parts_combine() -> None:
    excluded = {frozenset(pair[:2]) for pair in EXCLUSIONS}
    implied = {frozenset({"meta", part}) for part in ("whole", "frozen")}  # meta has an exit head
    for pair in combinations(PARTS, 2):
        if frozenset(pair) not in excluded | implied:
            ClientPart(**PARTS[pair[0]] | PARTS[pair[1]])


def test_the_reason_is_a_sentence() -> None:
    adapting = "expected none where the client adapts \\(meta\\): "
    with pytest.raises(
        ConfigurationError, match=f"inversion: {adapting}features come from adapted"
    ):
        ClientPart(**PARTS["meta"] | PARTS["inversion"])
    with pytest.raises(ConfigurationError, match=f"back: {adapting}the adaptation answers the"):
        ClientPart(**PARTS["meta"] | PARTS["back"])
