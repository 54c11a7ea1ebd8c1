"""Memory formats: what `auto` measures, and that a format changes no more than the last bits."""

from __future__ import annotations

import time
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from edge_sdk.nets import build
from edge_sdk.nets.memory_format import ChosenFormat, chosen_format, set_format
from edge_sdk.nets.supernet import View


class Slower(nn.Module):
    """A convolution that sleeps in one memory format, so that a measurement must find the other."""

    def __init__(self, slow: ChosenFormat) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 4, 3)
        self._slow = slow

    def forward(self, x: Tensor) -> Tensor:
        last = self.layer.weight.is_contiguous(memory_format=torch.channels_last)
        if last == (self._slow == "channels_last"):
            until = time.thread_time() + 0.01
            while time.thread_time() < until:
                pass
        return cast(Tensor, self.layer(x))


@pytest.mark.parametrize(
    ("slow", "fast"), [("contiguous", "channels_last"), ("channels_last", "contiguous")]
)
def test_auto_takes_the_format_that_a_measurement_finds_faster(
    slow: ChosenFormat, fast: ChosenFormat
) -> None:
    part = Slower(slow)
    before = part.layer.weight.stride()

    assert chosen_format("auto", part, (2, 16, 16), 4) == fast
    assert part.layer.weight.stride() == before
    assert part.layer.weight.grad is None


def test_auto_leaves_small_images_and_other_inputs_contiguous() -> None:
    part = Slower("contiguous")

    assert chosen_format("auto", part, (2, 8, 8), 4) == "contiguous"
    assert chosen_format("auto", nn.Linear(4, 2), (4,), 4) == "contiguous"
    assert chosen_format("auto", part, (2, 16, 16), 4, "cuda") == "contiguous"


def test_a_format_that_is_asked_for_is_not_measured() -> None:
    def fails(_: Tensor) -> Tensor:
        raise AssertionError("nothing runs")

    part = nn.Module()
    part.forward = fails

    assert chosen_format("channels_last", part, (1, 28, 28), 4) == "channels_last"
    assert chosen_format("contiguous", part, (1, 28, 28), 4) == "contiguous"


def test_channels_last_gives_the_same_gradients_up_to_rounding() -> None:
    x = torch.rand(8, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    nets = [build("cnn6", seed=0).train() for _ in range(2)]
    set_format(nets[1], "channels_last")
    weight = nets[1].stages[1].get_parameter("0.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last)

    plain, last = (gradients(net.segment(0, None), x) for net in nets)

    for one, other in zip(plain, last, strict=True):
        torch.testing.assert_close(other.contiguous(), one, rtol=1e-4, atol=1e-6)


def test_a_volume_keeps_its_order() -> None:
    layer = nn.Conv3d(2, 2, 3)

    set_format(layer, "channels_last")

    assert layer.weight.is_contiguous()


def test_a_pool_before_relu_changes_no_bit() -> None:
    """Windows below 0 and windows with equal largest values included."""
    generator = torch.Generator().manual_seed(0)
    # few values, so that many windows have several largest ones
    x = torch.randint(-2, 3, (8, 1, 28, 28), generator=generator).float()
    found = []
    for swapped in (False, True):
        net = build("cnn6", seed=0).train()
        set_format(net, "channels_last")
        stage = net.stages[0]
        assert isinstance(stage, nn.Sequential)
        nn.init.constant_(stage[0].get_parameter("weight"), 1.0)
        nn.init.zeros_(stage[0].get_parameter("bias"))
        if not swapped:
            net.stages[0] = nn.Sequential(*stage)  # in the order of its layers
        z = net.stages[0](x)
        found.append([z, *torch.autograd.grad(z.square().sum(), list(stage.parameters()))])

    for plain, other in zip(*found, strict=True):
        assert torch.equal(plain, other)


def gradients(part: View, x: Tensor) -> list[Tensor]:
    loss = part(x).square().mean()
    return list(torch.autograd.grad(loss, list(part.parameters())))
