"""Copies of networks, made often: a client's for each of its rounds."""

from __future__ import annotations

from copy import copy
from typing import Any, TypeVar

from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def copy_module(module: M) -> M:
    """A copy that shares no tensor with `module`; what two of its parts share, two of the copy do.

    What copy.deepcopy makes of modules whose attributes beside parameters, buffers and parts are
    plain settings, as ours all are, in a quarter of the time (`tiny`: 0.3 ms for 1.3 ms).
    """
    return _copied(module, {}, {})


def _copied(module: M, parts: dict[nn.Module, Any], tensors: dict[Tensor, Tensor]) -> M:
    if module in parts:
        known: M = parts[module]
        return known
    twin = parts[module] = copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):  # parameters, buffers, parts, and hooks
            held = ((key, _twin(one, parts, tensors)) for key, one in value.items())
            vars(twin)[name] = type(value)(held)
    return twin


def _twin(value: Any, parts: dict[nn.Module, Any], tensors: dict[Tensor, Tensor]) -> Any:
    if isinstance(value, nn.Module):
        return _copied(value, parts, tensors)
    if not isinstance(value, Tensor):
        return value
    if value not in tensors:
        twin = value.detach().clone()
        if isinstance(value, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=value.requires_grad)
        tensors[value] = twin
    return tensors[value]
