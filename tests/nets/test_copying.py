"""Copies of networks against copy.deepcopy."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from edge_sdk.nets import build
from edge_sdk.nets.copying import copy_module

torch.set_num_threads(1)


@pytest.mark.parametrize(("name", "side"), [("tiny", 8), ("cnn6", 28), ("resnet18", 32)])
def test_a_copy_holds_what_a_deep_copy_holds(name: str, side: int) -> None:
    module = build(name, classes=10, input_shape=(1, side, side), mean=[0.5], std=[2.0], seed=0)
    view = module.segment(0, None).train()
    twin, deep = copy_module(view), deepcopy(view)
    assert type(twin) is type(view)
    assert list(twin.state_dict()) == list(deep.state_dict())
    for key, tensor in deep.state_dict().items():
        assert torch.equal(twin.state_dict()[key], tensor), key
    x = torch.rand(4, 1, side, side)
    assert torch.equal(twin(x), deep(x))
    assert [part.training for part in twin.modules()] == [part.training for part in deep.modules()]


def test_training_a_copy_does_not_change_the_original() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    twin = copy_module(net)
    twin.eval()
    twin.train()(torch.rand(3, 2)).sum().backward()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(torch.equal(tensor, before[key]) for key, tensor in net.state_dict().items())


def test_a_hook_on_a_copy_is_not_on_the_original() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    seen: list[Tensor] = []
    copy_module(net).register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    net(torch.rand(1, 2))
    assert not seen


def test_what_two_parts_share_is_shared_in_the_copy_too() -> None:
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    last.weight = first.weight
    net = nn.Sequential(first, nn.ReLU(), last, first)
    twin = copy_module(net)
    assert twin[3] is twin[0]
    assert twin[2].weight is twin[0].weight
    assert twin[0].weight is not first.weight


def test_a_frozen_parameter_stays_frozen() -> None:
    net = nn.Linear(2, 2)
    net.weight.requires_grad = False
    twin = copy_module(net)
    assert not twin.weight.requires_grad
    assert twin.bias.requires_grad
