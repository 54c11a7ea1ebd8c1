"""Rows: the tensors of several queries as one, so that they cross the wire together.

int8 has a scale and a zero point a sample. Those of several samples are tensors of the frame beside
`z{d}`: `scale` (n,) FP32 and `zero_point` (n,) UINT8. Samples that travel as bytes may differ in
length: `z{d}` (total,) holds one behind the other, and `sizes` (n,) INT64 stands beside it. Pure
numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from edge_sdk.errors import FrameError, shown
from edge_sdk.wire.codecs import CODEC, SIZES
from edge_sdk.wire.frames import Tensor

SCALE: Final = "scale"
ZERO_POINT: Final = "zero_point"
_OF_ROWS: Final[Mapping[str, np.dtype[Any]]] = {
    SCALE: np.dtype(np.float32),
    ZERO_POINT: np.dtype(np.uint8),
}
_OF_BYTES: Final[Mapping[str, np.dtype[Any]]] = {SIZES: np.dtype(np.int64)}


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors can be rows of one."""
    if one.name != other.name or one.array.dtype != other.array.dtype:
        return False
    if CODEC in one.parameters:
        return one.parameters == other.parameters
    return (
        one.array.shape[1:] == other.array.shape[1:]
        and one.parameters.keys() == other.parameters.keys()
        and one.parameters.keys() <= _OF_ROWS.keys()
    )


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor with the rows of all; its parameters are arrays with a value a row.

    Args:
        tensors: at least one, each of one row and `alike`. One alone is returned as it is.
    """
    first = tensors[0]
    if len(tensors) == 1:
        return first
    if CODEC in first.parameters:
        sizes = np.array([tensor.array.size for tensor in tensors], _OF_BYTES[SIZES])
        joint = np.concatenate([tensor.array.ravel() for tensor in tensors])
        return Tensor(first.name, joint, {**first.parameters, SIZES: sizes})
    parameters = {
        name: np.array([tensor.parameters[name] for tensor in tensors], _OF_ROWS[name])
        for name in first.parameters
    }
    rows = np.concatenate([tensor.array for tensor in tensors])
    return Tensor(first.name, rows, parameters)


def parted(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors of a frame for one tensor: those parameters that are arrays stand beside it."""
    beside = {
        name: value for name, value in tensor.parameters.items() if isinstance(value, np.ndarray)
    }
    if not beside:
        return (tensor,)
    own = {name: value for name, value in tensor.parameters.items() if name not in beside}
    rows = [Tensor(name, array) for name, array in beside.items()]
    return (Tensor(tensor.name, tensor.array, own), *rows)


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """The one tensor of a query from those of its frame; None for a query without a tensor.

    Raises: FrameError for tensors that are not as `parted` makes them.
    """
    if len(tensors) <= 1:
        return tensors[0] if tensors else None
    first, *beside = tensors
    if [tensor.name for tensor in beside] == list(_OF_BYTES):
        _check_beside(beside, _OF_BYTES, (beside[0].array.size,))
    elif [tensor.name for tensor in beside] == list(_OF_ROWS):
        _check_beside(beside, _OF_ROWS, first.array.shape[:1])
    else:
        raise FrameError(
            f"query: expected one tensor, got {len(tensors)}; only rows have others beside them:"
            " scale and zero_point in int8, sizes where they travel as bytes"
        )
    values = {tensor.name: tensor.array for tensor in beside}
    return Tensor(first.name, first.array, {**first.parameters, **values})


def _check_beside(
    beside: Sequence[Tensor], known: Mapping[str, np.dtype[Any]], rows: tuple[int, ...]
) -> None:
    for tensor in beside:
        if tensor.array.dtype != known[tensor.name] or tensor.array.shape != rows:
            raise FrameError(
                f"tensor {tensor.name}: expected {known[tensor.name]} {shown(rows)},"
                f" got {tensor.array.dtype} {shown(tensor.array.shape)}"
            )
