"""The order in which maps lie in memory: channel by channel, or pixel by pixel (channels last).

Values are the same up to the last bits. Which order is faster depends on network and processor:
on one with AVX-512, channels last trains `cnn6` 1.4 times as fast and `resnet18` 0.9 times.
"""

from __future__ import annotations

import time
from copy import deepcopy
from typing import Final, Literal, get_args

import torch
from torch import nn

MemoryFormat = Literal["auto", "channels_last", "contiguous"]
ChosenFormat = Literal["channels_last", "contiguous"]
MEMORY_FORMATS: Final = get_args(MemoryFormat)

# Smaller images stay contiguous: calls, not layers, take their time (tiny gains 10 % at most),
# and a measurement of them would choose by chance.
LEAST_PIXELS: Final = 256
# Gain from which channels last is taken. Measured: cnn6 1.4, cnn8 1.1, resnet18 0.9.
LEAST_GAIN: Final = 1.03
BATCH_MOST: Final = 16
PAIRS: Final = 5
MEASURED_S: Final = 1.5


def set_format(net: nn.Module, chosen: ChosenFormat) -> None:
    """Lay out the network's weights in that order, in place; layers follow their weights."""
    last = chosen == "channels_last"
    order = torch.channels_last if last else torch.contiguous_format
    for tensor in (*net.parameters(), *net.buffers()):
        if tensor.ndim == 4:  # Module.to would try tensors of five axes too, and fail
            tensor.data = tensor.data.to(memory_format=order)


def chosen_format(
    wanted: MemoryFormat,
    part: nn.Module,
    input_shape: tuple[int, ...],
    batch: int,
    device: str = "cpu",
) -> ChosenFormat:
    """The format wanted; for `auto` the faster one, by a measurement of at most a few seconds.

    Only a processor is measured: `auto` is contiguous on other devices.

    Args:
        part: raw input (B, *input_shape) to any output, on the CPU; it stays as it is.
        batch: samples of a step.
        device: its type, where the part will train.
    """
    if wanted != "auto":
        return wanted
    images = len(input_shape) == 3 and input_shape[1] * input_shape[2] >= LEAST_PIXELS
    if not images or device != "cpu" or not _has_maps(part):
        return "contiguous"
    gain = _gain(part, input_shape, min(batch, BATCH_MOST))
    return "channels_last" if gain >= LEAST_GAIN else "contiguous"


def _has_maps(part: nn.Module) -> bool:
    return any(isinstance(layer, nn.Conv2d) for layer in part.modules())


def _gain(part: nn.Module, input_shape: tuple[int, ...], batch: int) -> float:
    """Time of a step with contiguous weights over that with channels last, least of each.

    The two take turns, so that other work on the machine hits both.
    """
    x = torch.rand((batch, *input_shape), generator=torch.Generator().manual_seed(0))
    sides = [deepcopy(part).train() for _ in range(2)]
    set_format(sides[0], "contiguous")
    set_format(sides[1], "channels_last")
    for side in sides:
        _step_seconds(side, x)  # torch makes its kernels in the first
    found: list[tuple[float, float]] = []
    end = time.monotonic() + MEASURED_S
    while len(found) < PAIRS and (len(found) < 2 or time.monotonic() < end):
        found.append((_step_seconds(sides[0], x), _step_seconds(sides[1], x)))
    return min(plain for plain, _ in found) / min(last for _, last in found)


def _step_seconds(part: nn.Module, x: torch.Tensor) -> float:
    """Seconds of one pass forward and back."""
    parameters = list(part.parameters())
    # of this thread's work where it works alone: other processes do not count then
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    loss = part(x).square().mean()
    torch.autograd.grad(loss, parameters, allow_unused=True)
    return clock() - start
