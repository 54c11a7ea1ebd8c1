"""Features of a head from z, against torch's modules of all backbones' heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edge_sdk.learning.features import find_features, norms_of
from edge_sdk.learning.head import Head
from edge_sdk.nets.layers import global_head, grid_head
from edge_sdk.nets.own.exits import exit_for

CLASSES = 5


class ClassToken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


class FirstAndMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, 0], x.mean(1)], 1)


def own(shape: tuple[int, ...], *, tokens: bool = False) -> nn.Sequential:
    head = exit_for(shape, CLASSES, tokens=tokens)
    assert head is not None
    return head


def grid(channels: int, side: int, cells: int) -> nn.Sequential:
    head = grid_head(channels, side, cells, CLASSES)
    assert head is not None
    return head


def linear(features: int) -> nn.Linear:
    return nn.Linear(features, CLASSES)


HEADS: dict[str, tuple[tuple[int, ...], nn.Sequential]] = {
    "7 to 3 cells": ((4, 7, 7), grid(4, 7, 3)),
    "8 to 3 cells": ((4, 8, 8), grid(4, 8, 3)),  # windows of 3, which leave one row out
    "14 to 2 cells": ((4, 14, 14), grid(4, 14, 2)),
    "no pooling": ((4, 3, 3), grid(4, 3, 3)),
    "global": ((6, 9, 9), global_head(6, CLASSES)),
    "adaptive": ((4, 14, 14), nn.Sequential(nn.AdaptiveAvgPool2d(3), nn.Flatten(), linear(36))),
    "a wide map": ((3, 5, 11), own((3, 5, 11))),
    "a row": ((4, 20), own((4, 20))),
    "a row, global": ((6, 9), nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten(), linear(6))),
    "a volume": ((2, 4, 6, 5), own((2, 4, 6, 5))),
    "flat": ((7,), own((7,))),
    "flattened": ((3, 4, 4), nn.Sequential(nn.Flatten(), linear(48))),
    "mean token": ((5, 8), own((5, 8), tokens=True)),
    "class token": ((5, 8), nn.Sequential(ClassToken(), nn.LayerNorm(8, eps=1e-6), linear(8))),
    "both tokens": ((5, 8), nn.Sequential(FirstAndMean(), linear(16))),
}


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_the_form_of_a_head_is_found_by_its_logits(name: str) -> None:
    shape, module = HEADS[name]
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():  # LayerNorm's are 1 and 0 before
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    z = torch.randn(6, *shape, generator=generator) + 0.5
    last = module[-1]
    assert isinstance(last, nn.Linear)
    head = Head(last.weight.numpy(), last.bias.numpy())
    norms = norms_of({name: value.numpy() for name, value in module.state_dict().items()})
    found = find_features(head, norms, list(z[:3].numpy()), module(z[:3]).numpy())
    assert found is not None
    features, error = found
    assert error < 1e-4
    expected = module[:-1](z).flatten(1).numpy()  # samples that did not choose the form, too
    got = np.stack([features(each) for each in z.numpy()])
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_a_head_of_another_kind_is_told_by_its_error() -> None:
    random = np.random.default_rng(0)
    head = Head(random.normal(size=(5, 6)).astype(np.float32), np.zeros(5, np.float32))
    zs = list(random.normal(size=(3, 6, 4, 4)).astype(np.float32))
    peaks = np.stack([z.max(axis=(1, 2)) for z in zs])  # max pooling is no form that is tried
    found = find_features(head, (), zs, head.logits(peaks))
    assert found is not None
    assert found[1] > 0.5
    assert find_features(head, (), [zs[0][:5]], head.logits(peaks[:1])) is None  # 5 channels
