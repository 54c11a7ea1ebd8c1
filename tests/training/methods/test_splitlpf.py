"""SplitLPF in the round loop: the U split, the personal back, weights by contribution."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edge_sdk.errors import ConfigurationError, FrameError
from edge_sdk.nets import build
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.client.personal_head import personal_rate
from edge_sdk.training.protocol.client_part import ClientPart, PersonalBack
from edge_sdk.training.protocol.messages import (
    Features,
    OutputGradient,
    Outputs,
    Ready,
    Reply,
    Request,
    StartRound,
    Step,
    Update,
)
from edge_sdk.training.protocol.weights import read_weights
from server.training.core.round_view import RoundView
from server.training.core.weighted_mean import Contribution, by_samples
from server.training.methods.compose import combine
from server.training.methods.formulas.contrastive import alignment_loss
from server.training.methods.harmony import harmony
from server.training.methods.method import Method
from server.training.methods.splitlpf import by_contribution, splitlpf
from server.training.recipe.recipe import read_recipe
from server.training.run.checkpoint import latest_checkpoint
from server.training.simulation.run import simulate
from tests.training.worlds import CLASSES, SIZES, World, assert_same, client_of, meddling

RATE, DEPTH = 0.05, 2


def world_of(method: Method, names: str = "abc", **more: Any) -> World:
    """Clients of one depth that keep their labels."""
    return World(method, names, depth=DEPTH, send_labels=False, **more)


def plain(**numbers: Any) -> Method:
    """Without what differs from a network in one piece."""
    return splitlpf(dropout=0.0, follow_accuracy=False, **numbers)


def test_u_split_trains_as_the_network_in_one_piece() -> None:
    world = world_of(plain(), "a", batch=SIZES["a"])
    world.run(3)

    net = build("tiny", classes=CLASSES, seed=0)
    optimiser = torch.optim.SGD(net.parameters(), RATE)
    x, y = torch.from_numpy(world.clients["a"].x), torch.from_numpy(world.clients["a"].y)
    for _ in range(3):  # one batch a round, of all samples: their order does not matter
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimiser.step()

    expected = read_weights(net.segment(0, None))
    back = {f"head.{last_of(net)}.{k}" for k in ("weight", "bias")}
    got = world.state.read()
    for name in expected.keys() - back:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-6)
    for kind in ("weight", "bias"):
        torch.testing.assert_close(
            world.clients["a"].personal[f"back.{kind}"],
            expected[f"head.{last_of(net)}.{kind}"],
            rtol=1e-5,
            atol=1e-6,
        )


def test_alignment_is_of_the_embeddings_below_the_clients_layer() -> None:
    """The middle is stepped by the client's loss and by CSA; front and back by the loss alone."""
    sent: list[Features] = []

    def watch(_name: str, _request: Request, reply: Reply) -> Reply:
        if isinstance(reply, Features):
            sent.append(reply)
        return reply

    aligned = combine(
        plain(), {"align": harmony(align_weight=0.3, margin=9.0, normalise_embeddings=False)}
    )
    ours, alone = (
        world_of(method, "a", batch=SIZES["a"], transport=meddling(watch))
        for method in (aligned, plain())
    )
    ours.run(1)
    alone.run(1)
    seen = sent[0]
    assert seen.view is not None
    assert seen.same is not None
    net = build("tiny", classes=CLASSES, seed=0)
    middle = net.suffix(DEPTH).neck
    parameters = list(middle.parameters())
    pairs = alignment_loss(middle(seen.view), middle(seen.features), seen.same == 1, 9.0)
    found = torch.autograd.grad(0.3 * pairs, parameters)
    got, plainly = ours.state.read(), alone.state.read()
    middles = {}
    for (name, _), gradient in zip(middle.named_parameters(), found, strict=True):
        middles[name] = plainly[name] - RATE * gradient  # plain SGD: two steps are one of their sum
    for name, tensor in plainly.items():
        torch.testing.assert_close(got[name], middles.get(name, tensor), rtol=1e-4, atol=1e-6)
    own, others = ours.clients["a"].personal, alone.clients["a"].personal
    assert all(torch.equal(own[name], tensor) for name, tensor in others.items())


