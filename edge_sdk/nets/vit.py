"""Vision transformers ViT-S/16 and ViT-B/16, cut between blocks (Dosovitskiy et al. 2021).

ViT-S is HARMONY's largest network. SuperSFL's "ViT-16" is taken as ViT-B/16.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edge_sdk.errors import ConfigurationError
from edge_sdk.nets.supernet import NetSpec, Supernet

_BLOCKS = 12
_PATCH = 16
_MLP_RATIO = 4
_LN_EPS = 1e-6


def vit_s(spec: NetSpec) -> Supernet:
    """ViT-S/16: width 384, 6 heads; L = 12."""
    return _vit("vit_s", spec, width=384, heads=6)


def vit_b(spec: NetSpec) -> Supernet:
    """ViT-B/16: width 768, 12 heads; L = 12."""
    return _vit("vit_b", spec, width=768, heads=12)


class _Embedding(nn.Module):
    """Images (B, C, H, W) to tokens (B, 1 + H * W / 256, width), the class token first."""

    def __init__(self, channels: int, side: int, width: int) -> None:
        super().__init__()
        tokens = 1 + (side // _PATCH) ** 2
        self.patches = nn.Conv2d(channels, width, _PATCH, stride=_PATCH)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        class_token = self.class_token.expand(patches.shape[0], -1, -1)
        return torch.cat([class_token, patches], dim=1) + self.positions


class _Attention(nn.Module):
    """Multi-head self-attention over tokens (B, T, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        split = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        joined: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return joined


class _Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width, eps=_LN_EPS), _Attention(width, heads))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width, eps=_LN_EPS),
            nn.Linear(width, _MLP_RATIO * width),
            nn.GELU(),
            nn.Linear(_MLP_RATIO * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        out: Tensor = x + self.mlp(x)
        return out


class _ClassToken(nn.Module):
    """Tokens (B, T, width) to the first of them, (B, width)."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


def _vit(name: str, spec: NetSpec, *, width: int, heads: int) -> Supernet:
    channels, side = spec.input_shape[0], spec.input_shape[-1]
    if side % _PATCH:
        raise ConfigurationError(
            f"{name}: expected a side that is a multiple of {_PATCH}, got {spec.input_shape}; "
            "resize it"
        )
    first = nn.Sequential(_Embedding(channels, side, width), _Block(width, heads))
    net = spec.supernet(
        name,
        stages=[first, *(_Block(width, heads) for _ in range(_BLOCKS - 1))],
        exits={depth: _head(width, spec.classes) for depth in range(1, _BLOCKS)},
        head=_head(width, spec.classes),
    )
    _initialise(net)
    return net


def _head(width: int, classes: int) -> nn.Sequential:
    """Class token, norm, linear: the norm is per token, so the other tokens need none."""
    return nn.Sequential(_ClassToken(), nn.LayerNorm(width, eps=_LN_EPS), nn.Linear(width, classes))


def _initialise(net: Supernet) -> None:
    """Draw linear layers and embeddings from N(0, 0.02^2), patches from N(0, 1 / fan_in)."""
    for part in net.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02)
            nn.init.zeros_(part.bias)
        elif isinstance(part, _Embedding):
            fan_in = part.patches.weight[0].numel()
            nn.init.normal_(part.patches.weight, std=math.sqrt(1 / fan_in))
            nn.init.normal_(part.class_token, std=0.02)
            nn.init.normal_(part.positions, std=0.02)
