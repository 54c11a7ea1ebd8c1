"""PFSL in the round loop: a frozen front, personal backs, equal weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from edge_sdk.errors import ConfigurationError
from edge_sdk.nets import build
from edge_sdk.training.protocol.messages import Reply, Request, Update
from edge_sdk.training.protocol.weights import read_weights
from server.training.methods.method import Method
from server.training.methods.pfsl import pfsl
from server.training.recipe.recipe import read_recipe
from tests.training.worlds import CLASSES, SIZES, World, assert_same, differences, meddling

RATE, DEPTH = 0.05, 2


def world_of(method: Method, names: str = "abc", **more: Any) -> World:
    """Clients of one depth that keep their labels."""
    return World(method, names, depth=DEPTH, send_labels=False, **more)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_client_alone_trains_as_the_network_in_one_piece(frozen: bool) -> None:
    world = world_of(pfsl(freeze_front=frozen), "a", batch=SIZES["a"])
    world.run(3)

    net = build("tiny", classes=CLASSES, seed=0)
    trained = net.suffix(DEPTH) if frozen else net.segment(0, None)
    optimiser = torch.optim.SGD(trained.parameters(), RATE)
    x, y = torch.from_numpy(world.clients["a"].x), torch.from_numpy(world.clients["a"].y)
    for _ in range(3):  # one batch a round, of all samples: their order does not matter
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimiser.step()

    expected = read_weights(net.segment(0, None))
    mark = net.segment(0, None).classifier_prefix
    got = world.state.read() | {
        mark + kind: world.clients["a"].personal[f"back.{kind}"] for kind in ("weight", "bias")
    }
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backbone", ["tiny", "resnet18"])  # the second has BatchNorm
def test_a_frozen_front_keeps_every_bit_and_the_middle_learns(backbone: str) -> None:
    fronts: list[Update] = []

    def keep(_name: str, _request: Request, reply: Reply) -> Reply:
        if isinstance(reply, Update):
            fronts.append(reply)
        return reply

    method, one_batch = pfsl(freeze_front=True), max(SIZES.values())
    world = world_of(method, transport=meddling(keep), backbone=backbone, batch=one_batch)
    changed = differences(world.trained(1), world.before)
    middle = {f"stage{stage}" for stage in range(DEPTH + 1, world.state.net.L + 1)}
    assert middle <= {name.partition(".")[0] for name in changed}
    assert len(fronts) == 3
    assert any("running_mean" in name for name in fronts[0].weights) == (backbone == "resnet18")
    for update in fronts:
        assert_same(update.weights, {name: world.before[name] for name in update.weights})


def test_middles_have_equal_weights_and_backs_stay() -> None:
    world = world_of(pfsl())
    (result,) = world.run(1)
    assert result.weights == dict.fromkeys("abc", 1 / 3)
    last = world.state.net.segment(0, None).classifier_prefix
    after = world.state.read()
    own = {name: tensor for name, tensor in after.items() if name.startswith(last)}
    for name, tensor in own.items():  # the mean of copies that nobody trained
        torch.testing.assert_close(tensor, world.before[name])
    backs = [client.personal["back.weight"] for client in world.clients.values()]
    assert not torch.equal(backs[0], backs[1])


def test_the_personalisation_is_passes_of_the_last_layer() -> None:
    assert pfsl(3).fine_tuning.refit_epochs == 3
    assert pfsl(0).fine_tuning.refit_epochs == 0


def test_a_front_of_random_weights_is_not_frozen() -> None:
    given: dict[str, Any] = {
        "method": "pfsl",
        "method_numbers": {"freeze_front": True},
        "data": {"name": "digits", "clients": 4},
        "train": {"backbone": "tiny", "rounds": 1, "learning_rate": 0.1, "batch": 8},
    }
    with pytest.raises(ConfigurationError, match=r"train: pfsl keeps the fronts.*expected start"):
        read_recipe(given)
    given["train"]["start"] = "pretrained.safetensors"
    assert read_recipe(given).built_method.client.frozen
    given["train"].pop("start")
    given["method_numbers"] = {}
    assert not read_recipe(given).built_method.client.frozen
