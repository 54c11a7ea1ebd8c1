"""HARMONY's client against the same steps written out in plain torch."""

from __future__ import annotations

from copy import deepcopy
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edge_sdk.errors import ConfigurationError, FrameError
from edge_sdk.nets import Supernet
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.client_part import ClientPart, MetaAdaptation
from edge_sdk.training.protocol.messages import (
    EndRound,
    Features,
    Feedback,
    FinishAlone,
    OutputGradient,
    Outputs,
    Ready,
    StartRound,
    Step,
    Update,
)
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.training import Training
from edge_sdk.training.protocol.weights import read_weights

SEED, RATE, CLASSES, BATCH = 7, 0.05, 4, 6


def plan_for(depth: int = 2, gamma: float = 0.5, net: str = "tiny", **numbers: Any) -> Plan:
    fields = {"codec", "momentum", "weight_decay", "batch", "epochs"}
    outer = {name: numbers.pop(name) for name in list(numbers) if name in fields}
    views = numbers.pop("views", True)
    meta = MetaAdaptation(**numbers)
    part = ClientPart(exit_head=True, fusion="fixed", exit_share=gamma, meta=meta, views=views)
    shape = {"tiny": (1, 8, 8), "har_cnn": (9, 16)}[net]
    return Plan(
        net,
        shape,
        CLASSES,
        (0.0,) * shape[0],
        (1.0,) * shape[0],
        depth,
        Training(**{"learning_rate": RATE, "batch": BATCH, **outer}),
        part=part,
        seed=SEED,
        send_labels=False,
    )


def client_of(plan: Plan, samples: int = 12, secret: int | None = None) -> TrainingClient:
    generator = np.random.default_rng(3)
    x = generator.standard_normal((samples, *plan.input_shape)).astype(np.float32)
    return TrainingClient("ada", x, generator.integers(0, CLASSES, samples), secret=secret)


def start(client: TrainingClient, plan: Plan, number: int = 1) -> Ready:
    net = network_of(plan)
    weights = read_weights(net.prefix(plan.depth))
    heads = read_weights(net.exit_head(plan.depth))
    weights |= {f"exit{plan.depth}.{name}": tensor for name, tensor in heads.items()}
    ready = client.handle(StartRound(number, plan, weights))
    assert isinstance(ready, Ready)
    return ready


def features(client: TrainingClient, step: int, feedback: Feedback | None = None) -> Features:
    reply = client.handle(Step(1, step, feedback))
    assert isinstance(reply, Features)
    return reply


def answer(client: TrainingClient, step: int, outputs: Tensor) -> OutputGradient:
    reply = client.handle(Outputs(1, step, outputs))
    assert isinstance(reply, OutputGradient)
    return reply


