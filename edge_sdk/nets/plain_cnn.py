"""Plain convolutional networks, without normalisation layers: tiny, cnn6, cnn8, alexnet.

Each stage is conv3x3 + ReLU and the pool that follows. Exits average the map to a small grid,
because a global pool costs shallow exits accuracy (tiny on the digits, depth 1: 37 % against 81 %).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from edge_sdk.errors import ConfigurationError
from edge_sdk.nets.layers import PooledStage, global_head, grid_head
from edge_sdk.nets.supernet import NetSpec, Supernet


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


def tiny(spec: NetSpec) -> Supernet:
    """Ours, for 8x8 digits: 34,282 parameters, L = 5, trained in seconds."""
    stages = (_Conv(8), _Conv(16, (2, 2)), _Conv(32), _Conv(32, (2, 2)), _Conv(64))
    return spec.supernet(
        "tiny",
        stages=_stages(spec, stages),
        exits=_exits(spec, stages[:-1], cells=2),
        head=global_head(64, spec.classes),
    )


def cnn6(spec: NetSpec) -> Supernet:
    """SplitLPF's network for Fashion-MNIST: 3 conv and 3 fully connected layers; L = 3.

    About ten times cheaper than cnn8, for results on two cores.
    """
    stages = (_Conv(16, (2, 2)), _Conv(32, (2, 2)), _Conv(64, (2, 2)))
    return _with_hidden_layers("cnn6", spec, stages, (256, 128))


def cnn8(spec: NetSpec) -> Supernet:
    """HARMONY's 8-layer CNN, section V: 5 conv and 3 fully connected layers; L = 5."""
    last = _Conv(256, (2, 2))
    return _with_hidden_layers("cnn8", spec, (*_FOUR_CONVS, last), (1024, 512))


def alexnet(spec: NetSpec) -> Supernet:
    """SCALA's network for 32x32 images, as in its first author's later code; L = 5.

    cnn8 with a last pool of 3x3 by steps of 2.
    """
    last = _Conv(256, (3, 2))
    return _with_hidden_layers("alexnet", spec, (*_FOUR_CONVS, last), (1024, 512))


_FOUR_CONVS = (_Conv(32, (2, 2)), _Conv(64, (2, 2)), _Conv(128), _Conv(256))


def _with_hidden_layers(
    name: str, spec: NetSpec, stages: Sequence[_Conv], hidden: Sequence[int]
) -> Supernet:
    """A network with hidden layers in its final head.

    So L is a cut too: the server's part after it is more than the exit head.
    """
    side = _sides(spec, stages)[-1]
    widths = (stages[-1].channels * side * side, *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return spec.supernet(
        name,
        stages=_stages(spec, stages),
        exits=_exits(spec, stages, cells=3),
        head=nn.Sequential(*layers, nn.Linear(widths[-1], spec.classes)),
    )


def _stages(spec: NetSpec, stages: Sequence[_Conv]) -> list[nn.Module]:
    channels = spec.input_shape[0]
    built: list[nn.Module] = []
    for stage in stages:
        convolution = nn.Conv2d(channels, stage.channels, 3, padding=1)
        if stage.pool is None:
            built.append(nn.Sequential(convolution, nn.ReLU()))
        else:
            built.append(PooledStage(convolution, nn.ReLU(), nn.MaxPool2d(*stage.pool)))
        channels = stage.channels
    return built


def _exits(spec: NetSpec, stages: Sequence[_Conv], *, cells: int) -> dict[int, nn.Module]:
    """An exit head for every stage with a map that `grid_pool` averages to cells x cells."""
    heads = {
        depth: grid_head(stage.channels, side, cells, spec.classes)
        for depth, (stage, side) in enumerate(
            zip(stages, _sides(spec, stages), strict=True), start=1
        )
    }
    return {depth: head for depth, head in heads.items() if head is not None}


def _sides(spec: NetSpec, stages: Sequence[_Conv]) -> list[int]:
    sides = [spec.input_shape[-1]]
    for stage in stages:
        sides.append(stage.shrunk(sides[-1]))
    if sides[-1] < 1:
        raise ConfigurationError(
            f"input {spec.input_shape}: expected a side that the pools of {len(stages)} stages "
            "leave above 0; take larger inputs"
        )
    return sides[1:]
