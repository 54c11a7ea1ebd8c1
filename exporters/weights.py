"""Weights of a .safetensors file: set in a network, with the depths that can be deployed.

A device answers with the exit head at its depth. A training's weights file has no exit heads that
were not trained, or that stay on their devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from edge_sdk.errors import ConfigurationError
from edge_sdk.gate_form import read_gate
from edge_sdk.manifest import GatePolicy
from edge_sdk.nets import NAMES, Supernet, build
from exporters.errors import ExportError
from exporters.run.network import AUXILIARY, SERVER

CHECKPOINT: Final = "net/"  # prefix of the network's weights in a training's checkpoint
PARTS: Final = (SERVER, AUXILIARY)  # prefixes of what a run has beside its network


def load_weights(net: Supernet, path: Path) -> tuple[int, ...]:
    """Set the network's weights; exit heads that the file lacks stay unchanged.

    Returns: the depths of the exit heads in the file, ascending.
    Raises: ExportError if the file belongs to another network, or has no exit head at all.
    """
    require_file(path)
    try:
        tensors = load_file(path)
    except OSError as err:
        raise ExportError(f"{path}: cannot be read ({err.strerror or err})") from err
    except SafetensorError as err:
        raise ExportError(f"{path}: expected a safetensors file ({err})") from err
    if any(name.startswith(CHECKPOINT) for name in tensors):
        raise ExportError(
            f"{path}: expected a weights file, got a training's checkpoint; `splitedge train` and"
            " `splitedge simulate` write weights.safetensors after the last round"
        )
    if any(name.startswith(PARTS) for name in tensors):
        raise ExportError(
            f"{path}: expected the weights of one network, got those of a run that has several;"
            f" export it with --run {path.parent}"
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
            f"{path}: expected a trained exit head, with which a device answers, found none: this"
            " training left its exit heads on the devices or had none; train with a recipe that"
            " shares them (SuperSFL: share_exits = true), or export the run's folder with --run and"
            " --train-exits, which trains some"
        )
    net.load_state_dict(net.state_dict() | tensors)
    return depths


def require_file(path: Path) -> None:
    """Refuse a file that is not there, before anything else takes time.

    Raises: ExportError.
    """
    if not path.is_file():
        raise ExportError(f"{path}: expected a .safetensors file, found none")


@dataclass(frozen=True, slots=True)
class WeightsOrigin:
    """Metadata that a training writes into its weights file.

    Attributes:
        gate: uncertainty measure that the exits' gates use; entropy if the file names none.
        run: id of the training run; empty if the file names none.
    """

    gate: GatePolicy
    run: str


def read_origin(path: Path) -> WeightsOrigin:
    """The origin of weights that `load_weights` has read.

    Raises: ExportError for a gate that devices do not know.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    gate = metadata.get("gate", "entropy")
    try:
        return WeightsOrigin(str(read_gate(gate)), metadata.get("run", ""))
    except ConfigurationError as err:
        raise ExportError(f"{path}: {err}; export with the release that trained it") from err


def check_depths(
    path: Path, net: Supernet, trained: tuple[int, ...], wanted: Sequence[int]
) -> None:
    """Refuse a wanted depth without a trained exit head.

    A depth at which the network cannot be cut is left to `export_model`.

    Raises: ExportError naming the trained depths.
    """
    lacking = [depth for depth in wanted if depth in net.cuts and depth not in trained]
    if lacking:
        raise ExportError(
            f"{path}: has no trained exit head at depth {lacking[0]}, because no device trained"
            f" there; choose --depth from {', '.join(map(str, trained))}, or train at that depth"
        )


def _exits(tensors: Mapping[str, Tensor]) -> set[str]:
    """`exits.D.` of every exit head in the file."""
    return {f"exits.{name.split('.')[1]}." for name in tensors if name.startswith("exits.")}


def _fits(net: Supernet, tensors: Mapping[str, Tensor]) -> bool:
    """Whether these are the network's weights; whole exit heads may be missing."""
    own, there = net.state_dict(), _exits(tensors)
    names = {name for name in own if not name.startswith("exits.") or name.startswith(tuple(there))}
    return names == set(tensors) and all(own[name].shape == tensors[name].shape for name in names)


def _is_of(backbone: str, net: Supernet, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the weights fit another backbone with the same inputs and classes."""
    try:
        with torch.device("meta"):  # names and shapes, no weights
            other = build(backbone, classes=net.classes, input_shape=net.input_shape)
    except ConfigurationError:  # that backbone takes no such inputs
        return False
    return _fits(other, tensors)
