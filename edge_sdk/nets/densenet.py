"""DenseNet-121, cut between its dense blocks and transitions (Huang et al. 2017, Table 1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edge_sdk.errors import ConfigurationError
from edge_sdk.nets.layers import Norm, global_head, he_initialised, norm2d
from edge_sdk.nets.supernet import NetSpec, Supernet

_STEM = 64
_GROWTH = 32
_BOTTLENECK = 4 * _GROWTH
_BLOCKS = (6, 12, 24, 16)


def densenet121(spec: NetSpec) -> Supernet:
    """Stem + dense block 1, transition, dense block 2, ... dense block 4; L = 7.

    The final norm is in the head.
    Raises: ConfigurationError for images below 29x29, which the last transition would empty.
    """
    if spec.input_shape[-1] < 29:
        raise ConfigurationError(
            f"densenet121: expected a side of at least 29, got {spec.input_shape}; enlarge it"
        )
    norm, channels = spec.norm, _STEM
    stages: list[nn.Module] = []
    outputs: list[int] = []
    for index, layers in enumerate(_BLOCKS):
        if index > 0:
            stages.append(_transition(channels, norm))
            channels //= 2
            outputs.append(channels)
        block = [_DenseLayer(channels + i * _GROWTH, norm) for i in range(layers)]
        stem = [_stem(spec.input_shape[0], norm)] if index == 0 else []
        stages.append(nn.Sequential(*stem, *block))
        channels += layers * _GROWTH
        outputs.append(channels)
    exits = {
        depth: global_head(width, spec.classes) for depth, width in enumerate(outputs[:-1], start=1)
    }
    head = nn.Sequential(norm2d(norm, channels), nn.ReLU(), *global_head(channels, spec.classes))
    return he_initialised(spec.supernet("densenet121", stages=stages, exits=exits, head=head))


class _DenseLayer(nn.Module):
    """Appends 32 channels to its input: norm-ReLU-conv1x1 (128), norm-ReLU-conv3x3 (32)."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.body = nn.Sequential(
            norm2d(norm, channels),
            nn.ReLU(),
            nn.Conv2d(channels, _BOTTLENECK, 1, bias=False),
            norm2d(norm, _BOTTLENECK),
            nn.ReLU(),
            nn.Conv2d(_BOTTLENECK, _GROWTH, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], dim=1)


def _stem(channels: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, _STEM, 7, stride=2, padding=3, bias=False),
        norm2d(norm, _STEM),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    )


def _transition(channels: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(
        norm2d(norm, channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels // 2, 1, bias=False),
        nn.AvgPool2d(2),
    )
