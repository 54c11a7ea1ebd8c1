"""Features of an exit head: what its last linear layer sees, computed from the smashed data z.

A bundle's exit graph gives z and the logits, not the features between them. The form of the pooling
is found by trial: the one with which the head's own weights give the logits that the graph gave.

    z (F,)         itself
    z (C, ...)     flattened; or averaged over windows to a grid of cells, global pooling included
    z (T, width)   the first token, the mean of all tokens, or both; with LayerNorm if the head has
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from edge_sdk.learning.head import Floats, Head

# One sample's z to its features (F,).
Features = Callable[[Floats], Floats]

_EPSILONS = (1e-5, 1e-6)  # of LayerNorm


def find_features(
    head: Head, norms: Sequence[tuple[Floats, Floats]], zs: Sequence[Floats], logits: Floats
) -> tuple[Features, float] | None:
    """The form that comes closest to the graph's logits, and its largest difference from them.

    Args:
        norms: scale and shift of the LayerNorms that the head may have.
        zs: one or more samples' z. logits: (n, classes), those of the graph.
    Returns: None if no form gives that many features.
    """
    best: tuple[Features, float] | None = None
    for form in forms(zs[0].shape, head.features, norms):
        first = _error(head, form, zs[:1], logits[:1])
        if best is not None and first > best[1]:
            continue
        error = _error(head, form, zs, logits)
        if best is None or error < best[1]:
            best = form, error
    return best


def forms(
    shape: Sequence[int], count: int, norms: Sequence[tuple[Floats, Floats]] = ()
) -> Iterator[Features]:
    """The forms that make `count` features of a z of that shape; the likeliest first."""
    if prod(shape) == count:
        yield np.ravel
    if len(shape) == 2:
        yield from _token_forms(shape[1], count, norms)
    if len(shape) > 1 and count % shape[0] == 0:
        for cells in _grids(shape[1:], count // shape[0]):
            yield from _pool_forms(shape[1:], cells)


def _error(head: Head, form: Features, zs: Sequence[Floats], logits: Floats) -> float:
    own = head.logits(np.stack([form(z) for z in zs]))
    return float(np.abs(own - logits).max())


def _token_forms(
    width: int, count: int, norms: Sequence[tuple[Floats, Floats]]
) -> Iterator[Features]:
    if count == 2 * width:
        yield lambda z: np.concatenate([z[0], z.mean(axis=0)])
    if count != width:
        return
    first: Features = lambda z: z[0]  # noqa: E731 - as short as its neighbours
    mean: Features = lambda z: z.mean(axis=0)  # noqa: E731
    for scale, shift in norms:
        for epsilon in _EPSILONS if scale.shape == (width,) else ():
            for token in (first, mean):
                yield _normed(token, scale, shift, epsilon)
    yield from (first, mean)


def _normed(token: Features, scale: Floats, shift: Floats, epsilon: float) -> Features:
    def form(z: Floats) -> Floats:
        value = token(z)
        deviation = np.sqrt(value.var() + epsilon)
        normed: Floats = (value - value.mean()) / deviation * scale + shift
        return normed

    return form


def _grids(sides: Sequence[int], cells: int) -> Iterator[tuple[int, ...]]:
    """Cells along each axis, as many as fit, with that product; equal ones first."""
    if len(sides) == 1:
        if cells <= sides[0]:
            yield (cells,)
        return
    divisors = [n for n in range(1, min(sides[0], cells) + 1) if cells % n == 0]
    equal = round(cells ** (1 / len(sides)))
    for first in sorted(divisors, key=lambda n: abs(n - equal)):
        for rest in _grids(sides[1:], cells // first):
            yield (first, *rest)


def _pool_forms(sides: Sequence[int], cells: Sequence[int]) -> Iterator[Features]:
    """Averages over windows along each axis; every axis by the same rule."""
    rules: list[Sequence[NDArray[np.float32] | None]] = []
    pairs = list(zip(sides, cells, strict=True))
    rules.append([_even(side, count) for side, count in pairs])
    rules.append([_adaptive(side, count) for side, count in pairs])
    if len(set(pairs)) == 1:
        side, count = pairs[0]
        for stride in range(1, side + 1):
            for window in range(1, side + 1):
                if (side - window) // stride + 1 == count:
                    matrix = _windows(
                        side, [(n * stride, n * stride + window) for n in range(count)]
                    )
                    rules.append([matrix] * len(pairs))
    for matrices in rules:
        yield _averaged([matrix for matrix in matrices if matrix is not None])


def _averaged(matrices: Sequence[NDArray[np.float32]]) -> Features:
    def form(z: Floats) -> Floats:
        for matrix in matrices:  # each turns the first axis behind the channels to the end
            z = np.tensordot(z, matrix, axes=(1, 1))
        return np.ravel(z)

    return form


def _even(side: int, count: int) -> NDArray[np.float32]:
    """Equal windows that cover the axis, and overlap where it does not divide evenly."""
    stride = side // count
    window = side - (count - 1) * stride
    return _windows(side, [(n * stride, n * stride + window) for n in range(count)])


def _adaptive(side: int, count: int) -> NDArray[np.float32]:
    """The windows of torch's adaptive pooling."""
    bounds = [(n * side // count, -(-(n + 1) * side // count)) for n in range(count)]
    return _windows(side, bounds)


def _windows(side: int, bounds: Sequence[tuple[int, int]]) -> NDArray[np.float32]:
    """The matrix (windows, side) of averages."""
    matrix = np.zeros((len(bounds), side), np.float32)
    for row, (start, end) in enumerate(bounds):
        matrix[row, start:end] = 1 / (end - start)
    return matrix


def norms_of(weights: Mapping[str, Floats]) -> list[tuple[Floats, Floats]]:
    """Scale and shift of each normalisation among the head's weights, by their names."""
    return [
        (weight, weights[name.removesuffix("weight") + "bias"])
        for name, weight in weights.items()
        if name.endswith("weight") and weight.ndim == 1
        if name.removesuffix("weight") + "bias" in weights
    ]
