"""SCALA as a method: one forward and two backwards, its ablations, and what could break it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from edge_sdk.errors import ConfigurationError
from edge_sdk.nets import build
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.messages import (
    Features,
    Ready,
    Reply,
    Request,
    StartRound,
    Step,
    Update,
)
from edge_sdk.training.protocol.plan import Plan
from edge_sdk.training.protocol.training import Training
from server.training.core.round_view import RoundView
from server.training.core.server_state import ServerState
from server.training.methods.method import Method
from server.training.methods.scala import scala
from server.training.methods.splitfed import minibatch, splitfed_v1, splitfed_v2
from server.training.methods.steps import ClientBatch
from server.training.recipe.recipe import load_recipe, read_recipe
from server.training.rounds.loop import RoundLoop
from server.training.rounds.round import RoundResult, RoundSettings
from server.training.rounds.transport import LocalTransport
from server.training.run.checkpoint import latest_checkpoint, save_checkpoint
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds

CLASSES, RATE = 3, 0.1
COUNTS = {"a": (4, 0, 2), "b": (0, 5, 5), "c": (1, 1, 1)}
SIZES = {"a": 3, "b": 5, "c": 2}


# One step on the server, against plain torch


def batches_of(
    shape: tuple[int, ...], depth: int = 1, names: str = "abc"
) -> dict[str, ClientBatch]:
    found = {}
    for name in names:
        generator = torch.Generator().manual_seed(ord(name))
        z = torch.randn(SIZES[name], *shape, generator=generator)
        present = [label for label, count in enumerate(COUNTS[name]) if count]
        labels = torch.tensor(present)[
            torch.randint(0, len(present), (SIZES[name],), generator=generator)
        ]
        found[name] = ClientBatch(depth, Features(1, 0, z, labels, None))
    return found


def view(counts: Mapping[str, tuple[int, ...]] = COUNTS) -> RoundView:
    samples = {name: max(1, sum(each)) for name, each in counts.items()}
    return RoundView(1, samples=samples, label_counts=counts)


def state(name: str = "tiny", **arguments: Any) -> ServerState:
    return ServerState(build(name, classes=CLASSES, seed=0, **arguments), Training(RATE, 8))


def answer(
    method: Method, server: ServerState, found: Mapping[str, ClientBatch], now: RoundView
) -> Any:
    assert method.server_step is not None
    return method.server_step(server, found, now)


def log_share(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor([math.log(max(c / sum(counts), 1e-6)) for c in counts])


@pytest.mark.parametrize(
    ("name", "arguments", "depth"),
    [("tiny", {}, 1), ("har_cnn", {"input_shape": (9, 16)}, 2)],  # the second has BatchNorm
)
def test_one_forward_and_two_backwards_are_two_separate_losses(
    name: str, arguments: dict[str, Any], depth: int
) -> None:
    server = state(name, **arguments)
    found = batches_of(server.shape_at(depth), depth)
    twins = [deepcopy(server.net).train().suffix(depth) for _ in range(4)]  # one a forward
    inputs = [one.features.features.clone().requires_grad_() for one in found.values()]
    labels = torch.cat([one.labels for one in found.values()])
    ends = np.cumsum([0, *SIZES.values()])
    expected = {}
    for twin, client, start, stop in zip(twins, found, ends[:-1], ends[1:], strict=False):
        s = twin(torch.cat(inputs))[start:stop] + log_share(COUNTS[client])
        expected[client] = F.cross_entropy(s, labels[start:stop])
    # by BatchNorm a client's features have a part in the others' losses: the gradients are summed
    gradients = torch.autograd.grad(torch.stack(list(expected.values())).sum(), inputs)
    # P_s by hand: 5, 6 and 8 of 19 samples
    joint = torch.tensor([math.log(5 / 19), math.log(6 / 19), math.log(8 / 19)])
    suffix = twins[3]
    server_loss = F.cross_entropy(suffix(torch.cat(inputs)) + joint, labels)
    steps = torch.autograd.grad(server_loss, list(suffix.parameters()))

    feedback = answer(scala(), server, found, view())

    for client, gradient in zip(found, gradients, strict=True):
        torch.testing.assert_close(feedback[client].gradient, gradient, rtol=1e-4, atol=1e-6)
        assert feedback[client].loss == pytest.approx(float(expected[client].detach()), rel=1e-5)
    for got, parameter, step in zip(
        server.net.suffix(depth).parameters(), suffix.parameters(), steps, strict=True
    ):
        torch.testing.assert_close(got, parameter - RATE * step, rtol=1e-4, atol=1e-6)


def test_local_adjustment_leaves_the_servers_step_plain() -> None:
    shape = state().shape_at(1)
    local, none, both = state(), state(), state()
    with_local = answer(scala("local"), local, batches_of(shape), view())
    plain = answer(scala("none"), none, batches_of(shape), view())
    with_both = answer(scala("both"), both, batches_of(shape), view())
    for name, tensor in local.read().items():
        torch.testing.assert_close(tensor, none.read()[name])
    for client in COUNTS:
        assert torch.equal(with_local[client].gradient, with_both[client].gradient)
    # c has as many of each: its adjustment is a constant, which a softmax does not see
    torch.testing.assert_close(with_local["c"].gradient, plain["c"].gradient)
    for client in "ab":
        change = with_local[client].gradient - plain[client].gradient
        assert float(change.abs().max()) > 0.01 * float(plain[client].gradient.abs().max())


def test_in_turn_each_client_steps_one_suffix_by_its_own_labels() -> None:
    server, twin = state(), state()
    found = batches_of(server.shape_at(1))
    method = scala("local", server="in_turn", share_batches=False)
    assert method.batch_share is None
    feedback = answer(method, server, found, view())
    for client, one in found.items():  # each through what those before it have stepped
        suffix = twin.net.suffix(1)
        z = one.features.features.clone().requires_grad_()
        loss = F.cross_entropy(suffix(z) + log_share(COUNTS[client]), one.labels)
        gradient, *own = torch.autograd.grad(loss, [z, *suffix.parameters()])
        torch.testing.assert_close(feedback[client].gradient, gradient, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            for parameter, step in zip(suffix.parameters(), own, strict=True):
                parameter.sub_(twin.training.learning_rate * step)
    for name, tensor in server.read().items():
        torch.testing.assert_close(tensor, twin.read()[name], rtol=1e-4, atol=1e-6)


def test_without_concatenation_each_copy_learns_by_its_clients_labels() -> None:
    server = state()
    found = batches_of(server.shape_at(1))
    feedback = answer(scala("local", server="copies"), server, found, view())
    for client, one in found.items():
        suffix = state().net.suffix(1)
        z = one.features.features.clone().requires_grad_()
        loss = F.cross_entropy(suffix(z) + log_share(COUNTS[client]), one.labels)
        (gradient,) = torch.autograd.grad(loss, z)
        torch.testing.assert_close(feedback[client].gradient, gradient, rtol=1e-4, atol=1e-7)


def test_one_client_with_equal_labels_is_not_adjusted() -> None:
    adjusted, plain = state(), state()
    found = batches_of(adjusted.shape_at(1), names="c")
    one = answer(scala("both"), adjusted, found, view())["c"]
    other = answer(scala("none"), plain, found, view())["c"]
    torch.testing.assert_close(one.gradient, other.gradient)
    for name, tensor in adjusted.read().items():
        torch.testing.assert_close(tensor, plain.read()[name])


def test_its_clients_limit_their_gradient_as_its_server_does_in_the_paper() -> None:
    assert scala().client.clip == 10.0
    assert scala(clip=math.inf).client.clip == math.inf


def test_an_absent_client_has_no_say_in_the_joint_labels() -> None:
    shape = state().shape_at(1)
    without, never = state(), state()
    # c is in the round and misses this step; or is in no round at all
    answer(scala(), without, batches_of(shape, names="ab"), view())
    few = {name: COUNTS[name] for name in "ab"}
    answer(scala(), never, batches_of(shape, names="ab"), view(few))
    for name, tensor in without.read().items():
        assert torch.equal(tensor, never.read()[name])


def test_a_client_that_keeps_its_counts_to_itself_is_taken_as_even() -> None:
    shape = state().shape_at(1)
    silent, plain = state(), state()
    counts = {**COUNTS, "a": ()}
    one = answer(scala(), silent, batches_of(shape, names="a"), view(counts))["a"]
    other = answer(scala("none"), plain, batches_of(shape, names="a"), view())["a"]
    torch.testing.assert_close(one.gradient, other.gradient)


def test_one_label_alone_gives_gradients_of_next_to_nothing_that_are_finite() -> None:
    server = state()
    before = server.read()
    z = torch.randn(4, *server.shape_at(1), generator=torch.Generator().manual_seed(0))
    ones = ClientBatch(1, Features(1, 0, z, torch.ones(4, dtype=torch.int64), None))
    now = RoundView(1, samples={"a": 9, "b": 9}, label_counts={"a": (0, 9, 0), "b": (0, 9, 0)})
    feedback = answer(scala(), server, {"a": ones, "b": ones}, now)
    for one in feedback.values():
        assert torch.isfinite(one.gradient).all()
        assert float(one.gradient.abs().max()) < 1e-5
    for name, tensor in server.read().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=1e-5)


def test_features_of_zeros_are_learnt_from_as_any() -> None:
    server = state()
    zeros = Features(1, 0, torch.zeros(2, *server.shape_at(1)), torch.tensor([0, 2]), None)
    feedback = answer(scala(), server, {"a": ClientBatch(1, zeros)}, view())
    assert torch.isfinite(feedback["a"].gradient).all()
    assert all(torch.isfinite(tensor).all() for tensor in server.read().values())


def test_one_sample_that_batch_norm_cannot_take_steps_nothing() -> None:
    server = state("resnet18", input_shape=(1, 28, 28))
    before = server.read()
    z = torch.randn(1, *server.shape_at(7), generator=torch.Generator().manual_seed(0))
    found = {"a": ClientBatch(7, Features(1, 0, z, torch.tensor([0]), None))}
    assert answer(scala(), server, found, view()) == {}
    assert all(torch.equal(tensor, before[name]) for name, tensor in server.read().items())


@pytest.mark.parametrize(
    ("numbers", "match"),
    [
        ({"adjust": "server"}, "one of both, local, none"),
        ({"server": "copies"}, "nothing is concatenated"),
        ({"server": "none"}, "expected one of joint, copies, in_turn"),
        ({"strength": -1.0}, "strength"),
        ({"least_share": 0.0}, "least_share"),
        ({"clip": 0.0}, "clip"),
        ({"bottleneck": 0}, "bottleneck"),
        ({"inversion": -0.1}, "at least 0"),
    ],
)
def test_numbers_that_make_no_method_are_refused(numbers: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        scala(**numbers)


# Whole rounds


class Recorder(LocalTransport):
    """Keeps what was asked, and loses the replies it is told to."""

    def __init__(
        self,
        clients: Mapping[str, TrainingClient],
        lost: Callable[[str, Request], bool] = lambda _name, _request: False,
    ) -> None:
        super().__init__(clients)
        self.asked: list[tuple[str, Request]] = []
        self.replies: list[tuple[str, Reply]] = []
        self._lost = lost

    def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
        self.asked += requests.items()
        replies = super().exchange(requests, deadline_s)
        kept = {n: reply for n, reply in replies.items() if not self._lost(n, requests[n])}
        self.replies += kept.items()
        return kept


class Fleet:
    """Clients with labels as told, on the tiny network."""

    def __init__(
        self,
        method: Method,
        labels: Mapping[str, list[int]],
        *,
        batch: int = 12,
        iterations: int = 3,
        lost: Callable[[str, Request], bool] = lambda _name, _request: False,
        backbone: str = "tiny",
        depth: int = 1,
        input_shape: tuple[int, ...] = (1, 8, 8),
        **settings: Any,
    ) -> None:
        self.clients = {}
        for name, own in labels.items():
            generator = np.random.default_rng(ord(name))
            x = generator.standard_normal((len(own), *input_shape)).astype(np.float32)
            self.clients[name] = TrainingClient(name, x, np.array(own))
        net = build(backbone, classes=CLASSES, input_shape=input_shape, seed=0)
        self.state = ServerState(net, Training(0.05, 8, momentum=0.9))
        plan = Plan(
            backbone=backbone,
            input_shape=input_shape,
            classes=CLASSES,
            mean=(0.0,) * input_shape[0],
            std=(1.0,) * input_shape[0],
            depth=depth,
            training=Training(0.05, batch, momentum=0.9, iterations=iterations),
            part=method.client,
        )
        self.transport = Recorder(self.clients, lost)
        plans = dict.fromkeys(labels, plan)
        self.loop = RoundLoop(method, plans, self.state, self.transport, RoundSettings(**settings))

    def run(self, rounds: int = 2) -> list[RoundResult]:
        return [self.loop.run_round(number, 0) for number in range(1, rounds + 1)]

    def finite(self) -> bool:
        return all(bool(torch.isfinite(tensor).all()) for tensor in self.state.read().values())


EVEN = {name: [0, 1, 2, 0, 1, 2, 0, 2] for name in "abcd"}


def test_batches_are_shared_out_by_samples() -> None:
    fleet = Fleet(scala(), {"a": [0] * 10, "b": [1] * 20, "c": [2] * 30}, batch=20)
    fleet.run(1)
    sizes = {
        (name, request.batch)
        for name, request in fleet.transport.asked
        if isinstance(request, Step)
    }
    # 20 * 10 / 60 = 3.3, 20 * 20 / 60 = 6.7, 20 * 30 / 60 = 10
    assert sizes == {("a", 3), ("b", 6), ("c", 10)}
    sent = {(n, len(r.features)) for n, r in fleet.transport.replies if isinstance(r, Features)}
    assert sent == {("a", 3), ("b", 6), ("c", 10)}


@pytest.mark.parametrize(
    ("method", "baseline"),
    [
        (scala("none"), minibatch()),
        (scala("none", server="copies"), splitfed_v1()),
        (scala("none", server="in_turn"), splitfed_v2()),
    ],
    ids=["minibatch-sfl", "splitfed-v1", "splitfed-v2"],
)
def test_unadjusted_in_equal_shares_it_is_its_baseline_bit_for_bit(
    method: Method, baseline: Method
) -> None:
    ours, theirs = Fleet(method, EVEN, batch=12), Fleet(baseline, EVEN, batch=3)
    ours.run()
    theirs.run()
    for name, tensor in ours.state.read().items():
        assert torch.equal(tensor, theirs.state.read()[name]), name


def test_a_straggler_is_left_out_of_one_concatenation_and_rejoins() -> None:
    def late(name: str, request: Request) -> bool:
        return name == "c" and isinstance(request, Step) and request.step == 1

    fleet = Fleet(scala(), EVEN, lost=late)
    (result,) = fleet.run(1)
    assert result.missed_steps == {"c": 1}
    assert result.participants == ("a", "b", "c", "d")
    feedback = [
        name
        for name, request in fleet.transport.asked
        if isinstance(request, Step) and request.step == 2 and request.feedback is None
    ]
    assert feedback == ["c"]  # of step 1
    assert [n for n, r in fleet.transport.replies if isinstance(r, Features) and r.step == 2] == [
        "a",
        "b",
        "c",
        "d",
    ]


def test_some_of_the_clients_take_part_and_share_the_batch() -> None:
    fleet = Fleet(scala(), EVEN, participation=0.5)
    for result in fleet.run(3):
        assert len(result.participants) == 2
    sizes = {r.batch for _, r in fleet.transport.asked if isinstance(r, Step)}
    assert sizes == {6}


@pytest.mark.parametrize("adjust", ["both", "local", "none"])
@pytest.mark.parametrize(
    ("labels", "batch"),
    [
        ({"a": [0] * 8, "b": [1] * 8, "c": [0] * 8}, 12),  # no client has the third class
        ({"a": [0, 1, 2, 0, 1]}, 12),  # one client
        ({name: [0] * 8 for name in "abc"}, 12),  # all biased the same way
        (EVEN, 1),  # fewer samples in a batch than clients
        ({"a": [0], "b": [1]}, 12),  # one sample each
    ],
    ids=["missing-class", "one-client", "same-bias", "small-batch", "one-sample"],
)
def test_rounds_stay_finite(adjust: Any, labels: dict[str, list[int]], batch: int) -> None:
    fleet = Fleet(scala(adjust), labels, batch=batch)
    for result in fleet.run(3):
        assert result.merged
        assert result.participants == tuple(labels)
        assert result.loss is not None
        assert math.isfinite(result.loss)
    assert fleet.finite()


def test_a_batch_of_one_through_batch_norm_leaves_the_round_without_effect() -> None:
    # the last stages have maps of 1x1 here: nothing to normalise over
    fleet = Fleet(
        scala(), {"a": [0, 1]}, batch=1, backbone="resnet18", depth=7, input_shape=(1, 28, 28)
    )
    before = fleet.state.read()
    (result,) = fleet.run(1)
    assert not result.merged
    assert all(torch.equal(tensor, before[name]) for name, tensor in fleet.state.read().items())


def test_a_client_with_nan_losses_spoils_nothing() -> None:
    def silent(name: str, request: Request) -> bool:
        return name == "b" and not isinstance(request, StartRound)

    sick, healthy = Fleet(scala(), EVEN), Fleet(scala(), EVEN, lost=silent)
    sick.clients["b"].x[:] = np.nan
    for result in sick.run(2):
        assert result.participants == ("a", "c", "d")
        assert "NaN" in result.refused["b"]
    healthy.run(2)
    for name, tensor in sick.state.read().items():
        assert torch.equal(tensor, healthy.state.read()[name]), name


def test_a_client_that_lies_about_its_labels_is_out_of_the_round() -> None:
    class Liar(TrainingClient):
        def handle(self, message: Any) -> Reply:
            reply = super().handle(message)
            if isinstance(reply, Ready):
                return replace(reply, label_counts=(10**9, 0, 0))
            return reply

    fleet = Fleet(scala(), EVEN)
    honest = fleet.clients["b"]
    fleet.clients["b"] = Liar("b", honest.x, honest.y)
    (result,) = fleet.run(1)
    assert "label counts" in result.refused["b"]
    assert result.participants == ("a", "c", "d")


class Boaster(TrainingClient):
    """Says it has many samples more, all of them of label 0."""

    claims = 0

    def handle(self, message: Any) -> Reply:
        reply = super().handle(message)
        if isinstance(reply, Ready):
            return replace(reply, samples=self.claims, label_counts=(self.claims, 0, 0))
        return replace(reply, samples=self.claims) if isinstance(reply, Update) else reply


def boasting(claims: int) -> Fleet:
    fleet = Fleet(scala(), EVEN, batch=24, robust="trimmed")
    honest = fleet.clients["b"]
    fleet.clients["b"] = boaster = Boaster("b", honest.x, honest.y)
    boaster.claims = claims
    return fleet


def test_a_boasting_client_brings_and_bends_no_more_than_ten_times_the_median_would() -> None:
    most, more = boasting(80), boasting(2**60)  # the others have 8
    for fleet in (most, more):
        (result,) = fleet.run(1)
        assert result.participants == tuple("abcd")
        sizes = {(n, r.batch) for n, r in fleet.transport.asked if isinstance(r, Step)}
        # 24 * 8 / 104 = 1.8, 24 * 80 / 104 = 18.5
        assert sizes == {("a", 1), ("b", 18), ("c", 1), ("d", 1)}
    # by P_s too: the server's part, which no client holds, has learnt the same
    theirs = most.state.read()
    for name, tensor in more.state.read().items():
        if not name.startswith("stage1."):
            assert torch.equal(tensor, theirs[name]), name


def test_a_client_with_more_than_its_share_of_the_batch_is_out_of_the_round() -> None:
    class Greedy(TrainingClient):
        def handle(self, message: Any) -> Reply:
            if isinstance(message, Step):
                message = replace(message, batch=message.batch + 1 if message.batch else None)
            return super().handle(message)

    fleet = Fleet(scala(), EVEN, batch=12)
    honest = fleet.clients["b"]
    fleet.clients["b"] = Greedy("b", honest.x, honest.y)
    (result,) = fleet.run(1)
    assert "expected shape (1..3, " in result.refused["b"]
    assert result.participants == ("a", "c", "d")


# From a recipe


def recipe(**numbers: Any) -> dict[str, Any]:
    return {
        "method": "scala",
        "method_numbers": numbers,
        "data": {
            "name": "digits", "clients": 6, "partition": "quantity",
            "numbers": {"per_client": 5}, "train_max": 240, "test_max": 60,
        },
        "train": {
            "backbone": "tiny", "rounds": 3, "learning_rate": 0.05, "batch": 24,
            "iterations": 2, "depth": 2, "momentum": 0.9,
        },
        "round": {"participation": 0.5},
    }  # fmt: skip


@pytest.mark.parametrize("name", ["scala-guarded", "scala-two-classes"])
def test_recipes_of_its_own_are_sound(name: str) -> None:
    checked = load_recipe(Path(__file__).parents[3] / "examples" / "recipes" / f"{name}.toml")
    method = checked.built_method
    assert (method.name, checked.train.depth) == ("scala", 2)
    assert method.batch_share is not None
    assert checked.train.training.iterations == 10


def test_rounds_need_to_be_counted_in_batches() -> None:
    data = recipe()
    del data["train"]["iterations"]
    with pytest.raises(ConfigurationError, match=r"expected iterations"):
        build_simulation(read_recipe(data))


@pytest.mark.parametrize("numbers", [{}, {"bottleneck": 4, "inversion": 0.3}], ids=["plain", "pe"])
def test_a_run_goes_on_from_a_checkpoint_to_the_same_bits(
    tmp_path: Path, numbers: dict[str, Any]
) -> None:
    whole = build_simulation(read_recipe(recipe(**numbers)))
    list(run_rounds(whole, []))

    first = build_simulation(read_recipe(recipe(**numbers)))
    rows: list[Any] = []
    rounds = run_rounds(first, rows)
    next(rounds)
    save_checkpoint(tmp_path, first, rows)
    second = build_simulation(read_recipe(recipe(**numbers)))
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    checkpoint.restore(second)
    list(run_rounds(second, checkpoint.rows))

    for name, tensor in whole.state.read().items():
        assert torch.equal(tensor, second.state.read()[name]), name
    for name, client in whole.clients.items():
        assert client.personal.keys() == second.clients[name].personal.keys()
        for key, tensor in client.personal.items():
            assert torch.equal(tensor, second.clients[name].personal[key]), key
