"""The server's steps: gradients from before the step, one order, batches it cannot learn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from edge_sdk.errors import FrameError
from edge_sdk.nets import Norm, Supernet, build
from edge_sdk.training.protocol.messages import Features, Feedback
from edge_sdk.training.protocol.training import Training
from edge_sdk.training.protocol.weights import read_weights
from server.training.core.round_view import RoundView
from server.training.core.server_state import ServerState
from server.training.methods.formulas.contrastive import Alignment
from server.training.methods.steps import (
    ClientBatch,
    ClientBatches,
    concatenated,
    per_client,
    shared,
)

RATE = 0.1
NOW = RoundView(1)
Step = Callable[[ServerState, ClientBatches, RoundView], dict[str, Feedback]]
STEPS: list[Step] = [shared, per_client, concatenated]


def batch_of(shape: tuple[int, ...], depth: int, size: int = 3, seed: int = 0) -> ClientBatch:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(size, *shape, generator=generator)
    labels = torch.randint(0, 3, (size,), generator=generator)
    return ClientBatch(depth, Features(1, 0, z, labels, None))


def state(clip: float | None = None, momentum: float = 0.0) -> ServerState:
    net = build("tiny", classes=3, seed=0)
    return ServerState(net, Training(RATE, 8, momentum=momentum), clip=clip)


SHAPES = {1: (8, 8, 8), 2: (16, 4, 4), 3: (32, 4, 4), 4: (32, 2, 2)}


def ordinary(net: Supernet, one: ClientBatch) -> tuple[Tensor, float, list[Tensor]]:
    """dLs/dz, Ls and the suffix's gradients, by ordinary autograd."""
    z = one.features.features.clone().requires_grad_()
    suffix = net.suffix(one.depth)
    loss = nn.functional.cross_entropy(suffix(z), one.labels)
    loss.backward()  # type: ignore[no-untyped-call]  # torch
    assert z.grad is not None
    gradients = [p.grad.clone() for p in suffix.parameters() if p.grad is not None]
    return z.grad, float(loss.detach()), gradients


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("depth", SHAPES)
def test_the_gradient_returned_is_from_before_the_step(step: Step, depth: int) -> None:
    server, one = state(), batch_of(SHAPES[depth], depth)
    gradient, loss, _ = ordinary(deepcopy(server.net), one)

    feedback = step(server, {"a": one}, NOW)["a"]

    torch.testing.assert_close(feedback.gradient, gradient, rtol=1e-6, atol=1e-8)
    assert feedback.loss == pytest.approx(loss, rel=1e-6)
    assert feedback.gradient.is_contiguous()
    assert not feedback.gradient.requires_grad


@pytest.mark.parametrize("step", STEPS)
def test_the_step_is_sgd_on_the_stages_after_the_cut_alone(step: Step) -> None:
    server, one = state(), batch_of(SHAPES[3], 3)
    twin = deepcopy(server.net)
    _, _, gradients = ordinary(twin, one)
    before = read_weights(server.net.prefix(3))

    step(server, {"a": one}, NOW)

    after = server.copies["a"].module if step is per_client else server.net.suffix(3)
    for got, start, gradient in zip(
        after.parameters(), twin.suffix(3).parameters(), gradients, strict=True
    ):
        torch.testing.assert_close(got, start - RATE * gradient, rtol=1e-6, atol=1e-8)
    for name, tensor in read_weights(server.net.prefix(3)).items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in server.net.parameters())


def test_one_suffix_is_stepped_by_each_client_in_turn() -> None:
    pair = {"a": batch_of(SHAPES[1], 1), "b": batch_of(SHAPES[3], 3, seed=1)}
    together, apart = state(momentum=0.9), state(momentum=0.9)

    both = shared(together, pair, NOW)
    first = shared(apart, {"a": pair["a"]}, NOW)
    second = shared(apart, {"b": pair["b"]}, NOW)

    for name, tensor in apart.read().items():
        assert torch.equal(together.read()[name], tensor)
    assert torch.equal(both["a"].gradient, first["a"].gradient)
    assert torch.equal(both["b"].gradient, second["b"].gradient)
    # b's comes from a suffix that a has stepped
    alone = shared(state(), {"b": pair["b"]}, NOW)
    assert not torch.equal(both["b"].gradient, alone["b"].gradient)


