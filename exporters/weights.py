"""Weights in a .safetensors file -> a network, and the depths that can be deployed with them.

A device answers with the exit head at its depth. Training leaves out of the weights those that
nobody trained, or that stay with their devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from edge_sdk.errors import ConfigurationError
from edge_sdk.manifest import GatePolicy
from edge_sdk.nets import NAMES, Supernet, build
from exporters.errors import ExportError

CHECKPOINT: Final = "net/"  # how names of the network's weights begin in a training's checkpoint


def load_weights(net: Supernet, path: Path) -> tuple[int, ...]:
    """Set the network's weights; exit heads that the file lacks stay as they are.

    Returns: the depths whose exit heads it has, ascending.
    Raises: ExportError where the file is not of this network, or has no exit head at all.
    """
    if not path.is_file():
        raise ExportError(f"{path}: expected a .safetensors file there, found none")
    try:
        tensors = load_file(path)
    except OSError as err:
        raise ExportError(f"{path}: cannot be read ({err.strerror or err})") from err
    except SafetensorError as err:
        raise ExportError(f"{path}: expected a safetensors file ({err})") from err
    if any(name.startswith(CHECKPOINT) for name in tensors):
        raise ExportError(
            f"{path}: is a training's checkpoint, not a weights file; `splitedge train` leaves"
            " weights.safetensors after its last round, `splitedge simulate` leaves none"
        )
    if not _fits(net, tensors):
        fitting = [name for name in NAMES if _is_of(name, net, tensors)]
        hint = f"; they fit {' or '.join(fitting)}" if fitting else ""
        raise ExportError(
            f"{path}: expected the weights of {net.name} for inputs {net.input_shape} and"
            f" {net.classes} classes, got those of another network{hint}; choose the --backbone"
            " and the --data that they were trained with"
        )
    depths = tuple(depth for depth in net.cuts if f"exits.{depth}." in _exits(tensors))
    if not depths:
        raise ExportError(
            f"{path}: has no trained exit head, with which a device answers: this training left"
            " them on its devices or had none; train with a recipe that shares them, for SuperSFL"
            " share_exits = true"
        )
    net.load_state_dict(net.state_dict() | tensors)
    return depths


@dataclass(frozen=True, slots=True)
class Origin:
    """What a training says of its weights.

    Attributes:
        gate: by what the answers of exit heads are judged; entropy where nothing is said.
        run: which run of it they come from; empty where nothing is said.
    """

    gate: GatePolicy
    run: str


def origin(path: Path) -> Origin:
    """Of weights that `load_weights` took.

    Raises: ExportError for a gate that no device has.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    said = metadata.get("gate", "entropy")
    known: tuple[GatePolicy, ...] = get_args(GatePolicy)
    for policy in known:
        if said == policy:
            return Origin(policy, metadata.get("run", ""))
    raise ExportError(
        f"{path}: gate: expected one of {', '.join(known)}, got {said!r:.50};"
        " export with the release that trained it"
    )


def check_depths(
    path: Path, net: Supernet, trained: tuple[int, ...], wanted: Sequence[int]
) -> None:
    """Refuse a cut whose exit head is as it began; what is no cut is not this function's to tell.

    Raises: ExportError saying which there are.
    """
    lacking = [depth for depth in wanted if depth in net.cuts and depth not in trained]
    if lacking:
        raise ExportError(
            f"{path}: has no trained exit head at depth {lacking[0]}, no device trained there;"
            f" choose --depth from {', '.join(map(str, trained))}, or train at that depth"
        )


def _exits(tensors: Mapping[str, Tensor]) -> set[str]:
    """`exits.D.` of every exit head that is there."""
    return {f"exits.{name.split('.')[1]}." for name in tensors if name.startswith("exits.")}


def _fits(net: Supernet, tensors: Mapping[str, Tensor]) -> bool:
    """Whether these are the network's weights, whole exit heads aside."""
    own, there = net.state_dict(), _exits(tensors)
    names = {name for name in own if not name.startswith("exits.") or name.startswith(tuple(there))}
    return names == set(tensors) and all(own[name].shape == tensors[name].shape for name in names)


def _is_of(backbone: str, net: Supernet, tensors: Mapping[str, Tensor]) -> bool:
    """Whether they are of a backbone, for the network's inputs and classes."""
    try:
        with torch.device("meta"):  # names and shapes, no weights
            other = build(backbone, classes=net.classes, input_shape=net.input_shape)
    except ConfigurationError:  # it takes no such inputs
        return False
    return _fits(other, tensors)
