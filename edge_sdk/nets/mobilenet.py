"""MobileNetV2, cut between its inverted residuals (Sandler et al. 2018, Table 2).

HARMONY uses it on CIFAR-100.

Differs: no dropout before the last layer, so that a step depends only on its batch.
"""

from __future__ import annotations

from torch import Tensor, nn

from edge_sdk.nets.layers import Norm, global_head, he_initialised, norm2d
from edge_sdk.nets.supernet import NetSpec, Supernet

# expansion, channels, blocks, stride of the first
_TABLE_2 = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
_STEM = 32
_LAST = 1280


def mobilenetv2(spec: NetSpec) -> Supernet:
    """Stem, then 17 inverted residuals; the last 1x1 convolution is in the head; L = 18."""
    stages: list[nn.Module] = [_conv(spec.input_shape[0], _STEM, spec.norm, kernel=3, stride=2)]
    outputs = [_STEM]
    for expansion, width, count, first_stride in _TABLE_2:
        for index in range(count):
            stride = first_stride if index == 0 else 1
            stages.append(
                _InvertedResidual(outputs[-1], width, expansion, stride=stride, norm=spec.norm)
            )
            outputs.append(width)
    exits = {
        depth: global_head(width, spec.classes) for depth, width in enumerate(outputs[:-1], start=1)
    }
    head = nn.Sequential(
        _conv(outputs[-1], _LAST, spec.norm, kernel=1), *global_head(_LAST, spec.classes)
    )
    return he_initialised(spec.supernet("mobilenetv2", stages=stages, exits=exits, head=head))


class _InvertedResidual(nn.Module):
    """Widen by a 1x1, filter each channel, narrow by a linear 1x1; added to x where shapes fit."""

    def __init__(self, channels: int, out: int, expansion: int, *, stride: int, norm: Norm) -> None:
        super().__init__()
        hidden = channels * expansion
        widen = [_conv(channels, hidden, norm, kernel=1)] if expansion > 1 else []
        self.body = nn.Sequential(
            *widen,
            _conv(hidden, hidden, norm, kernel=3, stride=stride, groups=hidden),
            nn.Conv2d(hidden, out, 1, bias=False),
            norm2d(norm, out),
        )
        self.residual = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return x + out if self.residual else out


def _conv(
    channels: int, out: int, norm: Norm, *, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(
            channels, out, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False
        ),
        norm2d(norm, out),
        nn.ReLU6(),
    )
