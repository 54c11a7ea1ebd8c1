"""Weights as they travel: every float tensor that training changes, by its name in the network.

BatchNorm's running statistics are weights. Its batch counter is not (an average of counters means
nothing), nor are the constants of input normalisation.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edge_sdk.bundles import namespaces
from edge_sdk.errors import FrameError, NotFiniteError

CONSTANTS = "normalise."
VARIANCE = ".running_var"
STATISTICS = (".running_mean", VARIANCE)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The live float tensors of `module`, by name: to read, or to set in place."""
    return {
        name: tensor.detach()
        for name, tensor in module.state_dict().items()
        if travels(name, tensor)
    }


def read_weights(module: nn.Module) -> dict[str, Tensor]:
    """Contiguous copies of the float tensors of `module`, by name."""
    return {name: contiguous_copy(tensor) for name, tensor in tensors_of(module).items()}


def contiguous_copy(tensor: Tensor) -> Tensor:
    """A copy as a message carries it: sums add in the order of memory, here and there the same."""
    return tensor.clone(memory_format=torch.contiguous_format)


def split_exit_head(
    weights: dict[str, Tensor], depth: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of no exit head, and of the one at `depth` by their names in its module."""
    mark = f"exit{depth}."
    rest = {name: tensor for name, tensor in weights.items() if not name.startswith("exit")}
    return rest, {n.removeprefix(mark): t for n, t in weights.items() if n.startswith(mark)}


def without_auxiliary(weights: dict[str, Tensor], depth: int) -> dict[str, Tensor]:
    """The weights without the auxiliary model of a cut."""
    auxiliary = namespaces.auxiliary(depth)
    return {name: tensor for name, tensor in weights.items() if not auxiliary.holds(name)}


def load_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Set the tensors of `module` in place.

    Raises: FrameError naming a tensor that is missing, unknown, of another shape or type, or not
        finite.
    """
    own = tensors_of(module)
    check_weights(weights, own)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])


def check_weights(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check that `weights` has the names, shapes and types of `expected`, and only finite values.

    Raises: FrameError naming the first tensor that does not fit.
    """
    if weights.keys() != expected.keys():
        missing = sorted(expected.keys() - weights.keys())[:3]
        unknown = sorted(weights.keys() - expected.keys())[:3]
        raise FrameError(f"weights: missing {missing}, unknown {unknown}")
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            got, want = tuple(tensor.shape), tuple(expected[name].shape)
            raise FrameError(f"weights: {name}: expected shape {want}, got {got}")
        if tensor.dtype != expected[name].dtype:
            want_type = expected[name].dtype
            raise FrameError(f"weights: {name}: expected {want_type}, got {tensor.dtype}")
        if not torch.isfinite(tensor).all():
            raise NotFiniteError(f"weights: {name}: expected finite values, got infinity or NaN")


def travels(name: str, tensor: Tensor) -> bool:
    """Whether an entry of a state dict is one of the weights."""
    return tensor.is_floating_point() and not name.startswith(CONSTANTS)


def is_statistic(name: str) -> bool:
    """Whether a tensor is one of BatchNorm's running statistics, which no gradient changes."""
    return name.endswith(STATISTICS)


def is_variance(name: str) -> bool:
    """Whether a tensor is a BatchNorm's running variance; its square root is taken."""
    return name.endswith(VARIANCE)
