"""First weights of a training, from a file: `[train] start = "FILE.safetensors"`.

The file holds the weights of an earlier training (weights.safetensors) or, for a network of the
user's own, that module's own `state_dict`. Tensors that are missing, or of another shape, keep the
weights of the recipe's seed, and the log names them. So a network that was trained for other
classes starts from all but its last layer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from edge_sdk.bundles.namespaces import BACK, exit_head
from edge_sdk.errors import ConfigurationError
from edge_sdk.nets.supernet import Supernet
from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.protocol.weights import CONSTANTS, read_weights

logger = logging.getLogger(__name__)

_NAMED_MOST = 5


def load_first_weights(net: Supernet, path: Path) -> Weights:
    """Set the weights of `net` that the file has.

    Its normalisation stays that of the recipe's data.

    Returns: the parts of which clients may keep their own, under `exit2.…` and `back.…`, as far as
        the file has them whole.
    Raises: ConfigurationError if the file cannot be read, or has no tensor of the network's stages.
    """
    found = _own_named(_read(path), net)
    own = {name: t for name, t in net.state_dict().items() if not name.startswith(CONSTANTS)}
    fitting = {
        name: tensor
        for name, tensor in found.items()
        if name in own and tensor.shape == own[name].shape and tensor.dtype == own[name].dtype
    }
    if not any(name.startswith("stages.") for name in fitting):
        raise ConfigurationError(
            f"train: start: {path}: expected weights of {net.name} for inputs {net.input_shape},"
            f" such as {min(own)}, got {_listed(sorted(found))}"
        )
    unsound = [name for name, tensor in fitting.items() if not bool(torch.isfinite(tensor).all())]
    if unsound:
        raise ConfigurationError(
            f"train: start: {path}: {unsound[0]}: expected finite values, got NaN or infinity"
        )
    net.load_state_dict(net.state_dict() | fitting)
    _tell(path, own, found, fitting)
    return _of_clients(net, set(fitting))


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ConfigurationError(
            f"train: start: expected a .safetensors file at {path}, found none; put it there, or in"
            " the folder of the recipe"
        )
    try:
        return load_file(path)
    except OSError as err:
        why = err.strerror or str(err)
        raise ConfigurationError(f"train: start: {path}: cannot be read ({why})") from err
    except SafetensorError as err:
        raise ConfigurationError(
            f"train: start: {path}: expected a safetensors file ({err}); write it with"
            " safetensors.torch.save_file(module.state_dict(), FILE)"
        ) from err


def _own_named(tensors: Mapping[str, Tensor], net: Supernet) -> dict[str, Tensor]:
    """The tensors by their names in the network; a user's own names are translated."""
    known = tensors.keys() & net.state_dict().keys()
    if len(tensors.keys() & net.own_names.keys()) > len(known):
        return {net.own_names.get(name, name): tensor for name, tensor in tensors.items()}
    return {name: t for name, t in tensors.items() if not name.startswith(CONSTANTS)}


def _tell(
    path: Path,
    own: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    fitting: Mapping[str, Tensor],
) -> None:
    """Log what stays as the seed drew it, and what the network does not have."""
    counters = {name for name in own if name.endswith("num_batches_tracked")}
    other = sorted(name for name in own if name in found and name not in fitting)
    missing = sorted(own.keys() - found.keys() - counters)
    unknown = sorted(found.keys() - own.keys())
    if other:
        shapes = [
            f"{name} ({tuple(found[name].shape)}, not {tuple(own[name].shape)})" for name in other
        ]
        logger.warning("start=%s of another shape, drawn by the seed: %s", path, _listed(shapes))
    if missing:
        logger.warning("start=%s missing, drawn by the seed: %s", path, _listed(missing))
    if unknown:
        logger.warning("start=%s not in this network, left out: %s", path, _listed(unknown))


def _of_clients(net: Supernet, loaded: set[str]) -> Weights:
    """Exit heads and the last layer, if the file has each of their tensors."""
    first: Weights = {}
    for depth in net.cuts:
        weights = read_weights(net.exit_head(depth))
        if all(f"exits.{depth}.{name}" in loaded for name in weights):
            first |= exit_head(depth).prefixed(weights)
    last = next(reversed(dict(net.head.named_children())))
    weights = read_weights(net.suffix(net.cuts[-1]).classifier)
    if all(f"head.{last}.{name}" in loaded for name in weights):
        first |= BACK.prefixed(weights)
    return first


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED_MOST
    return ", ".join(names[:_NAMED_MOST]) + (f" and {more} more" if more > 0 else "")
