"""The inversion guard: a decoder learns to reconstruct inputs, and the prefix learns against it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import Tensor

from edge_sdk.errors import ConfigurationError
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.client.client_round import ClientRound
from edge_sdk.training.client.inversion_guard import InversionGuard
from edge_sdk.training.data.load import Dataset, load_dataset
from edge_sdk.training.formulas.decoder import Decoder
from edge_sdk.training.formulas.image_similarity import ssim
from edge_sdk.training.protocol.client_part import ClientPart, Inversion
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
from server.training.core.server_state import ServerState
from server.training.methods.scala import scala
from server.training.recipe.recipe import read_recipe
from server.training.rounds.loop import RoundLoop
from server.training.rounds.round import RoundSettings
from server.training.rounds.transport import LocalTransport, Transport
from server.training.run.build import build_network, load_data
from server.training.simulation.build import build_simulation

RATE = 0.1


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset("digits")


def plan_of(data: Dataset, guard: Inversion | None, depth: int = 2, **part: Any) -> Plan:
    return Plan(
        backbone="tiny",
        input_shape=(1, 8, 8),
        classes=10,
        mean=data.mean,
        std=data.std,
        depth=depth,
        training=Training(RATE, 8, iterations=3),
        part=ClientPart(inversion=guard, **part),
    )


def client_of(data: Dataset, name: str = "ada", samples: int = 24) -> TrainingClient:
    return TrainingClient(name, data.x_train[:samples], data.y_train[:samples])


def start_of(plan: Plan, number: int = 1) -> StartRound:
    return StartRound(number, plan, read_weights(network_of(plan).prefix(plan.depth)))


def play(client: TrainingClient, plan: Plan, pull: float = 0.01, number: int = 1) -> Update:
    """A round in which every gradient is the same number everywhere."""
    client.handle(start_of(plan, number))
    feedback = None
    for step in range(3):
        reply = client.handle(Step(number, step, feedback, 8))
        assert isinstance(reply, Features)
        feedback = Feedback(torch.full_like(reply.features, pull), 1.0)
    update = client.handle(EndRound(number, feedback))
    assert isinstance(update, Update)
    return update


def decoder_of(round_: ClientRound) -> Decoder:
    (guard,) = round_.companions
    assert isinstance(guard, InversionGuard)
    return guard.decoder


def differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return any(not torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_guard_without_weight_or_with_a_threshold_of_1_changes_no_bit(digits: Dataset) -> None:
    plain = play(client_of(digits), plan_of(digits, None)).weights
    for guard in (Inversion(weight=0.0, threshold=0.0), Inversion(threshold=1.0)):
        guarded = play(client_of(digits), plan_of(digits, guard)).weights
        assert guarded.keys() == plain.keys()
        assert not differ(guarded, plain)
    assert differ(play(client_of(digits), plan_of(digits, Inversion(threshold=0.0))).weights, plain)


def test_the_prefix_steps_by_the_joint_loss(digits: Dataset) -> None:
    guard = Inversion(weight=0.7, threshold=0.0)
    plan, client = plan_of(digits, guard), client_of(digits, samples=8)
    round_ = ClientRound(client, start_of(plan))
    reply = round_.step(Step(1, 0, None, 8))
    decoder = deepcopy(decoder_of(round_))
    rows = np.random.default_rng([0, 1, crc32(b"ada")]).permutation(8)
    x = torch.from_numpy(client.x[rows])
    prefix = deepcopy(network_of(plan).prefix(2))
    z = prefix(x)
    assert torch.equal(z, reply.features)

    gradient = torch.randn(z.shape, generator=torch.Generator().manual_seed(3))
    # digits are 0 to 16, and this client's too
    assert (client.x.min(), client.x.max()) == (0, 16)
    loss = (gradient * z).sum() + 0.7 * ssim(decoder(z), x / 16).mean()
    expected = torch.autograd.grad(loss, list(prefix.parameters()))
    update = round_.end(EndRound(1, Feedback(gradient, 1.0)))
    for (name, start), step in zip(prefix.named_parameters(), expected, strict=True):
        torch.testing.assert_close(
            update.weights[name], start.detach() - RATE * step, rtol=1e-4, atol=1e-6
        )


def test_without_feedback_the_prefix_learns_nothing(digits: Dataset) -> None:
    plan = plan_of(digits, Inversion(threshold=0.0))
    round_ = ClientRound(client_of(digits), start_of(plan))
    before = read_weights(round_.prefix.module)
    round_.step(Step(1, 0, None, 8))
    update = round_.end(EndRound(1, None))
    assert update.steps == 0
    assert not differ(update.weights, before)


def test_with_an_exit_head_the_guard_pulls_in_full_and_alone_too(digits: Dataset) -> None:
    more: dict[str, Any] = {"exit_head": True, "fusion": "fixed", "exit_share": 1.0}
    # the server has no share: what is left is the exit's gradient and the guard's
    plain = play(client_of(digits), plan_of(digits, None, **more)).weights
    guarded = play(client_of(digits), plan_of(digits, Inversion(threshold=0.0), **more)).weights
    assert differ({k: t for k, t in guarded.items() if not k.startswith("exit")}, plain)
    round_ = ClientRound(
        client_of(digits), start_of(plan_of(digits, Inversion(threshold=0.0), **more))
    )
    round_.step(Step(1, 0, None, 8))
    assert round_.alone().steps == 3


def test_the_decoder_is_kept_and_never_sent(digits: Dataset) -> None:
    client, plan = client_of(digits), plan_of(digits, Inversion())
    first = play(client, plan)
    assert not any("inversion" in name for name in first.weights)
    kept = {name: tensor.clone() for name, tensor in client.personal.items()}
    assert {name.split(".")[0] for name in kept} == {"inversion"}
    play(client, plan, number=2)
    assert differ(client.personal, kept)
    # the second round went on where the first one ended
    fresh = client_of(digits)
    play(fresh, plan, number=2)
    assert differ(client.personal, fresh.personal)


def test_a_trained_decoder_reconstructs_its_inputs(digits: Dataset) -> None:
    client = client_of(digits, samples=64)
    plan = plan_of(digits, Inversion(weight=0.0, learning_rate=5e-3), depth=1)

    def similarity(round_: ClientRound) -> float:
        z = round_.prefix.run(torch.from_numpy(client.x))
        x = torch.from_numpy(client.x) / 16
        return float(ssim(decoder_of(round_)(z), x).mean().detach())

    before = similarity(ClientRound(client, start_of(plan)))
    for number in range(1, 21):
        play(client, plan, pull=0.0, number=number)
    after = similarity(ClientRound(client, start_of(plan)))
    assert before < 0.3
    assert after > 0.6


def test_a_guarded_prefix_is_harder_to_invert_for_its_own_decoder(digits: Dataset) -> None:
    # nothing else pulls at the prefix: only the guard brings the similarity down
    scores = {}
    for weight in (0.0, 5.0):
        client = client_of(digits, samples=64)
        plan = plan_of(digits, Inversion(weight, 0.0, learning_rate=5e-3), depth=1)
        weights = start_of(plan).weights
        for number in range(1, 16):
            client.handle(StartRound(number, plan, weights))
            feedback = None
            for step in range(3):
                reply = client.handle(Step(number, step, feedback, 8))
                assert isinstance(reply, Features)
                feedback = Feedback(torch.zeros_like(reply.features), 1.0)
            update = client.handle(EndRound(number, feedback))
            assert isinstance(update, Update)
            weights = update.weights
        round_ = ClientRound(client, StartRound(16, plan, weights))
        x = torch.from_numpy(client.x)
        scores[weight] = float(
            ssim(decoder_of(round_)(round_.prefix.run(x)), x / 16).mean().detach()
        )
    assert scores[5.0] < scores[0.0] - 0.1


@pytest.mark.parametrize(
    ("guard", "match"),
    [
        ({"weight": -1.0}, "weight"),
        ({"threshold": 1.5}, "threshold"),
        ({"width": 12}, "multiple of 8"),
        ({"learning_rate": 0.0}, "learning_rate"),
    ],
)
def test_impossible_numbers_of_a_guard_are_refused(guard: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        Inversion(**guard)


def test_a_guard_needs_images_and_a_cut(digits: Dataset) -> None:
    with pytest.raises(ConfigurationError, match="images"):
        Plan(
            backbone="har_cnn",
            input_shape=(9, 128),
            classes=6,
            mean=(0.0,) * 9,
            std=(1.0,) * 9,
            depth=1,
            training=Training(0.1, 8),
            part=ClientPart(inversion=Inversion()),
        )
    with pytest.raises(ConfigurationError, match="nothing is cut"):
        ClientPart(whole=True, inversion=Inversion())
    with pytest.raises(ConfigurationError, match="nothing is cut"):
        ClientPart(whole=True, bottleneck=8)


def test_plans_carry_the_guard(digits: Dataset) -> None:
    plan = plan_of(digits, Inversion(0.2, 0.4, 8, 0.01), bottleneck=4)
    assert Plan.from_dict(plan.to_dict()) == plan
    assert network_of(plan).shape_at(2) == (4, 4, 4)


# The whole variant


def recipe(**numbers: Any) -> dict[str, Any]:
    return {
        "method": "scala",
        "method_numbers": {"bottleneck": 4, "inversion": 0.3} | numbers,
        "data": {"name": "digits", "clients": 3, "train_max": 96, "test_max": 30},
        "train": {
            "backbone": "tiny", "rounds": 2, "learning_rate": 0.05, "batch": 24,
            "iterations": 2, "depth": 2,
        },
    }  # fmt: skip


def test_a_recipe_narrows_the_cut_of_all_clients() -> None:
    world = build_simulation(read_recipe(recipe()))
    assert world.state.shape_at(2) == (4, 4, 4)
    result = world.loop.run_round(1, 0)
    assert result.merged
    # 24 samples a step, 2 steps, 4x4x4 floats of 4 bytes
    assert result.bytes_by_kind["up features"] == 24 * 2 * 64 * 4
    assert all("inversion.0.0.weight" in client.personal for client in world.clients.values())


def test_a_bottleneck_needs_to_know_its_depth() -> None:
    data = recipe()
    del data["train"]["depth"]
    checked = read_recipe(data)
    with pytest.raises(ConfigurationError, match="expected the depth"):
        build_network(checked, load_data(checked))


def test_http_trains_the_variant_to_the_same_bits_as_local(
    make_trainer: Callable[..., Any], digits: Dataset
) -> None:
    method = scala(bottleneck=4, inversion=0.3)
    names = ("ada", "bob", "cyd")

    def clients() -> dict[str, TrainingClient]:
        bounds = [0, 40, 96, 168]
        return {
            name: TrainingClient(name, digits.x_train[a:b], digits.y_train[a:b])
            for name, a, b in zip(names, bounds[:-1], bounds[1:], strict=True)
        }

    plan = Plan(
        backbone="tiny",
        input_shape=(1, 8, 8),
        classes=10,
        mean=digits.mean,
        std=digits.std,
        depth=2,
        training=Training(0.05, 30, iterations=2),
        part=method.client,
    )

    def weights_after(transport: Transport) -> dict[str, Tensor]:
        state = ServerState(deepcopy(network_of(plan)), Training(0.05, 8, momentum=0.9))
        settings = RoundSettings(step_deadline_s=30, round_deadline_s=30)
        loop = RoundLoop(method, dict.fromkeys(names, plan), state, transport, settings)
        for number in (1, 2):
            assert loop.run_round(number, 0).participants == names
        return state.read()

    here, there = clients(), clients()
    expected = weights_after(LocalTransport(here))
    trainer = make_trainer()
    trainer.join(there)
    got = weights_after(trainer.transport)
    assert not differ(expected, got)
    for name in names:
        assert here[name].personal.keys() == there[name].personal.keys()
        assert not differ(here[name].personal, there[name].personal)