def test_back_stays_with_its_client_and_is_never_averaged() -> None:
    world = world_of(plain())
    start = world.state.read()
    world.run(2)
    end = world.state.read()
    classifier = f"head.{last_of(world.state.net)}"
    for kind in ("weight", "bias"):
        torch.testing.assert_close(end[f"{classifier}.{kind}"], start[f"{classifier}.{kind}"])
    backs = [world.clients[name].personal["back.weight"] for name in "abc"]
    assert not torch.equal(backs[0], backs[1])
    assert not torch.equal(backs[1], backs[2])


def test_neither_labels_nor_their_counts_are_sent() -> None:
    replies: list[Reply] = []

    def record(_name: str, _request: Request, reply: Reply) -> Reply:
        replies.append(reply)
        return reply

    world_of(splitlpf(), transport=meddling(record)).run(1)
    kinds = {type(reply) for reply in replies}
    assert kinds == {Ready, Features, OutputGradient, Update}
    assert all(r.label_counts == () for r in replies if isinstance(r, Ready))
    assert all(r.labels is None and r.loss is None for r in replies if isinstance(r, Features))


def test_alpha_one_trains_to_the_bits_of_weights_by_samples() -> None:
    by_direction = world_of(plain(alpha=1.0))
    by_count = world_of(replace(plain(), weigh=by_samples))
    by_direction.run(3)
    by_count.run(3)
    got, expected = by_direction.state.read(), by_count.state.read()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_direction_changes_the_weights_from_the_second_round_on() -> None:
    by_direction, by_count = world_of(plain(alpha=0.1)), world_of(plain(alpha=1.0))
    first, second = by_direction.run(2)
    samples = sum(SIZES[name] for name in "abc")
    assert first.weights == pytest.approx({name: SIZES[name] / samples for name in "abc"})
    assert second.weights != pytest.approx(first.weights, abs=1e-3)
    by_count.run(2)
    weights = (
        by_direction.state.read()["stage1.0.weight"],
        by_count.state.read()["stage1.0.weight"],
    )
    assert not torch.equal(*weights)


def rule_inputs(*ends: float) -> tuple[dict[str, Contribution], RoundView]:
    """Clients of ten samples with one weight each, which goes from 0 to `ends`. The last round's
    global gradient was 1, so that a client that ends below 0 pulls as it did.
    """
    now = RoundView(2, sent={"stage1.w": torch.zeros(1)})
    now.memory["previous gradient/stage1.w"] = torch.ones(1)
    contributions = {
        str(place): Contribution(1, Update(2, {"stage1.w": torch.tensor([end])}, 10, 1.0, 1, 1))
        for place, end in enumerate(ends)
    }
    return contributions, now


def test_rule_pays_clients_that_pull_along_and_remembers_the_direction_of_all() -> None:
    contributions, now = rule_inputs(-2.0, -4.0, 1.0)
    weights = by_contribution()(contributions, now)
    # cosines 1, 1, -1: .5/3 + .5/3 = 1/3 for two, .5/3 - .5/3 = 0 for the third
    assert weights == pytest.approx({"0": 0.5, "1": 0.5, "2": 0.0})
    # the mean of gradients 2 and 4
    assert now.memory["previous gradient/stage1.w"].tolist() == [3.0]


def test_rule_goes_by_the_front_and_by_no_auxiliary_model() -> None:
    """An averaged auxiliary model travels with the front (parts: auxiliary = besplit)."""
    contributions, now = rule_inputs(-2.0, -4.0, 1.0)
    now.sent["auxiliary1.head.w"] = torch.zeros(1)
    now.memory["previous gradient/auxiliary1.head.w"] = torch.full((1,), -9.0)
    for contribution in contributions.values():
        contribution.update.weights["auxiliary1.head.w"] = torch.tensor([-5.0])
    weights = by_contribution()(contributions, now)
    assert weights == pytest.approx({"0": 0.5, "1": 0.5, "2": 0.0})


