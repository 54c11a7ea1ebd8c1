"""The plain convolutional networks, without normalisation layers: tiny, cnn6, cnn8, alexnet.

Each stage is conv3x3 + ReLU and the pool that follows. Exits average the map down to a small grid,
since a global pool starves the shallow ones (tiny on the digits, depth 1: 37 % against 81 %).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from edge_sdk.errors import ConfigurationError
from edge_sdk.nets.layers import global_head, grid_head
from edge_sdk.nets.supernet import Normalise, Supernet


@dataclass(frozen=True, slots=True)
class _Conv:
    """One stage: its output channels and its pool, as (kernel, stride); None for no pool."""

    channels: int
    pool: tuple[int, int] | None = None

    def shrunk(self, side: int) -> int:
        """The map's side after this stage."""
        if self.pool is None:
            return side
        kernel, stride = self.pool
        return (side - kernel) // stride + 1


def tiny(input_shape: tuple[int, ...], classes: int, normalise: Normalise | None) -> Supernet:
    """Ours, for 8x8 digits: 34,282 parameters, L = 5, trained in seconds."""
    stages = (_Conv(8), _Conv(16, (2, 2)), _Conv(32), _Conv(32, (2, 2)), _Conv(64))
    return Supernet(
        name="tiny",
        input_shape=input_shape,
        stages=_stages(input_shape[0], stages),
        exits=_exits(input_shape, stages[:-1], cells=2, classes=classes),
        head=global_head(64, classes),
        classes=classes,
        normalise=normalise,
    )


def cnn6(input_shape: tuple[int, ...], classes: int, normalise: Normalise | None) -> Supernet:
    """SplitLPF's network for Fashion-MNIST: 3 conv and 3 fully connected layers; L = 3.

    About ten times cheaper than cnn8, for results on two cores.
    """
    stages = (_Conv(16, (2, 2)), _Conv(32, (2, 2)), _Conv(64, (2, 2)))
    return _with_hidden_layers(
        "cnn6", stages, (256, 128), input_shape=input_shape, classes=classes, normalise=normalise
    )


def cnn8(input_shape: tuple[int, ...], classes: int, normalise: Normalise | None) -> Supernet:
    """HARMONY's 8-layer CNN for Fashion-MNIST: 5 conv and 3 fully connected layers; L = 5."""
    stages = (
        _Conv(32, (2, 2)),
        _Conv(64, (2, 2)),
        _Conv(128),
        _Conv(256),
        _Conv(256, (2, 2)),
    )
    return _with_hidden_layers(
        "cnn8", stages, (1024, 512), input_shape=input_shape, classes=classes, normalise=normalise
    )


def alexnet(input_shape: tuple[int, ...], classes: int, normalise: Normalise | None) -> Supernet:
    """SCALA's network for 32x32 images, as in its first author's later code: cnn8 with a last
    pool of 3x3 by steps of 2; L = 5.
    """
    stages = (
        _Conv(32, (2, 2)),
        _Conv(64, (2, 2)),
        _Conv(128),
        _Conv(256),
        _Conv(256, (3, 2)),
    )
    return _with_hidden_layers(
        "alexnet",
        stages,
        (1024, 512),
        input_shape=input_shape,
        classes=classes,
        normalise=normalise,
    )


def _with_hidden_layers(
    name: str,
    stages: Sequence[_Conv],
    hidden: Sequence[int],
    *,
    input_shape: tuple[int, ...],
    classes: int,
    normalise: Normalise | None,
) -> Supernet:
    """A network whose final head has hidden layers, so that L too is a cut: the server's part
    is more than the exit head then.
    """
    side = _sides(input_shape, stages)[-1]
    widths = (stages[-1].channels * side * side, *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return Supernet(
        name=name,
        input_shape=input_shape,
        stages=_stages(input_shape[0], stages),
        exits=_exits(input_shape, stages, cells=3, classes=classes),
        head=nn.Sequential(*layers, nn.Linear(widths[-1], classes)),
        classes=classes,
        normalise=normalise,
    )


def _stages(channels: int, stages: Sequence[_Conv]) -> list[nn.Module]:
    built: list[nn.Module] = []
    for stage in stages:
        layers: list[nn.Module] = [nn.Conv2d(channels, stage.channels, 3, padding=1), nn.ReLU()]
        if stage.pool is not None:
            layers.append(nn.MaxPool2d(*stage.pool))
        built.append(nn.Sequential(*layers))
        channels = stage.channels
    return built


def _exits(
    input_shape: tuple[int, ...], stages: Sequence[_Conv], *, cells: int, classes: int
) -> dict[int, nn.Module]:
    """An exit head after every stage whose map can be averaged down to cells x cells."""
    sides = _sides(input_shape, stages)
    heads = {
        depth: grid_head(stage.channels, side, cells, classes)
        for depth, (stage, side) in enumerate(zip(stages, sides, strict=True), start=1)
    }
    return {depth: head for depth, head in heads.items() if head is not None}


def _sides(input_shape: tuple[int, ...], stages: Sequence[_Conv]) -> list[int]:
    sides = [input_shape[-1]]
    for stage in stages:
        sides.append(stage.shrunk(sides[-1]))
    if sides[-1] < 1:
        raise ConfigurationError(
            f"input {input_shape}: expected a side that {len(stages)} stages leave above 0; "
            "take larger inputs"
        )
    return sides[1:]
