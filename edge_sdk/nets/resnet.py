"""ResNet-18 and ResNet-50, cut between their blocks (He et al. 2016, Table 1).

BESplit uses ResNet-18 (its Table 8 cuts after stem + 1 block), and so does SplitLPF on CIFAR-10.
HARMONY uses ResNet-50 on larger images. Images may have 1 or 3 channels and any side from 28 up,
because the pool is global.
"""

from __future__ import annotations

from torch import Tensor, nn

from edge_sdk.nets.layers import Norm, global_head, he_initialised, norm2d
from edge_sdk.nets.supernet import NetSpec, Supernet

_WIDTHS = (64, 128, 256, 512)


def resnet18(spec: NetSpec) -> Supernet:
    """Stem, then 8 basic blocks; L = 9."""
    return _resnet("resnet18", spec, blocks=(2, 2, 2, 2), bottleneck=False)


def resnet50(spec: NetSpec) -> Supernet:
    """Stem, then 16 bottleneck blocks; L = 17.

    Differs: a block shrinks the map in its 3x3 convolution, not in the 1x1 before it, as common
    reference implementations do; the parameters are the same.
    """
    return _resnet("resnet50", spec, blocks=(3, 4, 6, 3), bottleneck=True)


class _Residual(nn.Module):
    """`relu(body(x) + shortcut(x))`."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


def _resnet(name: str, spec: NetSpec, *, blocks: tuple[int, ...], bottleneck: bool) -> Supernet:
    stages: list[nn.Module] = [_stem(spec.input_shape[0], spec.norm)]
    outputs = [_WIDTHS[0]]
    for group, (width, count) in enumerate(zip(_WIDTHS, blocks, strict=True)):
        for index in range(count):
            stride = 2 if group > 0 and index == 0 else 1
            out = width * 4 if bottleneck else width
            body = _bottleneck if bottleneck else _basic
            stages.append(
                _Residual(
                    body(outputs[-1], width, stride, spec.norm),
                    _shortcut(outputs[-1], out, stride, spec.norm),
                )
            )
            outputs.append(out)
    exits = {
        depth: global_head(width, spec.classes) for depth, width in enumerate(outputs[:-1], start=1)
    }
    head = global_head(outputs[-1], spec.classes)
    return he_initialised(spec.supernet(name, stages=stages, exits=exits, head=head))


def _stem(channels: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False),
        norm2d(norm, 64),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    )


def _basic(channels: int, width: int, stride: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False),
        norm2d(norm, width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
        norm2d(norm, width),
    )


def _bottleneck(channels: int, width: int, stride: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, 1, bias=False),
        norm2d(norm, width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False),
        norm2d(norm, width),
        nn.ReLU(),
        nn.Conv2d(width, width * 4, 1, bias=False),
        norm2d(norm, width * 4),
    )


def _shortcut(channels: int, out: int, stride: int, norm: Norm) -> nn.Module:
    if stride == 1 and channels == out:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(channels, out, 1, stride=stride, bias=False),
        norm2d(norm, out),
    )