def test_rule_falls_back_to_samples_where_all_pull_backwards() -> None:
    contributions, now = rule_inputs(2.0, 4.0)
    assert by_contribution(0.5)(contributions, now) == {"0": 0.5, "1": 0.5}


def test_rule_takes_a_round_that_changed_nothing() -> None:
    contributions, now = rule_inputs(0.0, 0.0)
    assert by_contribution(0.0)(contributions, now) == {"0": 0.5, "1": 0.5}
    assert now.memory["previous gradient/stage1.w"].tolist() == [0.0]
    # and the round after it has no direction to go by
    again, _ = rule_inputs(-2.0, 3.0)
    assert by_contribution(0.0)(again, now) == {"0": 0.5, "1": 0.5}


def test_one_client_alone_is_the_average() -> None:
    world = world_of(splitlpf(), "a")
    results = world.run(3)
    assert [result.weights for result in results] == [{"a": 1.0}] * 3


def test_client_without_samples_of_some_class_trains() -> None:
    world = world_of(splitlpf(), labels={"b": [1, 1, 1, 1]})
    assert [result.participants for result in world.run(2)] == [("a", "b", "c")] * 2


def test_batches_of_one_sample_train() -> None:
    world = world_of(splitlpf(), batch=1)
    (result,) = world.run(1)
    assert result.participants == ("a", "b", "c")
    assert result.loss is not None
    assert math.isfinite(result.loss)


def test_client_with_nan_losses_is_named_and_spares_the_others() -> None:
    def spoil(name: str, _request: Request, reply: Reply) -> Reply:
        if name == "b" and isinstance(reply, OutputGradient):
            return replace(reply, loss=math.nan)
        return reply

    world = world_of(plain(), transport=meddling(spoil))
    (result,) = world.run(1)
    assert result.participants == ("a", "c")
    assert "loss" in result.refused["b"]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in world.state.read().values())


def test_gradient_that_is_not_finite_is_refused() -> None:
    def spoil(name: str, _request: Request, reply: Reply) -> Reply:
        if name == "b" and isinstance(reply, OutputGradient):
            return replace(reply, gradient=torch.full_like(reply.gradient, math.inf))
        return reply

    (result,) = world_of(plain(), transport=meddling(spoil)).run(1)
    assert set(result.refused) == {"b"}


def test_rate_follows_accuracy_within_bounds() -> None:
    assert [personal_rate(0.5, accuracy) for accuracy in (0.0, 0.6, 0.95, 1.0)] == pytest.approx(
        [0.5, 0.2, 0.05, 0.05]
    )


def test_the_layers_own_rate_decays_from_round_to_round_as_the_others_do() -> None:
    follows, own = (
        world_of(plain(back_rate=rate), decay=0.5, learning_rate=RATE) for rate in (None, RATE)
    )
    assert_same(own.trained(3), follows.trained(3))


def test_accuracy_of_the_last_round_is_kept_and_lowers_the_rate() -> None:
    client, plan = client_of("a"), world_of(splitlpf(), "a").plans["a"]
    start = StartRound(1, plan, read_weights(build("tiny", classes=CLASSES, seed=0).prefix(DEPTH)))
    client.handle(start)
    assert client._round.responder.optimiser.learning_rate == RATE  # type: ignore[union-attr]  # under way
    client.personal["back.accuracy"] = torch.tensor(0.4)
    client.handle(start)
    rate = client._round.responder.optimiser.learning_rate  # type: ignore[union-attr]  # under way
    assert rate == pytest.approx(0.6 * RATE)


def test_accuracy_counts_answers_without_dropout_before_each_step() -> None:
    world = world_of(splitlpf(), "a", batch=SIZES["a"])
    net = build("tiny", classes=CLASSES, seed=0).eval()
    client = world.clients["a"]
    right = (net(torch.from_numpy(client.x)).argmax(1).numpy() == client.y).mean()
    world.run(1)
    assert float(client.personal["back.accuracy"]) == pytest.approx(right)