def first_rows(client: TrainingClient, epoch: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The order in which every method's client goes through its samples."""
    generator = np.random.default_rng([SEED, 1, crc32(client.name.encode())])
    return [generator.permutation(client.samples) for _ in range(epoch + 1)][-1]


def find(client: TrainingClient, x: Tensor, part: nn.Module, got: Tensor) -> list[int]:
    """Which samples `got` is of, by running all of them through `part`."""
    everything = part(x).detach()
    return [int((everything - row).flatten(1).norm(dim=1).argmin()) for row in got]


class ByHand:
    """The client's local step in plain torch: modules, autograd and torch's own SGD."""

    def __init__(self, plan: Plan) -> None:
        self.net: Supernet = deepcopy(network_of(plan)).train()
        self.plan = plan

    def adapted(self, x: Tensor, y: Tensor, steps: int, rate: float) -> Supernet:
        ahead = deepcopy(self.net)
        prefix, head = ahead.prefix(self.plan.depth), ahead.exit_head(self.plan.depth)
        optimiser = torch.optim.SGD([*prefix.parameters(), *head.parameters()], rate)
        for _ in range(steps):
            optimiser.zero_grad()
            nn.functional.cross_entropy(head(prefix(x)), y).backward()  # type: ignore[no-untyped-call]  # torch
            optimiser.step()
        return ahead


def second_batch(client: TrainingClient, plan: Plan, size: int) -> tuple[Tensor, Tensor]:
    """B2, found by what travels: without adaptation and from the cut, z1 is f(x2)."""
    twin = TrainingClient(client.name, client.x, client.y)
    plain = plan_for(plan.depth, steps=0, early=False, batch=plan.training.batch)
    start(twin, plain)
    view = features(twin, 0).view
    assert view is not None
    assert len(view) == size
    x = torch.from_numpy(client.x)
    prefix = deepcopy(network_of(plan)).prefix(plan.depth)
    rows = find(client, x, prefix, view)
    return x[rows], torch.from_numpy(client.y)[rows]


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_local_step_is_the_papers_in_plain_torch(steps: int, gamma: float) -> None:
    plan = plan_for(2, gamma, steps=steps, rate=0.1, early=False)
    client, hand = client_of(plan), ByHand(plan)
    start(client, plan)
    got = features(client, 0)
    rows = first_rows(client)[:BATCH]
    x1, y1 = torch.from_numpy(client.x[rows]), torch.from_numpy(client.y[rows])
    x2, y2 = second_batch(client, plan, BATCH)

    one, two = hand.adapted(x1, y1, steps, 0.1), hand.adapted(x2, y2, steps, 0.1)
    z2 = two.prefix(2)(x1)
    assert torch.equal(got.features, z2)  # the same operations in the same order
    assert got.view is not None
    assert torch.equal(got.view, one.prefix(2)(x2))
    assert got.entry == 2
    assert got.same is not None
    assert got.same.tolist() == (y1 == y2).int().tolist()

    # any server will do: a linear one, and the client computes its loss
    server = torch.randn(CLASSES, z2[0].numel(), generator=torch.Generator().manual_seed(1)) / 9
    logits = z2.flatten(1) @ server.T
    returned = answer(client, 0, logits.detach())
    server_loss = nn.functional.cross_entropy(logits, y1)
    (by_logits,) = torch.autograd.grad(server_loss, logits, retain_graph=True)
    assert torch.equal(returned.gradient, by_logits)

    # outer: gradients at (f2, h2), one step of torch's SGD from (f, h)
    (by_z,) = torch.autograd.grad(server_loss, z2, retain_graph=True)
    own_loss = nn.functional.cross_entropy(two.exit_head(2)(z2), y1)
    total = gamma * own_loss + (1 - gamma) * server_loss
    theirs = [*two.prefix(2).parameters(), *two.exit_head(2).parameters()]
    gradients = torch.autograd.grad(total, theirs, allow_unused=True)
    mine = [*hand.net.prefix(2).parameters(), *hand.net.exit_head(2).parameters()]
    for parameter, gradient in zip(mine, gradients, strict=True):
        parameter.grad = gradient
    torch.optim.SGD(mine, RATE).step()

    update = client.handle(EndRound(1, Feedback(by_z, 0.0)))
    assert isinstance(update, Update)
    expected = read_weights(hand.net.prefix(2))
    expected |= {f"exit2.{name}": t for name, t in read_weights(hand.net.exit_head(2)).items()}
    assert update.weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(update.weights[name], tensor, rtol=1e-5, atol=1e-7)
    assert update.loss == pytest.approx(float(total.detach()), rel=1e-5)


def test_only_the_outer_step_has_momentum() -> None:
    """Two batches: the second outer step carries 0.9 of the first; adaptations carry none."""
    plan = plan_for(1, gamma=1.0, steps=2, rate=0.1, views=False, momentum=0.9)
    client, hand = client_of(plan), ByHand(plan)
    start(client, plan)
    prefix, head = hand.net.prefix(1), hand.net.exit_head(1)
    mine = [*prefix.parameters(), *head.parameters()]
    optimiser = torch.optim.SGD(mine, RATE, momentum=0.9)
    order = first_rows(client)
    second = second_order(client)
    feedback = None
    for step in range(2):
        got = features(client, step, feedback)
        rows, ahead = order[step * BATCH :][:BATCH], second[step * BATCH :][:BATCH]
        x1, y1 = torch.from_numpy(client.x[rows]), torch.from_numpy(client.y[rows])
        x2, y2 = torch.from_numpy(client.x[ahead]), torch.from_numpy(client.y[ahead])
        two = hand.adapted(x2, y2, 2, 0.1)
        loss = nn.functional.cross_entropy(two.exit_head(1)(two.prefix(1)(x1)), y1)
        theirs = [*two.prefix(1).parameters(), *two.exit_head(1).parameters()]
        for parameter, gradient in zip(mine, torch.autograd.grad(loss, theirs), strict=True):
            parameter.grad = gradient
        optimiser.step()
        feedback = Feedback(torch.zeros_like(got.features), 0.0)
    update = client.handle(EndRound(1, feedback))
    assert isinstance(update, Update)
    for name, tensor in read_weights(prefix).items():
        torch.testing.assert_close(update.weights[name], tensor, rtol=1e-5, atol=1e-7)


def second_order(client: TrainingClient) -> list[int]:
    """B2 of a whole epoch, read off the views of a client that neither adapts nor learns."""
    plan = plan_for(1, gamma=0.0, steps=0, early=False)
    twin = TrainingClient(client.name, client.x, client.y)
    start(twin, plan)
    x, prefix = torch.from_numpy(client.x), network_of(plan).prefix(1)
    rows: list[int] = []
    feedback = None
    for step in range(2):
        got = features(twin, step, feedback)
        assert got.view is not None
        rows += find(client, x, prefix, got.view)
        feedback = Feedback(torch.zeros_like(got.features), 0.0)
    return rows


def test_second_batches_have_the_size_of_the_first_and_go_through_all_samples() -> None:
    plan = plan_for(1, gamma=0.0, steps=0, early=False, batch=5)
    client = client_of(plan, 12)  # batches of 5, 5 and 2
    assert start(client, plan).steps == 3
    sizes, feedback = [], None
    for step in range(3):
        got = features(client, step, feedback)
        assert got.view is not None
        assert got.same is not None
        sizes.append((len(got.features), len(got.view), len(got.same)))
        feedback = Feedback(torch.zeros_like(got.features), 0.0)
    assert sizes == [(5, 5, 5), (5, 5, 5), (2, 2, 2)]
    assert sorted(second_order(client)) == list(range(12))


def test_batch_of_one_and_client_of_one_sample() -> None:
    for samples, batch in ((1, 4), (3, 1)):
        plan = plan_for(2, steps=2, batch=batch)
        client = client_of(plan, samples)
        assert start(client, plan).steps == samples
        got = features(client, 0)
        assert got.view is not None
        assert (len(got.features), len(got.view)) == (1, 1)
        returned = answer(client, 0, torch.zeros(1, CLASSES))
        assert returned.gradient.shape == (1, CLASSES)
        update = client.handle(EndRound(1, Feedback(torch.zeros_like(got.features), 0.0)))
        assert isinstance(update, Update)
        assert all(torch.isfinite(tensor).all() for tensor in update.weights.values())


@pytest.mark.parametrize("steps", [0, 2, 5])
def test_batch_norm_statistics_move_once_a_batch_by_the_pass_that_is_learnt_from(
    steps: int,
) -> None:
    plan = plan_for(1, net="har_cnn", steps=steps, rate=0.1)
    client, hand = client_of(plan), ByHand(plan)
    start(client, plan)
    got = features(client, 0)
    update = client.handle(EndRound(1, Feedback(torch.zeros_like(got.features), 0.0)))
    assert isinstance(update, Update)
    # which samples are drawn depends on how many there are, not on what they are
    rows, ahead = first_rows(client)[:BATCH], second_order(client_of(plan_for(1)))[:BATCH]
    x2, y2 = torch.from_numpy(client.x[ahead]), torch.from_numpy(client.y[ahead])
    before = {name: t for name, t in read_weights(hand.net.prefix(1)).items() if "running" in name}
    two = hand.adapted(x2, y2, steps, 0.1)
    for name, module in two.prefix(1).named_modules():
        if isinstance(module, nn.BatchNorm1d):  # before the steps ahead, and a mean of this pass
            module.running_mean = before[f"{name}.running_mean"].clone()
            module.running_var = before[f"{name}.running_var"].clone()
    two.prefix(1)(torch.from_numpy(client.x[rows]))
    found = {name: t for name, t in read_weights(two.prefix(1)).items() if "running" in name}
    assert found
    for name, tensor in found.items():
        assert torch.equal(update.weights[name], tensor)
        assert not torch.equal(tensor, before[name])


def test_depth_of_the_second_view_is_drawn_from_the_exits_up_to_the_cut() -> None:
    plan = plan_for(3, steps=0, batch=1, gamma=1.0)
    client = client_of(plan, 60)
    start(client, plan)
    found = []
    for step in range(60):
        got = features(client, step)
        assert got.view is not None
        assert got.entry is not None
        assert (
            got.view.shape[1:]
            == network_of(plan).prefix(got.entry)(torch.zeros(1, 1, 8, 8))[0].shape
        )
        found.append(got.entry)
    # uniform over three: 20 each, give or take 3 standard deviations of 3.7
    assert all(9 <= found.count(depth) <= 31 for depth in (1, 2, 3))
    fixed = plan_for(3, steps=0, early=False)
    start(client, fixed)
    assert features(client, 0).entry == 3


def test_without_alignment_no_second_view_is_made() -> None:
    plan = plan_for(2, views=False)
    client = client_of(plan)
    start(client, plan)
    got = features(client, 0)
    assert (got.view, got.entry, got.same, got.view_ranges) == (None,) * 4


def test_without_the_server_the_exit_loss_counts_in_full() -> None:
    plan = plan_for(2, gamma=0.3, steps=1)
    whole = plan_for(2, gamma=1.0, steps=1)
    lone, told = client_of(plan), client_of(whole)
    start(lone, plan)
    features(lone, 0)
    alone = lone.handle(FinishAlone(1))
    start(told, whole)
    zero = Feedback(torch.zeros_like(features(told, 0).features), 0.0)
    features(told, 1, zero)
    supervised = told.handle(EndRound(1, zero))
    assert isinstance(alone, Update)
    assert isinstance(supervised, Update)
    # without feedback the exit's loss counts in full, whatever gamma is
    assert (alone.supervised, supervised.supervised) == (0, 2)
    for name, tensor in supervised.weights.items():
        torch.testing.assert_close(alone.weights[name], tensor, rtol=1e-6, atol=1e-8)


def test_same_round_again_is_the_same_and_the_next_is_not() -> None:
    plan = plan_for(3, codec="fp16")
    replies = []
    for number in (1, 1, 2):
        client = client_of(plan)
        start(client, plan, number)
        reply = client.handle(Step(number, 0))
        assert isinstance(reply, Features)
        replies.append(reply)
    one, again, later = replies
    assert one.features.dtype == torch.float16
    assert one.view is not None
    assert again.view is not None
    assert one.view.dtype == torch.float16
    assert one.entry == again.entry
    assert torch.equal(one.view, again.view)
    assert not torch.equal(one.features, later.features)


def test_outputs_that_do_not_belong_to_the_batch_are_refused() -> None:
    plan = plan_for(1)
    client = client_of(plan)
    start(client, plan)
    with pytest.raises(FrameError, match="outputs of step 0: expected finite ones of the open"):
        answer(client, 0, torch.zeros(BATCH, CLASSES))
    features(client, 0)
    with pytest.raises(FrameError, match=r"of shape \(6, 4\), got shape \(6, 5\)"):
        answer(client, 0, torch.zeros(BATCH, CLASSES + 1))
    with pytest.raises(FrameError, match="outputs of step 3"):
        answer(client, 3, torch.zeros(BATCH, CLASSES))
    answer(client, 0, torch.zeros(BATCH, CLASSES))
    with pytest.raises(FrameError, match="expected finite ones of the open batch"):
        answer(client, 0, torch.zeros(BATCH, CLASSES))  # a second answer says more of the labels


def test_head_on_the_client_is_kept_there_and_learns() -> None:
    plan = plan_for(1, head="client")
    client = client_of(plan)
    start(client, plan)
    features(client, 0)
    classifier = deepcopy(network_of(plan).suffix(1).classifier)
    embeddings = torch.randn(BATCH, classifier.in_features)
    returned = answer(client, 0, embeddings)
    rows = first_rows(client)[:BATCH]
    probe = embeddings.clone().requires_grad_()
    loss = nn.functional.cross_entropy(classifier(probe), torch.from_numpy(client.y[rows]))
    by_embeddings, by_weight, by_bias = torch.autograd.grad(
        loss, [probe, classifier.weight, classifier.bias]
    )
    assert torch.equal(returned.gradient, by_embeddings)
    update = client.handle(EndRound(1))
    assert isinstance(update, Update)
    assert not any(name.startswith(("back", "head")) for name in update.weights)
    # (1 - gamma) of the loss, as the server's part of the network learns
    expected = classifier.weight - RATE * 0.5 * by_weight
    torch.testing.assert_close(client.personal["back.weight"], expected)
    torch.testing.assert_close(client.personal["back.bias"], classifier.bias - RATE * 0.5 * by_bias)
    # and goes on from there
    start(client, plan, 1)
    features(client, 0)
    again = answer(client, 0, embeddings)
    assert not torch.equal(again.gradient, returned.gradient)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_outputs_that_are_not_finite_do_not_spoil_the_head_on_the_client(value: float) -> None:
    plan = plan_for(1, head="client")
    client, untroubled = client_of(plan), client_of(plan)
    width = network_of(plan).suffix(1).classifier.in_features
    sound = torch.randn(BATCH, width)
    for each in (client, untroubled):
        start(each, plan)
        features(each, 0)
    bad = sound.clone()
    bad[-1, -1] = value
    with pytest.raises(FrameError, match="expected finite ones"):
        answer(client, 0, bad)
    for each in (client, untroubled):
        answer(each, 0, sound)
        each.handle(EndRound(1))
    for name in ("back.weight", "back.bias"):
        assert torch.equal(client.personal[name], untroubled.personal[name])


def test_the_server_cannot_draw_the_same_noise() -> None:
    plan = plan_for(1, noise=1.0)
    gradients = []
    for secret in (None, None, 5, 5):
        client = client_of(plan, secret=secret)
        start(client, plan)
        features(client, 0)
        gradients.append(answer(client, 0, torch.zeros(BATCH, CLASSES)).gradient)
    clean = client_of(plan_for(1))
    start(clean, plan_for(1))
    features(clean, 0)
    true = answer(clean, 0, torch.zeros(BATCH, CLASSES)).gradient
    assert not torch.equal(gradients[0], gradients[1])  # each client has a secret of its own
    assert torch.equal(gradients[2], gradients[3])  # which a simulation may set
    assert all(not torch.equal(noisy, true) for noisy in gradients)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"steps": -1}, "meta: steps: expected a whole number of at least 0, got -1"),
        ({"rate": 0.0}, "meta: rate: expected a finite number above 0"),
        ({"head": "both"}, "meta: head: expected one of server, client"),
        ({"noise": float("inf")}, "meta: noise: expected a finite number of at least 0"),
        ({"early": 1}, "meta: early: expected true or false"),
    ],
)
def test_impossible_numbers_are_refused(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MetaAdaptation(**numbers)


def test_adaptation_needs_an_exit_head() -> None:
    with pytest.raises(ConfigurationError, match="meta: expected an exit head and fusion fixed"):
        ClientPart(meta=MetaAdaptation())
