"""A user's own network, `package.module:function`, as a super-network.

    def network(classes, input_shape):     # both arguments are optional
        return nn.Sequential(...)          # or a list of stages, or an edge_sdk.nets.Supernet

Only a function that was named on this machine is ever called (`use_network`): by `backbone` of a
recipe, by `export --backbone`, by `agent train --backbone`. A plan that came from a server names a
function, and nothing is imported for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from threading import Lock
from typing import Any, Final

import torch
from torch import nn

from edge_sdk.errors import ConfigurationError
from edge_sdk.installation import names_function, user_function
from edge_sdk.nets.copying import copy_module
from edge_sdk.nets.own.dropout import make_repeatable
from edge_sdk.nets.own.exits import exit_for
from edge_sdk.nets.own.stages import (
    grouped,
    head_of,
    is_one_linear,
    named_layers,
    probed,
    stage_of,
)
from edge_sdk.nets.supernet import NetSpec, Normalise, Supernet

_named: Final[dict[str, Callable[..., Any]]] = {}
_lock: Final = Lock()


def use_network(word: str, folders: Sequence[Path] = ()) -> None:
    """Import a user's `module:function`, so that `edge_sdk.nets.build` can call it by that name.

    It does nothing for the name of a backbone that splitedge has. This runs code of this machine:
    never pass a word that a peer sent.

    Args:
        folders: searched for the module after all of Python's own places; by default the current
            folder.
    Raises: ConfigurationError if there is no such module or function.
    """
    if not names_function(word):
        return
    function = user_function(word, folders, what="backbone")
    with _lock:
        _named[word] = function


def build_own(word: str, spec: NetSpec) -> Supernet:
    """A new network of the function that was named by `word`; weights are drawn from torch's
    generator.

    Raises: ConfigurationError if nobody on this machine named it, and for a network that cannot be
        cut, naming the layer.
    """
    function = _named.get(word)
    if function is None:
        raise ConfigurationError(
            f"backbone {word!r}: a function that was not named on this machine, and a plan carries"
            " no code; if the function is yours, allow it, as in"
            f" `splitedge agent train --backbone {word}`"
        )
    found = deepcopy(function(**_wanted(function, spec)))  # it may return one module every time
    x = torch.zeros(1, *spec.input_shape)
    if isinstance(found, Supernet):
        net = _given(found, word, spec, x)
    else:
        net = _cut(found, word, spec, x)
    make_repeatable(net)
    _check_tensors(net)
    return net.train()


def check_training(net: Supernet) -> None:
    """Check that a user's network learns in every parameter, and that copies of it are whole.

    One forward and backward pass of a copy, in train mode.

    Raises: ConfigurationError naming a parameter of the copy that no gradient reaches: the forward
        pass does not use it, or uses that of the first network.
    """
    copied = copy_module(net).train()
    generator = torch.Generator().manual_seed(0)
    logits, final = copied.forward_exits(torch.rand(2, *net.input_shape, generator=generator))
    total = final.sum() + sum(each.sum() for each in logits.values())
    names, parameters = zip(*copied.named_parameters(), strict=True)
    for name, gradient in zip(
        names, torch.autograd.grad(total, parameters, allow_unused=True), strict=True
    ):
        if gradient is None:
            raise ConfigurationError(
                f"{net.name}: {name}: expected the answer to depend on every parameter, but this"
                " one gets no gradient; remove it, or call its layer by attribute (self.layer) and"
                " not by a kept function"
            )


def _wanted(function: Callable[..., Any], spec: NetSpec) -> dict[str, Any]:
    """Arguments for the function: `classes` and `input_shape`, if it takes them."""
    offered = {"classes": spec.classes, "input_shape": spec.input_shape}
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return offered
    return {name: value for name, value in offered.items() if name in parameters}


def _cut(found: object, word: str, spec: NetSpec, x: torch.Tensor) -> Supernet:
    """The network of a row of layers, with an exit head after each stage."""
    normalise = spec.normalise or Normalise([0.0] * len(x[0]), [1.0] * len(x[0]))
    layers = named_layers(found, word)
    row = probed(layers, normalise, x, word)
    *groups, last = grouped(row) or [[]]
    if not groups:
        raise ConfigurationError(
            f"{word}: expected two or more layers with weights in the row, to cut between them, got"
            f" {len(layers)} layers ({', '.join(layers) or 'none'}); return"
            " nn.Sequential(*stages, head)"
        )
    head = head_of(last, word)
    if row[-1].after != (spec.classes,):
        raise ConfigurationError(
            f"{word}: expected logits of shape ({spec.classes},) for each sample, one a class, got"
            f" {row[-1].after}; take the argument `classes` in the function"
        )
    stages = [stage_of(group, spec.input_shape) for group in groups]
    # before a head of one linear layer an exit would be that head once more
    offered = stages[:-1] if is_one_linear(head) and len(stages) > 1 else stages
    exits: dict[int, nn.Module] = {}
    for depth, stage in enumerate(offered, start=1):
        exit_head = exit_for(stage.shape, spec.classes, tokens=stage.tokens)
        if exit_head is not None:
            exits[depth] = exit_head
    if not exits:
        raise ConfigurationError(
            f"{word}: expected features of 1 to 4 axes after some stage, to pool in an exit head,"
            f" got {', '.join(str(stage.shape) for stage in stages)}"
        )
    net = spec.supernet(word, stages=[stage.module for stage in stages], exits=exits, head=head)
    net.own_names = _own_names(layers, net)
    return net


def _given(net: Supernet, word: str, spec: NetSpec, x: torch.Tensor) -> Supernet:
    """A user's Supernet, checked; its cuts and exits are those that it has."""
    if net.input_shape != spec.input_shape or net.classes != spec.classes:
        raise ConfigurationError(
            f"{word}: expected a Supernet for inputs {spec.input_shape} and {spec.classes} classes,"
            f" as the data are, got inputs {net.input_shape} and {net.classes} classes; take the"
            " arguments `input_shape` and `classes` in the function"
        )
    net.name = word
    if spec.normalise is not None and not net.normalise.changes:
        net.normalise = spec.normalise
    probed(
        {f"stages.{depth}": stage for depth, stage in enumerate(net.stages)}, net.normalise, x, word
    )
    net.eval()
    with torch.no_grad():
        logits, final = net.forward_exits(x)
    net.train()
    _check_head(f"{word}: head", net.head, final, spec.classes)
    for depth in net.cuts:
        _check_head(f"{word}: exits[{depth}]", net.exit_head(depth), logits[depth], spec.classes)
    return net


