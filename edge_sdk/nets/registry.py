"""The backbones by name, and how to build them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Final

import torch

from edge_sdk.errors import ConfigurationError
from edge_sdk.installation import names_function
from edge_sdk.nets.bottleneck import add_bottleneck
from edge_sdk.nets.densenet import densenet121
from edge_sdk.nets.har import har_cnn
from edge_sdk.nets.layers import Norm
from edge_sdk.nets.mobilenet import mobilenetv2
from edge_sdk.nets.own.network import build_own
from edge_sdk.nets.plain_cnn import alexnet, cnn6, cnn8, tiny
from edge_sdk.nets.resnet import resnet18, resnet50
from edge_sdk.nets.supernet import NetSpec, Normalise, Supernet
from edge_sdk.nets.vgg import vgg11
from edge_sdk.nets.vit import vit_b, vit_s


@dataclass(frozen=True, slots=True)
class _Backbone:
    """One row of the registry.

    Attributes:
        input_shape, classes: defaults, those of the paper's data.
        norms: the normalisation layers that it may have, the default first.
        maps: whether its features are maps; if not, they are tokens.
    """

    builder: Callable[[NetSpec], Supernet]
    input_shape: tuple[int, ...]
    classes: int
    norms: tuple[Norm, ...] = ()
    maps: bool = True


# Held while initial weights are drawn: torch has one generator, which all threads share.
INIT_LOCK: Final = RLock()
_BATCH_OR_GROUP: Final[tuple[Norm, ...]] = ("batch", "group")
_BACKBONES: Final = {
    "alexnet": _Backbone(alexnet, (3, 32, 32), 10),
    "cnn6": _Backbone(cnn6, (1, 28, 28), 10),
    "cnn8": _Backbone(cnn8, (1, 28, 28), 10),
    "densenet121": _Backbone(densenet121, (3, 224, 224), 1000, _BATCH_OR_GROUP),
    "har_cnn": _Backbone(har_cnn, (9, 128), 6, _BATCH_OR_GROUP),
    "mobilenetv2": _Backbone(mobilenetv2, (3, 32, 32), 100, _BATCH_OR_GROUP),
    "resnet18": _Backbone(resnet18, (3, 32, 32), 10, _BATCH_OR_GROUP),
    "resnet50": _Backbone(resnet50, (3, 64, 64), 200, _BATCH_OR_GROUP),
    "tiny": _Backbone(tiny, (1, 8, 8), 10),
    "vgg11": _Backbone(vgg11, (3, 32, 32), 10, _BATCH_OR_GROUP),
    "vit_b": _Backbone(vit_b, (3, 224, 224), 100, maps=False),
    "vit_s": _Backbone(vit_s, (3, 224, 224), 100, maps=False),
}
NAMES: Final = tuple(sorted(_BACKBONES))
TOKENS: Final = tuple(name for name in NAMES if not _BACKBONES[name].maps)  # features are no maps


def build(
    name: str,
    *,
    classes: int | None = None,
    input_shape: tuple[int, ...] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    seed: int | None = None,
    norm: Norm | None = None,
    bottleneck: tuple[int, int] | None = None,
) -> Supernet:
    """A new super-network of the named backbone, on the CPU and in train mode.

    Args:
        name: one of NAMES, or a user's `module:function` that `use_network` has named.
        classes: N; the backbone's default if None.
        input_shape: one raw sample, channels first; the backbone's default if None. A user's own
            network has no defaults.
        mean, std: per channel, in the unit of the raw input; see Normalise. 0 and 1 if None.
        seed: equal seeds give equal weights, and the global generator does not change; None draws
            from the global generator.
        norm: the kind of normalisation layers; None takes BatchNorm if the backbone has any.
        bottleneck: a depth, and the channels to which its cut is narrowed; see add_bottleneck. All
            other layers have the weights of the same seed without it.
    Raises: ConfigurationError for an unknown name, and for arguments that the backbone cannot take.
    """
    own = names_function(name)
    shape, classes = (_own_sizes if own else _sizes)(name, input_shape, classes, norm)
    spec = NetSpec(shape, classes, _normalise(name, shape[0], mean, std), norm or "batch")
    builder = partial(build_own, name) if own else _BACKBONES[name].builder
    with INIT_LOCK, nullcontext() if seed is None else torch.random.fork_rng(devices=[]):
        if seed is not None:
            # Not torch.manual_seed: that would seed the accelerators too, which are not forked.
            torch.default_generator.manual_seed(seed)
        net = builder(spec)
        if bottleneck is not None:
            add_bottleneck(net, *bottleneck)
        return net


def _sizes(
    name: str, input_shape: tuple[int, ...] | None, classes: int | None, norm: Norm | None
) -> tuple[tuple[int, ...], int]:
    """Input shape and classes of a backbone by name."""
    backbone = _BACKBONES.get(name)
    if backbone is None:
        raise ConfigurationError(
            f"backbone: expected one of {', '.join(NAMES)}, or module:function; got {name!r}"
        )
    if norm is not None and norm not in backbone.norms:
        allowed = " or ".join(backbone.norms) or "none, it has no such layers"
        raise ConfigurationError(f"{name}: expected norm {allowed}; got {norm!r}")
    classes = backbone.classes if classes is None else classes
    if classes < 2:
        raise ConfigurationError(f"{name}: expected at least 2 classes, got {classes}")
    return _shape(name, backbone.input_shape, input_shape), classes


def _own_sizes(
    name: str, input_shape: tuple[int, ...] | None, classes: int | None, norm: Norm | None
) -> tuple[tuple[int, ...], int]:
    """Input shape and classes of a user's own network, which has no defaults."""
    if classes is None or classes < 2 or input_shape is None or min(input_shape, default=0) < 1:
        raise ConfigurationError(
            f"{name}: expected at least 2 classes and an input shape, got {classes}, {input_shape}"
        )
    if norm is not None:
        raise ConfigurationError(
            f"{name}: expected no norm, since your own function chooses its layers; got {norm!r}"
        )
    return tuple(input_shape), classes


def _shape(name: str, default: tuple[int, ...], given: tuple[int, ...] | None) -> tuple[int, ...]:
    if given is None:
        return default
    if len(given) != len(default) or min(given) < 1:
        raise ConfigurationError(f"{name}: expected an input shape like {default}, got {given}")
    if len(given) == 3 and given[1] != given[2]:
        raise ConfigurationError(f"{name}: expected a square image, got {given}; pad or crop it")
    return tuple(given)


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
