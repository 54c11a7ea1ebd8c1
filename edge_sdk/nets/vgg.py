"""VGG-11 with batch normalisation for 32x32 images (Simonyan & Zisserman 2015, column A).

HARMONY uses it on CIFAR-10, and SCALA for its attack on smashed data. One linear layer replaces the
three of the paper, as is usual at this size.
"""

from __future__ import annotations

from torch import nn

from edge_sdk.errors import ConfigurationError
from edge_sdk.nets.layers import grid_head, he_initialised, norm2d
from edge_sdk.nets.supernet import NetSpec, Supernet

_WIDTHS = (64, 128, 256, 256, 512, 512, 512, 512)
_POOLED = (1, 2, 4, 6, 8)


def vgg11(spec: NetSpec) -> Supernet:
    """Each stage is conv3x3 (with bias) + norm + ReLU and the pool that follows; L = 8.

    Raises: ConfigurationError unless the image's side is a multiple of 32, for its five pools.
    """
    channels, side = spec.input_shape[0], spec.input_shape[-1]
    if side % 32:
        raise ConfigurationError(
            f"vgg11: expected a side that is a multiple of 32, got {spec.input_shape}; pad it"
        )
    stages: list[nn.Module] = []
    exits: dict[int, nn.Module] = {}
    for depth, width in enumerate(_WIDTHS, start=1):
        conv = nn.Conv2d(channels, width, 3, padding=1)
        layers = [conv, norm2d(spec.norm, width), nn.ReLU()]
        if depth in _POOLED:
            layers.append(nn.MaxPool2d(2))
            side //= 2
        stages.append(nn.Sequential(*layers))
        channels = width
        exit_head = grid_head(width, side, 2, spec.classes)
        if depth < len(_WIDTHS) and exit_head is not None:
            exits[depth] = exit_head
    head = nn.Sequential(nn.AvgPool2d(side), nn.Flatten(), nn.Linear(channels, spec.classes))
    return he_initialised(spec.supernet("vgg11", stages=stages, exits=exits, head=head))