def opened(dropout: float, round_: int = 1) -> tuple[TrainingClient, Tensor]:
    """A client with a batch open, and embeddings for it."""
    client = client_of("c")
    method = splitlpf(dropout=dropout)
    start = read_weights(build("tiny", classes=CLASSES, seed=0).prefix(DEPTH))
    client.handle(StartRound(round_, world_of(method, "a").plans["a"], start))
    client.handle(Step(round_, 0))
    return client, torch.ones(4, 64)


def test_dropout_leaves_out_its_share_and_draws_by_round() -> None:
    left_out = {}
    for round_ in (1, 2):
        client, embeddings = opened(0.5, round_)
        reply = client.handle(Outputs(round_, 0, embeddings))
        assert isinstance(reply, OutputGradient)
        # where an embedding is left out, nothing depends on it
        left_out[round_] = reply.gradient == 0
        assert 0.35 < float(left_out[round_].float().mean()) < 0.65
    assert not torch.equal(left_out[1], left_out[2])
    client, embeddings = opened(0.5, 1)
    again = client.handle(Outputs(1, 0, embeddings))
    assert isinstance(again, OutputGradient)
    assert torch.equal(again.gradient == 0, left_out[1])


@pytest.mark.parametrize(
    "wrong", [torch.ones(4, 63), torch.ones(3, 64), torch.full((4, 64), math.nan)]
)
def test_embeddings_that_do_not_fit_are_refused(wrong: Tensor) -> None:
    client, _ = opened(0.5)
    with pytest.raises(FrameError, match="embeddings"):
        client.handle(Outputs(1, 0, wrong))


def test_outputs_for_no_open_step_are_refused() -> None:
    client, embeddings = opened(0.5)
    with pytest.raises(FrameError, match="no step 1"):
        client.handle(Outputs(1, 1, embeddings))
    client.handle(Outputs(1, 0, embeddings))
    with pytest.raises(FrameError, match="no step 0"):
        client.handle(Outputs(1, 0, embeddings))


@pytest.mark.parametrize(
    "wrong",
    [{"dropout": 1.0}, {"dropout": -0.1}, {"learning_rate": 0.0}, {"follow_accuracy": 1}],
)
def test_wrong_numbers_of_a_back_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="expected"):
        PersonalBack(**wrong)


@pytest.mark.parametrize("other", [{"whole": True}, {"exit_head": True}])
def test_back_goes_with_no_other_end(other: dict[str, bool]) -> None:
    with pytest.raises(ConfigurationError, match="back"):
        ClientPart(back=PersonalBack(), **other)  # type: ignore[arg-type]  # wrong on purpose


def test_dead_zone_is_a_cosine() -> None:
    with pytest.raises(ConfigurationError, match=r"dead_zone: expected a finite number from 0 to"):
        splitlpf(dead_zone=1.5)


def test_alpha_is_a_share() -> None:
    with pytest.raises(ConfigurationError, match="alpha"):
        splitlpf(alpha=1.5)


def test_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    def recipe(rounds: int) -> Any:
        return read_recipe(
            {
                "method": "splitlpf",
                "data": {"name": "digits", "clients": 3, "train_max": 120, "test_max": 40},
                "train": {
                    "backbone": "tiny",
                    "rounds": rounds,
                    "learning_rate": 0.1,
                    "batch": 16,
                    "momentum": 0.9,
                    "depth": 2,
                },
            }
        )

    simulate(recipe(4), tmp_path / "whole")
    simulate(recipe(2), tmp_path / "parts")
    simulate(recipe(4), tmp_path / "parts", resume=True)
    whole, parts = (latest_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert whole is not None
    assert parts is not None
    assert whole.tensors.keys() == parts.tensors.keys()
    assert any(name.startswith("memory/previous gradient/") for name in whole.tensors)
    assert "client/client-0/back.weight" in whole.tensors
    for name, tensor in whole.tensors.items():
        assert torch.equal(parts.tensors[name], tensor), name


def last_of(net: nn.Module) -> str:
    return [name for name, _ in net.head.named_children()][-1]  # type: ignore[union-attr]  # a Sequential
