"""The auxiliary model on the client: its size, what it learns from, and that it is never sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edge_sdk.bundles import namespaces
from edge_sdk.bundles.namespaces import AUXILIARY
from edge_sdk.errors import ConfigurationError, FrameError
from edge_sdk.nets.memory_format import set_format
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.client.auxiliary import Auxiliary, build_auxiliary
from edge_sdk.training.client.client_round import ClientRound
from edge_sdk.training.formulas.distillation import kd_client, kd_global
from edge_sdk.training.formulas.evidence import evidential_losses
from edge_sdk.training.formulas.evidential_loss import EvidentialLoss
from edge_sdk.training.protocol.client_part import ClientPart, Distillation
from edge_sdk.training.protocol.messages import (
    EndRound,
    Features,
    Feedback,
    FinishAlone,
    StartRound,
    Step,
    Update,
    from_bytes,
    to_bytes,
)
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.training import Training
from edge_sdk.training.protocol.weights import read_weights

RATE = 0.1


def plan_of(
    backbone: str = "tiny",
    shape: tuple[int, ...] = (1, 8, 8),
    depth: int = 2,
    classes: int = 3,
    **how: Any,
) -> Plan:
    return Plan(
        backbone=backbone,
        input_shape=shape,
        classes=classes,
        mean=(0.0,) * shape[0],
        std=(1.0,) * shape[0],
        depth=depth,
        training=Training(RATE, 4),
        part=ClientPart(distil=Distillation(**how)),
        seed=3,
    )


def client_of(samples: int = 8, classes: int = 3) -> TrainingClient:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(samples, 1, 8, 8)).astype(np.float32)
    return TrainingClient("ada", x, generator.integers(0, classes, samples))


def start_of(plan: Plan, number: int = 1) -> StartRound:
    return StartRound(number, plan, read_weights(network_of(plan).prefix(plan.depth)))


def feedback_for(features: Features, seed: int = 0, *, outputs: bool = True) -> Feedback:
    generator = torch.Generator().manual_seed(seed)
    gradient = 0.1 * torch.randn(features.features.shape, generator=generator)
    logits = torch.randn(len(gradient), 3, generator=generator) if outputs else None
    return Feedback(gradient, 1.0, logits)


def kept(client: TrainingClient) -> dict[str, Tensor]:
    return {k: t for k, t in client.personal.items() if AUXILIARY.holds(k)}


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("backbone", "shape", "depth", "classes", "expected"),
    [
        # the paper's Table 8: 84.2K and 347.1K; docs/methods/common.md to the last one
        ("resnet18", (3, 32, 32), 2, 10, 84_170),
        ("resnet18", (1, 28, 28), 2, 10, 77_898),
        ("densenet121", (3, 64, 64), 1, 10, 347_146),
        ("tiny", (1, 8, 8), 2, 10, 1_248 + 16 * 10 + 10),
        ("har_cnn", (9, 128), 1, 6, 9 * 32 * 5 + 2 * 32 + 32 * 6 + 6),
    ],
)
def test_it_is_an_extractor_like_the_prefix_with_pooling_and_a_linear_layer(
    backbone: str, shape: tuple[int, ...], depth: int, classes: int, expected: int
) -> None:
    assert count(build_auxiliary(plan_of(backbone, shape, depth, classes))) == expected


def test_with_head_exit_it_is_the_networks_prefix_and_exit_head() -> None:
    auxiliary = build_auxiliary(plan_of(head="exit", classes=10))
    assert count(auxiliary.head) == 650  # pools to 2x2, which a global pool on tiny does not
    net = network_of(plan_of(head="exit", classes=10))
    x = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(auxiliary(x), net.exit_head(2)(net.prefix(2)(x)))


def test_the_plans_seed_gives_its_weights() -> None:
    state = torch.get_rng_state()
    one, other = build_auxiliary(plan_of()), build_auxiliary(plan_of())
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
        assert a.data_ptr() != b.data_ptr()
    assert torch.equal(torch.get_rng_state(), state)  # dropout elsewhere draws from it


def test_its_weights_travel_contiguous_whatever_the_memory_format() -> None:
    """Norms over them add in the order of memory, which a message or a worker does not keep."""
    auxiliary = build_auxiliary(plan_of())
    set_format(auxiliary, "channels_last")
    assert not all(tensor.is_contiguous() for tensor in auxiliary.tensors().values())
    assert all(tensor.is_contiguous() for tensor in auxiliary.read().values())


def test_tokens_are_not_pooled_over() -> None:
    plan = plan_of("vit_s", (3, 32, 32), 1)
    with pytest.raises(ConfigurationError, match="expected distil head exit"):
        build_auxiliary(plan)
    assert build_auxiliary(plan_of("vit_s", (3, 32, 32), 1, head="exit")).head is not None


def test_a_batch_is_one_sgd_step_on_the_three_losses() -> None:
    loss_of = EvidentialLoss(anneal_rounds=4)
    plan, client = plan_of(evidence=loss_of), client_of(4)
    client.handle(start_of(plan))
    features = client.handle(Step(1, 0))
    assert isinstance(features, Features)
    assert features.labels is not None
    feedback = feedback_for(features)
    client.handle(EndRound(1, feedback))

    twin = build_auxiliary(plan)
    rows = ClientRound(client_of(4), start_of(plan)).batches.rows(0, None)
    x, y = torch.from_numpy(client.x[rows]), torch.from_numpy(client.y[rows])
    assert torch.equal(y, features.labels)
    z = twin.extractor(x)
    logits = twin.head(z)
    assert feedback.outputs is not None
    loss = (
        evidential_losses(logits, y, 0.01 / 4).mean()
        + 0.2 * kd_client(z, features.features, 5.0)
        + 0.3 * kd_global(logits, feedback.outputs, 5.0)
    )
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    torch.optim.SGD(twin.parameters(), RATE).step()
    for name, tensor in twin.read().items():
        torch.testing.assert_close(kept(client)[name], tensor, rtol=1e-5, atol=1e-7)


def test_the_prefix_learns_the_same_as_without_it() -> None:
    plain = replace(plan_of(), part=ClientPart())
    updates = []
    for plan in (plan_of(), plain):
        client = client_of()
        client.handle(start_of(plan))
        first = client.handle(Step(1, 0))
        assert isinstance(first, Features)
        second = client.handle(Step(1, 1, feedback_for(first)))
        assert isinstance(second, Features)
        updates.append(client.handle(EndRound(1, feedback_for(second, 1))))
    accompanied, plain_update = updates
    assert isinstance(accompanied, Update)
    assert isinstance(plain_update, Update)
    assert accompanied.weights.keys() == plain_update.weights.keys()
    for name, tensor in plain_update.weights.items():
        assert torch.equal(accompanied.weights[name], tensor)
    assert (accompanied.steps, accompanied.loss) == (plain_update.steps, plain_update.loss)


def test_it_is_kept_between_rounds_and_never_sent() -> None:
    plan, client = plan_of(), client_of()
    after = []
    for number in (1, 2):
        client.handle(start_of(plan, number))
        features = client.handle(Step(number, 0))
        assert isinstance(features, Features)
        update = client.handle(EndRound(number, feedback_for(features, number)))
        assert isinstance(update, Update)
        assert not any(AUXILIARY.holds(name) for name in update.weights)
        after.append(kept(client))
    fresh = client_of()
    fresh.handle(start_of(plan, 2))
    features = fresh.handle(Step(2, 0))
    assert isinstance(features, Features)
    fresh.handle(EndRound(2, feedback_for(features, 2)))
    name = AUXILIARY.key("head.2.weight")
    assert not torch.equal(after[0][name], after[1][name])
    assert not torch.equal(kept(fresh)[name], after[1][name])
    assert not any("normalise" in key for key in after[1])
    model = build_auxiliary(plan)
    assert model.load(client.personal)
    assert torch.equal(model.read()[name], after[1][name])
    assert not Auxiliary.load(build_auxiliary(plan), {})


def test_an_averaged_one_begins_with_what_is_sent_and_goes_back() -> None:
    plan, client = plan_of(averaged=True), client_of(4)
    own = namespaces.auxiliary(2)
    sent = build_auxiliary(plan).read(own)
    sent = {name: tensor + 0.01 for name, tensor in sent.items()}
    start = start_of(plan)
    start = replace(start, weights=start.weights | sent)
    client.handle(start)
    features = client.handle(Step(1, 0))
    assert isinstance(features, Features)
    assert features.labels is not None
    feedback = feedback_for(features)
    update = client.handle(EndRound(1, feedback))
    assert isinstance(update, Update)
    assert update.weights.keys() == start.weights.keys()
    assert not client.personal
    # the same step as by hand
    twin = build_auxiliary(plan)
    assert twin.load(sent, own)
    rows = ClientRound(client_of(4), start).batches.rows(0, None)
    x, y = torch.from_numpy(client.x[rows]), torch.from_numpy(client.y[rows])
    z = twin.extractor(x)
    logits = twin.head(z)
    assert feedback.outputs is not None
    loss = (
        evidential_losses(logits, y, 1 / 10, "softplus").mean()
        + 0.2 * kd_client(z, features.features, 5.0)
        + 0.3 * kd_global(logits, feedback.outputs, 5.0)
    )
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    torch.optim.SGD(twin.parameters(), RATE).step()
    for name, tensor in twin.read(own).items():
        torch.testing.assert_close(update.weights[name], tensor, rtol=1e-5, atol=1e-7)


def test_without_the_server_it_learns_from_the_prefix_alone() -> None:
    plan, client, silent = plan_of(), client_of(), client_of()
    client.handle(start_of(plan))
    features = client.handle(Step(1, 0))
    assert isinstance(features, Features)
    client.handle(Step(1, 1, feedback_for(features, outputs=False)))
    silent.handle(start_of(plan))
    silent.handle(Step(1, 0))
    update = silent.handle(FinishAlone(1))
    assert isinstance(update, Update)
    # nothing was learnt that could be merged, yet both batches taught W_A
    assert (update.steps, update.supervised) == (0, 0)
    sent = read_weights(network_of(plan).prefix(2))
    assert all(torch.equal(update.weights[name], tensor) for name, tensor in sent.items())
    name = AUXILIARY.key("head.2.weight")
    assert not torch.equal(kept(silent)[name], build_auxiliary(plan).read()[name])


def test_a_loss_that_is_not_finite_does_not_change_it() -> None:
    plan, client = plan_of(), client_of(4)
    client.x[:] = 1e38  # finite, and too large for any layer
    client.handle(start_of(plan))
    update = client.handle(FinishAlone(1))
    assert isinstance(update, Update)
    for name, tensor in build_auxiliary(plan).read().items():
        assert torch.equal(kept(client)[name], tensor)


def test_it_learns_from_a_single_sample() -> None:
    plan, client = plan_of(), client_of(1)
    client.handle(start_of(plan))
    features = client.handle(Step(1, 0))
    assert isinstance(features, Features)
    update = client.handle(EndRound(1, feedback_for(features)))
    assert isinstance(update, Update)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in kept(client).values())
    name = AUXILIARY.key("head.2.weight")
    assert not torch.equal(kept(client)[name], build_auxiliary(plan).read()[name])


@pytest.mark.parametrize("outputs", [torch.zeros(4, 2), torch.full((4, 3), torch.nan)])
def test_outputs_of_wrong_shape_or_not_finite_are_refused(outputs: Tensor) -> None:
    client = client_of()
    client.handle(start_of(plan_of()))
    features = client.handle(Step(1, 0))
    assert isinstance(features, Features)
    bad = Feedback(torch.zeros_like(features.features), 1.0, outputs)
    with pytest.raises(FrameError, match=r"finite outputs of shape \(4, 3\)"):
        client.handle(EndRound(1, bad))


def test_the_plan_travels() -> None:
    plan = plan_of(head="exit", tau=2.5, evidence=EvidentialLoss(kl_share=0.5))
    message = from_bytes(to_bytes(start_of(plan)))
    assert isinstance(message, StartRound)
    assert message.plan == plan


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"tau": 0.0}, "tau: expected a finite number above 0"),
        ({"client_share": -0.1}, "client_share: expected a finite number of at least 0"),
        ({"server_share": float("nan")}, "server_share: expected a finite number of at least 0"),
        ({"anneal_rounds": 0}, "anneal_rounds: expected a whole number of at least 1"),
        ({"head": "grid"}, "distil: head: expected one of global, exit"),
    ],
)
def test_impossible_numbers_are_refused(how: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        Distillation(**how)


def test_whole_networks_have_no_auxiliary_model() -> None:
    with pytest.raises(ConfigurationError, match="distil: expected none"):
        ClientPart(whole=True, distil=Distillation())