def test_copies_know_nothing_of_each_other() -> None:
    pair = {"a": batch_of(SHAPES[1], 1), "b": batch_of(SHAPES[3], 3, seed=1)}
    both = per_client(state(), pair, NOW)
    for name, one in pair.items():
        assert torch.equal(
            both[name].gradient, per_client(state(), {name: one}, NOW)[name].gradient
        )


def test_a_client_s_gradient_is_of_the_mean_over_its_own_samples() -> None:
    # Eq. 13: not scaled by its share of the batch; no layer of tiny mixes samples
    pair = {
        "a": batch_of(SHAPES[1], 1, size=2),
        "b": batch_of(SHAPES[3], 3, size=5, seed=1),
    }
    both = concatenated(state(), pair, NOW)
    for name, one in pair.items():
        gradient, loss, _ = ordinary(state().net, one)
        torch.testing.assert_close(both[name].gradient, gradient, rtol=1e-5, atol=1e-7)
        assert both[name].loss == pytest.approx(loss, rel=1e-5)


def test_the_order_of_clients_does_not_matter_to_the_joint_step() -> None:
    pair = {"b": batch_of(SHAPES[3], 3, seed=1), "a": batch_of(SHAPES[1], 1)}
    one, other = state(), state()
    assert concatenated(one, pair, NOW).keys() == pair.keys()
    concatenated(other, dict(reversed(pair.items())), NOW)
    for name, tensor in one.read().items():
        assert torch.equal(other.read()[name], tensor)


@pytest.mark.parametrize("step", STEPS)
def test_the_servers_clip_is_over_all_it_steps_and_spares_what_goes_back(step: Step) -> None:
    one = batch_of(SHAPES[2], 2)
    free, limited = state(), state(clip=1e-3)
    assert torch.equal(
        step(free, {"a": one}, NOW)["a"].gradient, step(limited, {"a": one}, NOW)["a"].gradient
    )
    after = limited.copies["a"].module if step is per_client else limited.net.suffix(2)
    start = state().net.suffix(2)
    moved = [(a - b).flatten() for a, b in zip(after.parameters(), start.parameters(), strict=True)]
    # weights of about 0.1 hold a step of 1e-4 to three digits
    assert float(torch.cat(moved).norm().detach()) == pytest.approx(RATE * 1e-3, rel=1e-2)


@pytest.mark.parametrize("step", STEPS)
def test_a_batch_whose_loss_is_not_finite_steps_nothing(step: Step) -> None:
    server, one = state(), batch_of(SHAPES[4], 4)
    head = next(server.net.head.parameters())
    with torch.no_grad():
        head.fill_(3e38)  # a server that has diverged
    before = server.read()

    assert step(server, {"a": one}, NOW) == {}
    module = server.copies["a"].module if step is per_client else server.net.suffix(4)
    for name, tensor in read_weights(module).items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("scale", [float("nan"), 1e30])  # of 1e30 no variance fits a float32
@pytest.mark.parametrize("step", STEPS)
def test_a_batch_that_is_not_finite_leaves_batchnorm_as_it_was(step: Step, scale: float) -> None:
    server = ServerState(
        build("har_cnn", input_shape=(9, 16), classes=3, seed=0),
        Training(RATE, 8),
    )
    good, bad = batch_of(server.shape_at(1), 1), batch_of(server.shape_at(1), 1)
    bad.features.features.mul_(scale)
    step(server, {"a": good}, NOW)
    module = server.copies["a"].module if step is per_client else server.net.suffix(1)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    assert any(name.endswith("running_var") for name in before)

    assert step(server, {"a": bad}, NOW) == {}
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert step(server, {"a": good}, NOW).keys() == {"a"}


