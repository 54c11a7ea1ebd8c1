"""A bottleneck at a cut: exact counts, the same views, and weights that travel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from edge_sdk.errors import ConfigurationError
from edge_sdk.nets import Supernet, build
from edge_sdk.training.protocol.weights import load_weights, read_weights

# name, arguments, depth, C at the cut, taps of a kernel
CUTS: list[tuple[str, dict[str, Any], int, int, int]] = [
    ("tiny", {}, 2, 16, 9),
    ("cnn6", {}, 2, 32, 9),
    ("cnn6", {}, 3, 64, 9),  # the last stage: the way back is in the head
    ("alexnet", {}, 2, 64, 9),
    ("vgg11", {}, 2, 128, 9),
    ("resnet18", {"input_shape": (1, 28, 28)}, 2, 64, 9),  # stages that are no nn.Sequential
    ("har_cnn", {}, 2, 64, 3),
]
WIDTH = 8


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def narrowed(name: str, depth: int, **arguments: Any) -> Supernet:
    return build(name, seed=0, bottleneck=(depth, WIDTH), **arguments)


@pytest.mark.parametrize(("name", "arguments", "depth", "C", "taps"), CUTS)
def test_the_pair_adds_its_two_convolutions_and_nothing_else(
    name: str, arguments: dict[str, Any], depth: int, C: int, taps: int
) -> None:
    plain, narrow = build(name, seed=0, **arguments), narrowed(name, depth, **arguments)
    squeeze, expand = taps * C * WIDTH + WIDTH, taps * C * WIDTH + C
    assert count(narrow.prefix(depth)) == count(plain.prefix(depth)) + squeeze
    assert count(narrow.suffix(depth)) == count(plain.suffix(depth)) + expand
    # an exit head sees as many places as before, each of 8 channels
    places = (count(plain.exit_head(depth)) - plain.classes) // plain.classes // C
    assert count(narrow.exit_head(depth)) == (places * WIDTH + 1) * plain.classes
    assert narrow.cuts == plain.cuts


@pytest.mark.parametrize(("name", "arguments", "depth", "C", "taps"), CUTS)
@torch.no_grad()
def test_only_eight_channels_cross_and_every_cut_answers_as_the_whole(
    name: str, arguments: dict[str, Any], depth: int, C: int, taps: int
) -> None:
    net = narrowed(name, depth, **arguments).eval()
    x = torch.randn(2, *net.input_shape, generator=torch.Generator().manual_seed(1))
    before = build(name, seed=0, **arguments).eval().prefix(depth)(x)
    z = net.prefix(depth)(x)
    assert z.shape == (2, WIDTH, *before.shape[2:])
    assert before.shape[1] == C
    assert bool((z < 0).any())  # no ReLU
    exits, whole = net.forward_exits(x)
    for cut in net.cuts:
        torch.testing.assert_close(net.suffix(cut)(net.prefix(cut)(x)), whole)
        torch.testing.assert_close(net.exit_head(cut)(net.prefix(cut)(x)), exits[cut])


def test_other_layers_keep_their_names_and_the_weights_of_the_seed() -> None:
    plain = read_weights(build("cnn6", seed=3).segment(0, None))
    narrow = read_weights(build("cnn6", seed=3, bottleneck=(2, WIDTH)).segment(0, None))
    assert narrow.keys() - plain.keys() == {
        "stage2.squeeze.weight",
        "stage2.squeeze.bias",
        "stage3.expand.weight",
        "stage3.expand.bias",
    }
    for name, tensor in plain.items():
        assert torch.equal(narrow[name], tensor), name


def test_the_same_seed_gives_the_same_bottleneck_and_weights_travel() -> None:
    one, other = narrowed("tiny", 2), narrowed("tiny", 2)
    for name, tensor in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    fresh = build("tiny", seed=9, bottleneck=(2, WIDTH))
    load_weights(fresh.prefix(2), read_weights(one.prefix(2)))
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(fresh.prefix(2)(x), one.prefix(2)(x))


@pytest.mark.parametrize(
    ("name", "bottleneck", "match"),
    [
        ("cnn6", (1, 8), "one of 2, 3; got 1"),
        ("cnn6", (2, 32), "1 to 31 channels at depth 2, got 32"),
        ("cnn6", (2, 0), "1 to 31 channels"),
        ("vit_s", (2, 8), "tokens of shape"),
    ],
)
def test_what_cannot_be_narrowed_is_refused(
    name: str, bottleneck: tuple[int, int], match: str
) -> None:
    with pytest.raises(ConfigurationError, match=match), torch.device("meta"):
        build(name, input_shape=(3, 32, 32) if name == "vit_s" else None, bottleneck=bottleneck)
