"""Stages of a user's network: its layers in a row, grouped so that a cut between groups is useful.

A stage begins with a layer that has weights. Layers without weights, normalisation and activations
belong to the stage before them; a layer that flattens maps belongs to the one after it, so that an
exit in between still has maps to pool. The last group is the final head.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from edge_sdk.errors import ConfigurationError

_NORMS: Final = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LocalResponseNorm, nn.RMSNorm,
    nn.PReLU,
)  # fmt: skip
_PROBED: Final = 2  # samples of the probe


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer in the row.

    Attributes:
        name: the user's own, for errors.
        before, after: shape of one sample at its input and its output.
    """

    name: str
    module: nn.Module
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def joins(self) -> bool:
        """Whether it belongs to a neighbour's stage: it has no weights, or only normalises."""
        return _joins(self.module)

    @property
    def flattens(self) -> bool:
        """Whether its output has fewer axes than its input."""
        return len(self.after) < len(self.before)


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers that are never cut apart.

    Attributes:
        shape: of one sample after the last of them.
        tokens: whether features of that shape are tokens.
    """

    module: nn.Module
    shape: tuple[int, ...]
    tokens: bool


def named_layers(found: object, owner: str) -> dict[str, nn.Module]:
    """The layers of an nn.Sequential or of a list of stages, by name, in order.

    Raises: ConfigurationError for anything else.
    """
    if isinstance(found, nn.Sequential):
        while len(found) == 1 and isinstance(found[0], nn.Sequential):
            found = found[0]
        named = found.named_modules(remove_duplicate=False)  # one nn.ReLU may serve several times
        return {name: part for name, part in named if name and "." not in name}
    if isinstance(found, list | tuple | nn.ModuleList) and len(found):
        wrong = [entry for entry in found if not isinstance(entry, nn.Module)]
        if not wrong:
            return {str(place): entry for place, entry in enumerate(found)}
        raise ConfigurationError(
            f"{owner}: expected a list of torch modules, got a {type(wrong[0]).__name__} in it"
        )
    raise ConfigurationError(
        f"{owner}: expected an nn.Sequential, a list of stages or a Supernet, got a"
        f" {type(found).__name__}; return nn.Sequential(*stages, head)"
    )


@torch.no_grad()
def probed(layers: Mapping[str, nn.Module], first: nn.Module, x: Tensor, owner: str) -> list[Layer]:
    """Run the layers one after the other, in eval mode, and note the shapes between them.

    Args:
        first: what stands before them: the normalisation of raw inputs.
        x: (1, *input_shape).
    Raises: ConfigurationError naming the layer that a network cannot be cut before or after.
    """
    z = first(x.repeat(_PROBED, *(1,) * (x.ndim - 1)))
    row = []
    for name, module in layers.items():
        module.eval()
        after = _run(module, z, f"{owner}: layer {name!r} ({type(module).__name__})")
        module.train()
        row.append(Layer(name, module, tuple(z.shape[1:]), tuple(after.shape[1:])))
        z = after
    return row


def grouped(row: Sequence[Layer]) -> list[list[Layer]]:
    """The layers by stage; the last group is the final head."""
    groups: list[list[Layer]] = []
    waiting: list[Layer] = []  # for the next layer with weights
    for layer in row:
        if not layer.joins:
            groups.append([*waiting, layer])
            waiting = []
        elif waiting or layer.flattens or not groups:
            waiting.append(layer)
        else:
            groups[-1].append(layer)
    if groups:
        groups[-1] += waiting
    return groups


def stage_of(group: Sequence[Layer], input_shape: tuple[int, ...]) -> Stage:
    """One module of a group."""
    modules = OrderedDict((layer.name, layer.module) for layer in group)
    module = group[0].module if len(group) == 1 else nn.Sequential(modules)
    shape = group[-1].after
    return Stage(module, shape, len(shape) == 2 and _are_tokens(module, shape, input_shape))


def head_of(group: Sequence[Layer], owner: str) -> nn.Sequential:
    """The final head: an nn.Sequential whose last module is the linear layer of the logits.

    Raises: ConfigurationError if the network ends otherwise.
    """
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for layer in group:
        module = layer.module
        # open the last block, so that its linear layer can be told from the rest
        if layer is group[-1] and isinstance(module, nn.Sequential):
            parts |= {f"{layer.name}_{name}": part for name, part in module.named_children()}
        else:
            parts[layer.name] = module
    last = next(reversed(parts))
    if not isinstance(parts[last], nn.Linear):
        end = group[-1]
        raise ConfigurationError(
            f"{owner}: layer {end.name!r} ({type(end.module).__name__}): expected the network to"
            f" end in an nn.Linear that returns the logits, got {type(parts[last]).__name__}; leave"
            " out a softmax, and return a block's last linear layer as a layer of its own"
        )
    return nn.Sequential(parts)


def is_one_linear(head: nn.Sequential) -> bool:
    """Whether a head has no other layer with weights than its last, but normalisation."""
    return all(_joins(part) for part in list(head)[:-1])


def _joins(module: nn.Module) -> bool:
    return not any(
        True
        for part in module.modules()
        if not isinstance(part, _NORMS)
        for _ in part.parameters(recurse=False)
    )


def _run(module: nn.Module, z: Tensor, layer: str) -> Tensor:
    _check_inputs(module, layer)
    got = f"samples of shape {tuple(z.shape[1:])}"
    try:
        after = module(z)
    except (TypeError, ValueError, RuntimeError, IndexError, NotImplementedError) as err:
        why = (str(err).strip().splitlines() or [type(err).__name__])[0]
        raise ConfigurationError(f"{layer}: failed on {got}: {why}") from err
    if not isinstance(after, Tensor):
        count = f" of {len(after)}" if isinstance(after, tuple | list | dict) else ""
        raise ConfigurationError(
            f"{layer}: expected it to return one tensor, which a cut can send on, got a"
            f" {type(after).__name__}{count}; join it with its neighbours in one module"
        )
    if not after.is_floating_point() or after.ndim < 2 or len(after) != len(z):
        raise ConfigurationError(
            f"{layer}: expected floating-point features with the batch in front, ({len(z)}, ...),"
            f" got {after.dtype} of shape {tuple(after.shape)}"
        )
    return after


def _check_inputs(module: nn.Module, layer: str) -> None:
    """Check that the module runs on one tensor alone."""
    needed = [
        parameter.name
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(needed) > 1:
        raise ConfigurationError(
            f"{layer}: expected one input, since a cut passes one tensor on, got"
            f" {len(needed)} ({', '.join(needed)}); join it with its neighbours in one module"
        )


def _are_tokens(module: nn.Module, shape: tuple[int, ...], input_shape: tuple[int, ...]) -> bool:
    """Whether features (a, b) are a tokens of width b, and not a channels of length b."""
    if len(input_shape) != 2:
        return True
    return any(
        isinstance(part, nn.LayerNorm) and part.normalized_shape == shape[-1:]
        for part in module.modules()
    )
