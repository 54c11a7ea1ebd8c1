"""Builds a backbone by name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from edge_sdk.errors import ConfigurationError
from edge_sdk.nets.plain_cnn import alexnet, cnn6, cnn8, tiny
from edge_sdk.nets.supernet import Normalise, Supernet


class _Builder(Protocol):
    def __call__(
        self, input_shape: tuple[int, ...], classes: int, normalise: Normalise | None
    ) -> Supernet: ...


@dataclass(frozen=True, slots=True)
class _Backbone:
    """How to build it, and the input and classes of the paper's data where none are given."""

    builder: _Builder
    input_shape: tuple[int, ...]
    classes: int


_BACKBONES: Final = {
    "alexnet": _Backbone(alexnet, (3, 32, 32), 10),
    "cnn6": _Backbone(cnn6, (1, 28, 28), 10),
    "cnn8": _Backbone(cnn8, (1, 28, 28), 10),
    "tiny": _Backbone(tiny, (1, 8, 8), 10),
}
NAMES: Final = tuple(sorted(_BACKBONES))


def build(
    name: str,
    *,
    classes: int | None = None,
    input_shape: tuple[int, ...] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    seed: int | None = None,
) -> Supernet:
    """A new super-network of the named backbone, on the CPU and in train mode.

    Args:
        name: one of NAMES.
        classes: N; the backbone's default if None.
        input_shape: one raw sample, channels first; the backbone's default if None.
        mean, std: per channel, in the unit of the raw input; see Normalise. 0 and 1 if None.
        seed: same weights for the same seed, the global generator untouched; None draws them
            from the global generator.
    Raises: ConfigurationError for an unknown name, or arguments the backbone cannot take.
    """
    backbone = _BACKBONES.get(name)
    if backbone is None:
        raise ConfigurationError(f"backbone: expected one of {', '.join(NAMES)}; got {name!r}")
    classes = backbone.classes if classes is None else classes
    if classes < 2:
        raise ConfigurationError(f"{name}: expected at least 2 classes, got {classes}")
    shape = backbone.input_shape if input_shape is None else tuple(input_shape)
    if len(shape) != len(backbone.input_shape) or min(shape) < 1:
        raise ConfigurationError(
            f"{name}: expected an input shape like {backbone.input_shape}, got {shape}"
        )
    if len(shape) == 3 and shape[1] != shape[2]:
        raise ConfigurationError(f"{name}: expected a square image, got {shape}; pad or crop it")
    normalise = _normalise(name, shape[0], mean, std)
    with nullcontext() if seed is None else torch.random.fork_rng(devices=[]):
        if seed is not None:
            # Not torch.manual_seed: that would seed the accelerators too, which are not forked.
            torch.default_generator.manual_seed(seed)
        return backbone.builder(shape, classes, normalise)


def _normalise(
    name: str, channels: int, mean: Sequence[float] | None, std: Sequence[float] | None
) -> Normalise | None:
    if mean is None and std is None:
        return None
    mean = [0.0] * channels if mean is None else mean
    std = [1.0] * channels if std is None else std
    for what, values in (("mean", mean), ("std", std)):
        if len(values) != channels:
            raise ConfigurationError(
                f"{name}: expected {channels} {what}, one per channel, got {len(values)}"
            )
    return Normalise(mean, std)