def _check_head(what: str, head: nn.Module, logits: torch.Tensor, classes: int) -> None:
    ends_linear = isinstance(head, nn.Sequential) and isinstance(head[-1], nn.Linear)
    if not ends_linear or logits.shape[1:] != (classes,):
        raise ConfigurationError(
            f"{what}: expected an nn.Sequential that ends in an nn.Linear and returns {classes}"
            f" logits, got {type(head).__name__} and shape {tuple(logits.shape[1:])}"
        )


def _own_names(layers: Mapping[str, nn.Module], net: Supernet) -> dict[str, str]:
    """Name of each tensor in the network, by its name in the user's own `state_dict`."""
    ours = {id(tensor): name for name, tensor in net.state_dict(keep_vars=True).items()}
    return {
        f"{layer}.{name}": ours[id(tensor)]
        for layer, module in layers.items()
        for name, tensor in module.state_dict(keep_vars=True).items()
    }


def _check_tensors(net: Supernet) -> None:
    """Check that every tensor can be trained and sent on its own.

    Raises: ConfigurationError naming the first that cannot.
    """
    seen: dict[int, str] = {}
    for name, tensor in net.state_dict(keep_vars=True).items():
        first = seen.setdefault(id(tensor), name)
        if first != name:
            raise ConfigurationError(
                f"{net.name}: {first} and {name} are one tensor, which two sides of a cut cannot"
                " share; give each layer weights of its own"
            )
    for name, parameter in net.named_parameters():
        if parameter.dtype != torch.float32 or not parameter.requires_grad:
            got = f"{parameter.dtype}" if parameter.requires_grad else "one that is frozen"
            raise ConfigurationError(
                f"{net.name}: {name}: expected a float32 parameter that is trained, got {got};"
                " keep constants in a buffer (register_buffer)"
            )
