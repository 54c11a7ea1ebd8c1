"""A small 1-D convolutional network, ours, for UCI-HAR: 9 signals of 128 samples, 6 activities."""

from __future__ import annotations

from torch import nn

from edge_sdk.nets.layers import Norm, group_norm, he_initialised
from edge_sdk.nets.supernet import NetSpec, Supernet

# channels, kernel
_STAGES = ((32, 5), (64, 5), (128, 3))


def har_cnn(spec: NetSpec) -> Supernet:
    """Each stage is conv1d + norm + ReLU and a max-pool by 2; L = 3."""
    channels = spec.input_shape[0]
    stages: list[nn.Module] = []
    exits: dict[int, nn.Module] = {}
    for depth, (width, kernel) in enumerate(_STAGES, start=1):
        stages.append(_stage(channels, width, kernel, spec.norm))
        channels = width
        if depth < len(_STAGES):
            exits[depth] = _head(width, spec.classes)
    head = _head(channels, spec.classes)
    return he_initialised(spec.supernet("har_cnn", stages=stages, exits=exits, head=head))


def _stage(channels: int, width: int, kernel: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(channels, width, kernel, padding=kernel // 2, bias=False),
        group_norm(width) if norm == "group" else nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.MaxPool1d(2),
    )


def _head(channels: int, classes: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(channels, classes))
