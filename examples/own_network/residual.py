"""A residual network written by hand, in the style of timm: stem, blocks, head.

`backbone = "residual:network"`. It returns a list: each entry is one stage, the last is the head.
"""

from torch import Tensor, nn


class ConvNorm(nn.Sequential):
    """Convolution, batch normalisation and, unless `act` is False, ReLU."""

    def __init__(
        self, ins: int, outs: int, size: int, stride: int = 1, *, act: bool = True
    ) -> None:
        layers: list[nn.Module] = [
            nn.Conv2d(ins, outs, size, stride, padding=size // 2, bias=False),
            nn.BatchNorm2d(outs),
        ]
        super().__init__(*layers, *([nn.ReLU()] if act else []))


class BasicBlock(nn.Module):
    """`relu(conv(conv(x)) + shortcut(x))`."""

    def __init__(self, ins: int, outs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = ConvNorm(ins, outs, 3, stride)
        self.conv2 = ConvNorm(outs, outs, 3, act=False)
        same = stride == 1 and ins == outs
        self.shortcut = nn.Identity() if same else ConvNorm(ins, outs, 1, stride, act=False)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, ins, H, W) to (B, outs, H / stride, W / stride)."""
        out: Tensor = self.act(self.conv2(self.conv1(x)) + self.shortcut(x))
        return out


class Head(nn.Sequential):
    """Global average pool, dropout and the linear layer of the logits."""

    def __init__(self, features: int, classes: int) -> None:
        pool = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1)
        super().__init__(*pool, nn.Linear(features, classes))


def network(
    classes: int, input_shape: tuple[int, ...], widths: tuple[int, ...] = (16, 32, 64)
) -> list[nn.Module]:
    """Two blocks of each width; the map shrinks where the width grows."""
    stages: list[nn.Module] = [ConvNorm(input_shape[0], widths[0], 3)]
    before = widths[0]
    for width in widths:
        stages += [BasicBlock(before, width, 1 if width == before else 2), BasicBlock(width, width)]
        before = width
    return [*stages, Head(before, classes)]
