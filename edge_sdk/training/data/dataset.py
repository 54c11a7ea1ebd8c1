"""The labelled data set in its three parts, as training takes it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from edge_sdk.errors import InputError
from edge_sdk.training.data.samples import Array, Part, Samples, blocks
from edge_sdk.training.data.split import HELD_OUT_SHARE, SEED, split_samples

_SIDES: Final = ("train", "held_out", "test")


@dataclass(frozen=True, slots=True)
class Dataset:
    """A labelled data set in three parts.

    `train` is for training. `held_out` chooses: thresholds, calibrations, stopping points; it is
    empty where nothing was held out. Figures are of `test`.

    Attributes:
        x_train, x_held_out, x_test: (n, channels, ...) as recorded, uint8 or float32: the network's
            first layer normalises them.
        y_train, y_held_out, y_test: (n,) int64, each in [0, classes).
        mean, std: per channel, of the training part, in the units of x.
        group_train, group_held_out, group_test: (n,) int64, the person that each sample is from
            (the subject who wore the sensor): natural clients. None if unknown.
    """

    name: str
    x_train: Array
    y_train: Array
    x_held_out: Array
    y_held_out: Array
    x_test: Array
    y_test: Array
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    group_train: Array | None = None
    group_held_out: Array | None = None
    group_test: Array | None = None

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def sizes(self) -> dict[str, int]:
        """Samples of each part, by `train`, `held_out`, `test`."""
        return {side: len(getattr(self, f"y_{side}")) for side in _SIDES}

    def head(self, train: int, test: int, held_out: int | None = None) -> Dataset:
        """The first samples of each part; evenly spread ones where samples are sorted by class, as
        those of a folder of pictures are: the first of these have the first classes alone.

        Args:
            held_out: None for all.
        """
        counts = {"train": train, "held_out": held_out, "test": test}
        rows = {side: _some(getattr(self, f"y_{side}"), counts[side]) for side in _SIDES}
        return replace(
            self,
            **{
                f"{array}_{side}": part[rows[side]]
                for side in _SIDES
                for array in ("x", "y", "group")
                if (part := getattr(self, f"{array}_{side}")) is not None
            },
        )

    def limited(self, train_max: int | None, test_max: int | None) -> Dataset:
        """At most so many samples of train and test part; the held-out part is cut in proportion.

        Args:
            train_max, test_max: None for all.
        """
        train = min(train_max or len(self.y_train), len(self.y_train))
        held_out = math.ceil(len(self.y_held_out) * train / len(self.y_train))
        return self.head(train, test_max or len(self.y_test), held_out)

    def merged(self) -> tuple[Array, Array, Array | None]:
        """x, y and groups of train and test, train first, to be split again client by client."""
        groups = None
        if self.group_train is not None and self.group_test is not None:
            groups = np.concatenate([self.group_train, self.group_test])
        return (
            np.concatenate([self.x_train, self.x_test]),
            np.concatenate([self.y_train, self.y_test]),
            groups,
        )


def labelled_dataset(
    samples: Samples, *, held_out: float = HELD_OUT_SHARE, seed: int = SEED
) -> Dataset:
    """The data set of labelled samples, parted by the rule (edge_sdk.training.data.split).

    Args:
        held_out: share of the samples that are not for test; with 0 the held-out part is empty.
    Raises: InputError for samples without labels, or too few to part.
    """
    parts = split_samples(samples, held_out=held_out, seed=seed)
    train, chosen, test = parts.train, parts.held_out, parts.test
    names = samples.class_names or tuple(map(str, range(samples.classes)))
    labels = {side: _labels(samples, side, getattr(parts, side)) for side in _SIDES}
    mean, std = moments(train.x)
    return Dataset(
        name=samples.name,
        x_train=train.x,
        y_train=labels["train"],
        x_held_out=chosen.x,
        y_held_out=labels["held_out"],
        x_test=test.x,
        y_test=labels["test"],
        class_names=names,
        mean=mean,
        std=std,
        group_train=train.groups,
        group_held_out=chosen.groups,
        group_test=test.groups,
    )


def _labels(samples: Samples, side: str, part: Part) -> Array:
    if part.y is None:
        where = "the test part has none" if side == "test" else "there are none"
        raise InputError(
            f"{samples.source or samples.name}: expected labels to train with, {where}; put the"
            " pictures into a folder for each class, or add the arrays y_train and y_test;"
            " `splitedge adopt` takes samples without labels"
        )
    return part.y


def moments(x: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel; a constant channel has a deviation of 1.

    They are computed block by block: x.std would hold all of x as float64 at once, 376 MB for
    Fashion-MNIST.

    Args:
        x: (n, channels, ...), n at least 1.
    """
    axes = (0, *range(2, x.ndim))
    per_channel = x.size // x.shape[1]
    mean = sum(block.sum(axes, dtype=np.float64) for block in blocks(x)) / per_channel
    centre = np.reshape(mean, (-1, *(1,) * (x.ndim - 2)))
    squares = sum(np.square(block - centre).sum(axes) for block in blocks(x))
    std = np.sqrt(squares / per_channel)
    return tuple(np.ravel(mean).tolist()), tuple(np.where(std > 0, std, 1.0).tolist())


def _some(labels: Array, most: int | None) -> Array | slice:
    if most is None or most >= len(labels) or (np.diff(labels) < 0).any():
        return slice(most)
    return np.linspace(0, len(labels) - 1, most).astype(np.int64)
