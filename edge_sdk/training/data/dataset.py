"""The data set, and the checks of the arrays that it is made of."""

from __future__ import annotations

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
class Dataset:
    """A labelled data set with a train and a test part.

    Attributes:
        x_train, x_test: (n, channels, ...) as recorded, uint8 or float32: the network's first layer
            normalises them.
        y_train, y_test: (n,) int64, each in [0, classes).
        mean, std: per channel, of the training part, in the units of x.
        group_train, group_test: (n,) int64, the person that each sample is from (the subject who
            wore the sensor): natural clients. None if unknown.
    """

    name: str
    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    group_train: Array | None = None
    group_test: Array | None = None

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    def head(self, train: int, test: int) -> Dataset:
        """The first samples of each part."""
        return replace(
            self,
            x_train=self.x_train[:train],
            y_train=self.y_train[:train],
            x_test=self.x_test[:test],
            y_test=self.y_test[:test],
            group_train=None if self.group_train is None else self.group_train[:train],
            group_test=None if self.group_test is None else self.group_test[:test],
        )

    def merged(self) -> tuple[Array, Array, Array | None]:
        """x, y and groups of both parts, train first, to be split again client by client."""
        groups = None
        if self.group_train is not None and self.group_test is not None:
            groups = np.concatenate([self.group_train, self.group_test])
        return (
            np.concatenate([self.x_train, self.x_test]),
            np.concatenate([self.y_train, self.y_test]),
            groups,
        )


@dataclass(frozen=True, slots=True)
class Part:
    """One part as read from a file; `make_dataset` checks it.

    Attributes:
        groups: the person that each sample is from; None if unknown.
    """

    x: Array
    y: Array
    groups: Array | None = None


def make_dataset(
    name: str,
    train: Part,
    test: Part,
    *,
    source: object,
    class_names: Sequence[str] | None = None,
) -> Dataset:
    """Check that arrays fit together, and make a data set of them.

    Args:
        source: where they come from, for errors.
        class_names: in label order; by default the numbers up to the largest training label.
    Raises: InputError naming the source, the array, what was expected and what was got.
    """
    x_train, x_test = (_values(f"{source}: x_{side}", part.x) for side, part in _sides(train, test))
    if x_train.shape[1:] != x_test.shape[1:]:
        raise InputError(
            f"{source}: expected samples of one shape in both parts,"
            f" got {x_train.shape[1:]} for training and {x_test.shape[1:]} for test"
        )
    y_train, y_test = (
        _whole_numbers(f"{source}: y_{side}", part.y, len(part.x))
        for side, part in _sides(train, test)
    )
    if class_names is None:
        class_names = [str(label) for label in range(int(y_train.max()) + 1)]
    for side, labels in (("train", y_train), ("test", y_test)):
        if labels.min() < 0 or labels.max() >= len(class_names):
            raise InputError(
                f"{source}: y_{side}: expected labels 0..{len(class_names) - 1},"
                f" got {labels.min()}..{labels.max()}"
            )
    group_train, group_test = (
        None
        if part.groups is None
        else _whole_numbers(f"{source}: group_{side}", part.groups, len(part.x))
        for side, part in _sides(train, test)
    )
    mean, std = moments(x_train)
    return Dataset(
        name, x_train, y_train, x_test, y_test, tuple(class_names), mean, std,
        group_train, group_test,
    )  # fmt: skip


def moments(x: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel; a constant channel has a deviation of 1.

    They are computed block by block: x.std would hold all of x as float64 at once, 376 MB for
    Fashion-MNIST.

    Args:
        x: (n, channels, ...), n at least 1.
    """
    axes = (0, *range(2, x.ndim))
    per_channel = x.size // x.shape[1]
    mean = sum(block.sum(axes, dtype=np.float64) for block in _blocks(x)) / per_channel
    centre = np.reshape(mean, (-1, *(1,) * (x.ndim - 2)))
    squares = sum(np.square(block - centre).sum(axes) for block in _blocks(x))
    std = np.sqrt(squares / per_channel)
    return tuple(np.ravel(mean).tolist()), tuple(np.where(std > 0, std, 1.0).tolist())


def _sides(train: Part, test: Part) -> tuple[tuple[str, Part], tuple[str, Part]]:
    return ("train", train), ("test", test)


def _blocks(x: Array) -> Iterator[Array]:
    step = max(1, BLOCK_VALUES // max(1, x[0].size))
    return (x[at : at + step] for at in range(0, len(x), step))


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
    if not all(np.isfinite(block).all() for block in _blocks(x)):
        raise InputError(f"{owner}: expected finite float32 values, got NaN or infinity among them")
    return x


def _whole_numbers(owner: str, values: Array, samples: int) -> Array:
    if values.shape != (samples,) or values.dtype.kind not in "iu":
        raise InputError(
            f"{owner}: expected whole numbers of shape ({samples},), one a sample,"
            f" got {values.dtype} of shape {values.shape}"
        )
    return values.astype(np.int64)
