"""A user's own network: its stages, its exits, what is refused, and repeatable dropout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edge_sdk.errors import ConfigurationError
from edge_sdk.nets import Normalise, Supernet, build, use_network
from edge_sdk.nets.copying import copy_module
from edge_sdk.nets.own.dropout import RepeatableDropout
from edge_sdk.nets.own.exits import exit_for
from edge_sdk.nets.own.network import check_training

EXAMPLES = Path(__file__).parents[2] / "examples" / "own_network"
CLASSES, SHAPE = 10, (1, 8, 8)


def named(function: Callable[..., Any]) -> str:
    """The word by which a function of this module is named, once it is."""
    word = f"{__name__}:{function.__name__}"
    use_network(word)
    return word


def built(function: Callable[..., Any], shape: tuple[int, ...] = SHAPE, **more: Any) -> Supernet:
    return build(named(function), classes=CLASSES, input_shape=shape, seed=0, **more)


class Residual(nn.Module):
    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Conv2d(ins, outs, 3, stride, 1, bias=False)
        self.norm = nn.GroupNorm(2, outs)
        self.shortcut = nn.Conv2d(ins, outs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.body(x)) + self.shortcut(x))


def flat(classes: int, input_shape: tuple[int, ...]) -> nn.Sequential:
    relu = nn.ReLU()  # one module at several places
    return nn.Sequential(
        *(nn.Conv2d(input_shape[0], 8, 3, padding=1), nn.BatchNorm2d(8), relu, nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), relu, nn.Dropout(0.5), nn.Flatten()),
        *(nn.Linear(16 * 16, 32), relu, nn.Linear(32, classes)),
    )


def blocks() -> list[nn.Module]:
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))
    return [nn.Conv2d(1, 8, 3, padding=1), Residual(8, 8, 1), Residual(8, 16, 2), head]


def sensor(**sizes: Any) -> nn.Sequential:
    channels = sizes["input_shape"][0]
    return nn.Sequential(
        nn.Conv1d(channels, 8, 5, padding=2),
        nn.MaxPool1d(4),
        nn.Conv1d(8, 12, 5, padding=2),
        nn.Sequential(
            nn.Flatten(), nn.Linear(12 * 8, 16), nn.ReLU(), nn.Linear(16, sizes["classes"])
        ),
    )


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 6, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.patch(x)
        return tokens.flatten(2).transpose(1, 2)


class First(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


def transformer() -> nn.Sequential:
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
    return nn.Sequential(Tokens(), layer, First(), nn.LayerNorm(6), nn.Linear(6, CLASSES))


# the layers of each stage, the cuts, the shapes there and the inputs of the exits' linear layers,
# by hand: 8x8 maps are pooled to 3x3 cells, 4x4 to 3x3 (windows of 2), a row of 32 or 8 to 3
@pytest.mark.parametrize(
    ("function", "shape", "stages", "shapes", "features"),
    [
        (flat, SHAPE, 3, {1: (8, 4, 4), 2: (16, 4, 4)}, [72, 144]),
        (blocks, SHAPE, 3, {1: (8, 8, 8), 2: (8, 8, 8)}, [72, 72]),
        (sensor, (3, 32), 2, {1: (8, 8), 2: (12, 8)}, [24, 36]),
        (transformer, SHAPE, 2, {1: (4, 6)}, [6]),
    ],
    ids=["flat", "blocks", "sensor", "transformer"],
)
def test_stages_and_exits_are_found(
    function: Callable[..., Any],
    shape: tuple[int, ...],
    stages: int,
    shapes: dict[int, tuple[int, ...]],
    features: list[int],
) -> None:
    net = built(function, shape)
    assert stages == net.L
    assert {depth: net.shape_at(depth) for depth in net.cuts} == shapes
    heads = [[*net.exit_head(depth).children()][-1] for depth in net.cuts]
    assert [head.in_features for head in heads if isinstance(head, nn.Linear)] == features
    assert net.suffix(1).classifier.out_features == CLASSES


def test_the_parts_compute_what_the_users_module_computes() -> None:
    net = built(flat, mean=[3.0], std=[2.0]).eval()
    own = flat(CLASSES, SHAPE)
    own.load_state_dict({name: net.state_dict()[net.own_names[name]] for name in own.state_dict()})
    x = torch.randint(0, 17, (5, *SHAPE), generator=torch.Generator().manual_seed(1))
    expected = own.eval()((x.float() - 3) / 2)
    with torch.no_grad():
        torch.testing.assert_close(net(x), expected)
        for depth in net.cuts:
            torch.testing.assert_close(net.suffix(depth)(net.prefix(depth)(x)), expected)


def test_one_seed_gives_one_network() -> None:
    one, same, other = built(flat), built(flat), build(named(flat), classes=10, input_shape=SHAPE)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, same.state_dict()[name]), name
    assert not torch.equal(
        one.head.get_parameter("10.weight"), other.head.get_parameter("10.weight")
    )


_KEPT = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, CLASSES))


def kept() -> nn.Sequential:
    return _KEPT


def test_a_function_that_returns_one_module_twice_gives_two_networks() -> None:
    one, other = built(kept), built(kept)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.zero_()
    assert all(bool(parameter.any()) for parameter in other.parameters())


def supernet(classes: int, input_shape: tuple[int, ...]) -> Supernet:
    return Supernet(
        name="mine",
        input_shape=input_shape,
        stages=[nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)],
        exits={2: nn.Sequential(nn.Flatten(), nn.Linear(64, classes))},
        head=nn.Sequential(nn.Flatten(), nn.Linear(16, classes)),
        classes=classes,
    )


def normalised(classes: int, input_shape: tuple[int, ...]) -> Supernet:
    net = supernet(classes, input_shape)
    net.normalise = Normalise([5.0], [4.0])
    return net


def test_a_supernet_keeps_its_cuts_and_its_own_normalisation() -> None:
    net = built(supernet, mean=[3.0], std=[2.0])
    assert net.cuts == (2,)
    assert net.normalise.mean.tolist() == [3.0]
    assert built(normalised, mean=[3.0], std=[2.0]).normalise.mean.tolist() == [5.0]


def test_a_layer_that_makes_its_tensors_on_the_cpu_is_cut_too() -> None:
    net = built(positions)
    assert net.shape_at(1) == (4, 8, 8)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return out + torch.arange(8.0, device="cpu")


def positions() -> nn.Sequential:
    return nn.Sequential(Positions(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(144, CLASSES))


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask


class TwoOutputs(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Labels(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(1)


CONV, LINEAR = nn.Conv2d(1, 4, 3), nn.Linear(144, CLASSES)
SHARED, FROZEN = nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 4, 3).requires_grad_(False)
REFUSED: dict[str, tuple[object, str]] = {
    "not_a_network": ("text", "an nn.Sequential, a list of stages or a Supernet, got a str"),
    "not_layers": ([CONV, "relu"], "expected a list of torch modules, got a str in it"),
    "two_inputs": (
        [CONV, TwoInputs(), LINEAR],
        r"layer '1' \(TwoInputs\): expected one input, .* 2 \(x, mask\)",
    ),
    "two_outputs": (
        [CONV, TwoOutputs(), LINEAR],
        r"layer '1' \(TwoOutputs\): expected it to return one tensor.* tuple of 2",
    ),
    "labels": (
        [CONV, Labels(), LINEAR],
        r"layer '1' \(Labels\): expected floating-point features .*int64",
    ),
    "no_fit": (
        [CONV, nn.Flatten(), nn.Linear(9, 2)],
        r"layer '2' \(Linear\): failed on samples of shape \(144,\)",
    ),
    "one_layer": ([nn.Flatten(), nn.Linear(64, CLASSES)], "expected two or more layers"),
    "softmax": (
        [CONV, nn.Flatten(), LINEAR, nn.Softmax(1)],
        r"layer '3' \(Softmax\): .* got Softmax; leave out a softmax",
    ),
    "classes": ([CONV, nn.Flatten(), nn.Linear(144, 7)], r"shape \(10,\) .* got \(7,\)"),
    "shared": (
        [SHARED, nn.ReLU(), SHARED, nn.Flatten(), nn.Linear(64, CLASSES)],
        r"stages\.0\.\S+ and stages\.1\.\S+ are one tensor",
    ),
    "frozen": ([FROZEN, nn.Flatten(), LINEAR], r"stages\.0\.weight: expected .* frozen"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_network_that_cannot_be_cut_names_the_layer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, message = REFUSED[name]
    monkeypatch.setitem(globals(), name, lambda: result)
    globals()[name].__name__ = name
    with pytest.raises(ConfigurationError, match=f"{name}: .*{message}"):
        built(globals()[name])


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.spare = nn.Conv2d(1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return out


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.kept: Callable[[Tensor], Tensor] = lambda x: self.conv(x) + 0

    def forward(self, x: Tensor) -> Tensor:
        return self.kept(x)


def unused() -> nn.Sequential:
    return nn.Sequential(Unused(), nn.Flatten(), nn.Linear(144, CLASSES))


def closure() -> nn.Sequential:
    return nn.Sequential(Kept(), nn.Flatten(), nn.Linear(144, CLASSES))


def test_a_parameter_that_does_not_learn_is_named() -> None:
    check_training(built(flat))
    with pytest.raises(ConfigurationError, match=r"stages\.0\.spare\.weight: .*gets no gradient"):
        check_training(built(unused))
    # its copies would run the layer of the first network
    with pytest.raises(ConfigurationError, match=r"stages\.0\.conv\.weight: .*gets no gradient"):
        check_training(built(closure))


def test_only_a_function_that_was_named_is_called(tmp_path: Path) -> None:
    (tmp_path / "never_named.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(ConfigurationError, match="agent train --backbone never_named:network"):
        build("never_named:network", classes=CLASSES, input_shape=SHAPE)
    with pytest.raises(ConfigurationError, match=r"put nowhere_at_all\.py in"):
        use_network("nowhere_at_all:network", (tmp_path,))
    use_network("tiny")  # a name of ours needs nothing


def test_own_networks_have_no_defaults() -> None:
    with pytest.raises(ConfigurationError, match="expected at least 2 classes and an input shape"):
        build(named(flat))
    with pytest.raises(ConfigurationError, match="expected no norm, since your own function"):
        built(flat, norm="group")


def test_a_bottleneck_narrows_a_cut_of_an_own_network() -> None:
    net = built(blocks, bottleneck=(2, 4))
    assert net.shape_at(2) == (4, 8, 8)
    with torch.no_grad():
        assert net.eval()(torch.zeros(1, *SHAPE)).shape == (1, CLASSES)


def test_exits_pool_odd_and_narrow_maps_with_plain_windows() -> None:
    head = exit_for((4, 7, 2), 3, tokens=False)  # 7 to 3 cells, 2 to 2 cells
    assert head is not None
    z = torch.randn(2, 4, 7, 2, generator=torch.Generator().manual_seed(0))
    # windows of 3 rows from rows 0, 2 and 4: what adaptive pooling does with 7 and 3
    expected = nn.functional.adaptive_avg_pool2d(z, (3, 2)).flatten(1)
    torch.testing.assert_close(head[1](head[0](z)), expected)
    wide = exit_for((512, 8, 8), 3, tokens=False)
    assert wide is not None
    assert isinstance(wide[-1], nn.Linear)
    assert wide[-1].in_features == 512 * 4  # 3 x 3 cells would be above 2,304 features
    assert exit_for((2, 3, 3, 3, 3), 3, tokens=False) is None


def test_dropout_draws_its_mask_from_its_input_alone() -> None:
    net = built(flat).train()
    (layer,) = (part for part in net.modules() if isinstance(part, RepeatableDropout))
    x = torch.rand(64, 16, 4, 4, generator=torch.Generator().manual_seed(3)) + 1
    first = layer(x)
    torch.rand(7)  # the shared generator moves on, as another thread's draws would move it
    assert torch.equal(copy_module(layer)(x), first)
    assert not torch.equal(layer(x * 2) == 0, first == 0)
    share = float((first == 0).float().mean())
    assert share == pytest.approx(0.5, abs=0.02)  # 4 standard deviations of 16,384 draws
    kept_values = first[first != 0]
    torch.testing.assert_close(kept_values, (x * 2)[first != 0])
    assert torch.equal(layer.eval()(x), x)
    channels = RepeatableDropout(0.5, channels=True, key=1)
    zeroed = (channels(x) == 0).flatten(2)
    assert torch.equal(zeroed.any(2), zeroed.all(2))


@pytest.mark.parametrize(
    ("word", "stages", "cuts"), [("my_network", 3, (1, 2)), ("residual", 7, (1, 2, 3, 4, 5, 6))]
)
def test_the_examples_are_cut_as_the_document_says(
    word: str, stages: int, cuts: tuple[int, ...]
) -> None:
    use_network(f"{word}:network", (EXAMPLES,))
    net = build(f"{word}:network", classes=CLASSES, input_shape=SHAPE, seed=0)
    check_training(net)
    assert (net.L, net.cuts) == (stages, cuts)