@pytest.mark.parametrize(("norm", "answered"), [("batch", False), ("group", True)])
@pytest.mark.parametrize("step", STEPS)
def test_one_sample_that_batch_norm_cannot_take_gets_no_feedback(
    step: Step, norm: Norm, answered: bool
) -> None:
    # the last stages of resnet18 have maps of 1x1 here: one value per channel
    server = ServerState(
        build("resnet18", input_shape=(1, 28, 28), classes=3, seed=0, norm=norm),
        Training(RATE, 8),
    )
    feedback = step(server, {"a": batch_of(server.shape_at(7), 7, size=1)}, NOW)
    assert ("a" in feedback) is answered


def test_the_rest_of_a_step_goes_on_without_that_sample() -> None:
    server = ServerState(
        build("resnet18", input_shape=(1, 28, 28), classes=3, seed=0),
        Training(RATE, 8),
    )
    shape = server.shape_at(7)
    pair = {"a": batch_of(shape, 7, size=1), "b": batch_of(shape, 7, size=2)}
    assert shared(server, pair, NOW).keys() == {"b"}
    assert concatenated(server, pair, NOW).keys() == {"a", "b"}  # three samples together


def test_the_shape_at_a_cut_is_that_of_the_network_and_leaves_it_alone() -> None:
    server = ServerState(
        build("har_cnn", input_shape=(9, 16), classes=3, seed=0),
        Training(RATE, 8),
    )
    before = {name: t.clone() for name, t in server.net.state_dict().items()}
    assert [server.shape_at(depth) for depth in (1, 2)] == [(32, 8), (64, 4)]
    assert server.net.training
    assert all(torch.equal(t, before[name]) for name, t in server.net.state_dict().items())


def test_labels_that_stayed_on_the_client_are_missed() -> None:
    one = ClientBatch(1, Features(1, 0, torch.zeros(2, 8, 8, 8), None, None))
    with pytest.raises(FrameError, match="needs labels"):
        shared(state(), {"a": one}, NOW)


def test_momentum_belongs_to_a_stage_whichever_client_steps_it() -> None:
    # a from depth 1, then b from depth 3: stage 5 has two steps behind it, stage 2 one
    server = state(momentum=0.9)
    shared(server, {"a": batch_of(SHAPES[1], 1)}, NOW)
    optimiser = server.suffix(1).optimiser
    assert optimiser is not None
    first = {key: tensor.clone() for key, tensor in optimiser.velocities.items()}
    shared(server, {"b": batch_of(SHAPES[3], 3, seed=1)}, NOW)
    names = {p: name for name, p in server.net.suffix(1).named_parameters()}
    moved = {
        names[parameter].partition(".")[0]
        for parameter, tensor in optimiser.velocities.items()
        if not torch.equal(first[parameter], tensor)
    }
    stages = {names[parameter].partition(".")[0] for parameter in first}
    assert stages == {"stage2", "stage3", "stage4", "stage5", "head"}
    assert moved == {"stage4", "stage5", "head"}


# alignment added to any step that scores its own outputs


def with_view(
    one: ClientBatch, weight: float, seed: int = 9, *, margin: float = 30.0
) -> ClientBatch:
    """A second view from the same cut, of which every other sample is of the same class."""
    z = one.features.features
    generator = torch.Generator().manual_seed(seed)
    view = torch.randn(z.shape, generator=generator)
    same = (torch.arange(len(z)) % 2 == 0).to(torch.uint8)
    features = replace(one.features, view=view, entry=one.depth, same=same)
    return ClientBatch(one.depth, features, Alignment(weight, margin, normalise=False))


