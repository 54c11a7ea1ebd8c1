"""Samples of a source of data, with or without labels, and the checks of their arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edge_sdk.errors import InputError

Array = NDArray[Any]

# 1,000 images of Fashion-MNIST; as float64, twice, they take 12 MB
BLOCK_VALUES: Final = 1000 * 28 * 28


@dataclass(frozen=True, slots=True)
class Part:
    """Samples of one part.

    Attributes:
        x: (n, channels, ...) as recorded, uint8 or float32.
        y: (n,) int64 labels from 0 on; None where there are none.
        groups: (n,) int64, the person that each sample is from; None if unknown.
        runs: (n,) int64, the stretch of a recording that each sample is from; None if unknown.
            Samples of one run may overlap.
    """

    x: Array
    y: Array | None = None
    groups: Array | None = None
    runs: Array | None = None

    def __len__(self) -> int:
        return len(self.x)

    def rows(self, picked: Array | slice) -> Part:
        """Some of the samples."""
        return Part(
            self.x[picked],
            None if self.y is None else self.y[picked],
            None if self.groups is None else self.groups[picked],
            None if self.runs is None else self.runs[picked],
        )


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples that a word of the grammar names (edge_sdk.training.data.load), checked.

    Attributes:
        train: all samples, or the training part.
        test: the data's own test part; None where it has none.
        class_names: in label order; empty where the data name none.
        skipped: what could not be read: files, or windows of a table.
        what: noun for `skipped`.
        source: file that holds the samples, for errors; empty where the name says it.
    """

    name: str
    train: Part
    test: Part | None = None
    class_names: tuple[str, ...] = ()
    skipped: int = 0
    what: str = "files"
    source: str = ""

    @property
    def classes(self) -> int:
        """Number of classes: those named, else as many as the largest label says; 0 unlabelled."""
        if self.class_names:
            return len(self.class_names)
        labels = self.train.y
        return 0 if labels is None else max(1, int(labels.max()) + 1)


def checked_samples(
    name: str,
    train: Part,
    test: Part | None,
    *,
    source: object,
    class_names: Sequence[str] = (),
) -> Samples:
    """Check that arrays fit together.

    Args:
        source: where they come from, for errors.
        class_names: in label order.
    Returns: the samples; values other than uint8 became float32, labels int64.
    Raises: InputError naming the source, the array, what was expected and what was got.
    """
    train = _checked(source, "train", train)
    samples = Samples(name, train, None, tuple(class_names))
    if test is not None:
        test = _checked(source, "test", test)
        if test.x.shape[1:] != train.x.shape[1:]:
            raise InputError(
                f"{source}: expected samples of one shape in both parts,"
                f" got {train.x.shape[1:]} for training and {test.x.shape[1:]} for test"
            )
    for side, part in (("train", train), ("test", test)):
        labels = None if part is None else part.y
        most = samples.classes - 1 if samples.classes else math.inf  # inf: only test has labels
        if labels is not None and (labels.min() < 0 or labels.max() > most):
            raise InputError(
                f"{source}: y_{side}: expected labels 0..{most}, got {labels.min()}..{labels.max()}"
            )
    return replace(samples, test=test)


def blocks(x: Array) -> Iterator[Array]:
    """The samples in pieces of about BLOCK_VALUES values."""
    step = max(1, BLOCK_VALUES // max(1, x[0].size))
    return (x[at : at + step] for at in range(0, len(x), step))


def _checked(source: object, side: str, part: Part) -> Part:
    x = _values(f"{source}: x_{side}", part.x)
    return Part(
        x,
        *(
            None if given is None else _whole_numbers(f"{source}: {kind}_{side}", given, len(x))
            for kind, given in (("y", part.y), ("group", part.groups), ("run", part.runs))
        ),
    )


def _values(owner: str, x: Array) -> Array:
    """`x` as uint8 or float32; other real numbers become float32."""
    if x.ndim < 2 or not x.size:
        raise InputError(
            f"{owner}: expected at least one sample and the shape (samples, channels, ...),"
            f" got shape {x.shape}; reshape it, a grey image is (1, height, width)"
        )
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind not in "biuf":
        raise InputError(f"{owner}: expected numbers, uint8 or float32, got dtype {x.dtype}")
    with np.errstate(over="ignore"):  # a value too large becomes inf, refused below
        x = x.astype(np.float32, copy=False)
    if not all(np.isfinite(block).all() for block in blocks(x)):
        raise InputError(f"{owner}: expected finite float32 values, got NaN or infinity among them")
    return x


def _whole_numbers(owner: str, values: Array, samples: int) -> Array:
    if values.shape != (samples,) or values.dtype.kind not in "iu":
        raise InputError(
            f"{owner}: expected whole numbers of shape ({samples},), one a sample,"
            f" got {values.dtype} of shape {values.shape}"
        )
    return values.astype(np.int64)