def embed(net: Supernet, z: Tensor, depth: int) -> Tensor:
    """Up to the last layer, one stage after another."""
    for stage in list(net.stages)[depth:]:
        z = stage(z)
    for layer in list(net.head.children())[:-1]:
        z = layer(z)
    return z


def pulled(net: Supernet, pairs: Sequence[ClientBatch], weight: float, margin: float) -> Tensor:
    """weight * CSA over all pairs, from its formula (HARMONY, Eq. 7)."""
    costs = []
    for one in pairs:
        assert one.features.view is not None
        assert one.features.same is not None
        first = embed(net, one.features.view, one.depth)
        second = embed(net, one.features.features, one.depth)
        distance = (first - second).norm(dim=1)
        pushed = (margin - distance).clamp(min=0) ** 2
        costs.append(torch.where(one.features.same == 1, distance**2, pushed) / 2)
    return weight * torch.cat(costs).mean()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_alignment_joins_the_servers_step_and_no_clients_gradient(
    step: Step, momentum: float
) -> None:
    plain = batch_of(SHAPES[2], 2)
    server, alone = state(momentum=momentum), state(momentum=momentum)
    by_hand = deepcopy(server.net)
    one = with_view(plain, 0.7)

    feedback = step(server, {"a": one}, NOW)["a"]
    expected = step(alone, {"a": plain}, NOW)["a"]
    assert torch.equal(feedback.gradient, expected.gradient)
    assert feedback.loss == expected.loss

    suffix = by_hand.suffix(2)
    optimiser = torch.optim.SGD(suffix.parameters(), RATE, momentum)
    loss = nn.functional.cross_entropy(suffix(one.features.features), one.labels)
    total = loss + pulled(by_hand, [one], 0.7, 30.0)
    total.backward()  # type: ignore[no-untyped-call]  # torch
    optimiser.step()
    stepped = server.copies["a"].module if server.copies else server.net.suffix(2)
    for name, tensor in read_weights(suffix).items():
        torch.testing.assert_close(read_weights(stepped)[name], tensor, rtol=1e-4, atol=1e-6)


def test_joint_alignment_is_by_the_mean_over_all_pairs_of_all_depths() -> None:
    server = state()
    by_hand = deepcopy(server.net)
    client_batches = {
        "a": with_view(batch_of(SHAPES[3], 3, size=2), 0.7),
        "b": with_view(batch_of(SHAPES[1], 1, size=4, seed=1), 0.7, seed=2),
        "c": batch_of(SHAPES[1], 1, size=2, seed=4),  # sent none, which costs it nothing
    }
    concatenated(server, client_batches, NOW)

    # views and features meet in BatchNorm-free `tiny`, so each may climb alone
    each = list(client_batches.values())
    logits = torch.cat([by_hand.suffix(one.depth)(one.features.features) for one in each])
    loss = nn.functional.cross_entropy(logits, torch.cat([one.labels for one in each]))
    total = loss + pulled(by_hand, each[:2], 0.7, 30.0)
    parameters = list(by_hand.suffix(1).parameters())
    found = torch.autograd.grad(total, parameters)
    for now, before, gradient in zip(
        server.net.suffix(1).parameters(), parameters, found, strict=True
    ):
        torch.testing.assert_close(now, before - RATE * gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("step", STEPS)
def test_alignment_that_overflows_steps_nothing(step: Step) -> None:
    server = state()
    before = {name: t.clone() for name, t in server.net.state_dict().items()}
    one = with_view(batch_of(SHAPES[2], 2), 1e38, margin=1e30)
    assert step(server, {"a": one}, NOW) == {}
    copies_of_it = [copy.module for copy in server.copies.values()]
    begun = read_weights(state().net.suffix(2))
    for module in copies_of_it:
        assert all(torch.equal(t, begun[name]) for name, t in read_weights(module).items())
    assert all(torch.equal(t, before[name]) for name, t in server.net.state_dict().items())
