"""Labelled data as raw numpy arrays, read from what is on disk; nothing is downloaded."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edge_sdk.errors import ConfigurationError, InputError

Array = NDArray[Any]

FASHION_CLASSES: Final = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
IDX_BYTES_MAX: Final = 1 << 30
PIECE_BYTES: Final = 1 << 20
MOMENTS_BLOCK: Final = 1000  # samples


@dataclass(frozen=True, slots=True)
class Dataset:
    """A train and a test part.

    Attributes:
        x_train, x_test: (n, channels, ...) as they were recorded, uint8 or float32: normalising is
            the network's first layer.
        y_train, y_test: (n,) int64, each in [0, classes).
        mean, std: per channel, of the training part, in the units of x.
    """

    name: str
    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    def head(self, train: int, test: int) -> Dataset:
        """The first samples of each part."""
        return Dataset(
            self.name,
            self.x_train[:train],
            self.y_train[:train],
            self.x_test[:test],
            self.y_test[:test],
            self.class_names,
            self.mean,
            self.std,
        )


def load_dataset(name: str, folder: Path | None = None) -> Dataset:
    """The data set of that name.

    Args:
        name: `digits` (from scikit-learn) or `fashion-mnist` (IDX files in `folder`).
    Raises: ConfigurationError naming what is known, or what to put where.
    """
    try:
        load = _LOADERS[name]
    except KeyError:
        known = ", ".join(_LOADERS)
        raise ConfigurationError(f"data set {name!r}: expected one of {known}") from None
    return load(folder)


def read_idx(path: Path) -> Array:
    """A tensor in IDX form, gzipped where the name ends in .gz.

    Raises: InputError naming the file and what is wrong with it.
    """
    try:
        raw = _read(path)
    except (OSError, EOFError, zlib.error) as err:  # BadGzipFile is an OSError
        raise InputError(f"{path}: cannot be read ({err})") from err
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise InputError(f"{path}: expected an IDX file of bytes, got {raw[:4].hex() or 'nothing'}")
    start = 4 + 4 * raw[3]
    shape = tuple(int.from_bytes(raw[at : at + 4], "big") for at in range(4, start, 4))
    if len(raw) != start + math.prod(shape):
        expected = start + math.prod(shape)
        raise InputError(f"{path}: expected {expected} bytes for shape {shape}, got {len(raw)}")
    try:
        return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
    except ValueError as err:  # more than 64 sizes, or (0, 4e9, 4e9, 4e9)
        raise InputError(f"{path}: numpy has no array of that shape ({err})") from err


def _read(path: Path) -> bytearray:
    raw = bytearray()
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        # piece by piece: asked for its limit at once, gzip allocates all of it
        while len(raw) < IDX_BYTES_MAX and (piece := file.read(PIECE_BYTES)):
            raw += piece
    return raw


def _digits(_folder: Path | None) -> Dataset:
    # 1,797 real handwritten digits, 8x8, 0..16 (scikit-learn ships them); every fifth is for test
    from sklearn.datasets import load_digits  # noqa: PLC0415 - heavy, and only needed here

    bunch = load_digits()
    x = bunch.images.astype(np.float32)[:, None]
    y = bunch.target.astype(np.int64)
    test = np.arange(len(x)) % 5 == 4
    return _dataset("digits", (x[~test], y[~test]), (x[test], y[test]), tuple("0123456789"))


def _fashion_mnist(folder: Path | None) -> Dataset:
    if folder is None:
        raise ConfigurationError("fashion-mnist: say where its four IDX files are, with --data DIR")
    parts = [
        (
            read_idx(_find(folder, f"{part}-images-idx3-ubyte")),
            read_idx(_find(folder, f"{part}-labels-idx1-ubyte")),
        )
        for part in ("train", "t10k")
    ]
    for images, labels in parts:
        if images.shape[1:] != (28, 28) or not images.size or labels.shape != images.shape[:1]:
            raise InputError(
                f"{folder}: expected images of 28 x 28 and as many labels, at least one, "
                f"got shapes {images.shape} and {labels.shape}; put the published files there"
            )
        if labels.max() > 9:
            raise InputError(f"{folder}: expected labels 0..9, got {labels.max()}")
    (x_train, y_train), (x_test, y_test) = (
        (images[:, None], labels.astype(np.int64)) for images, labels in parts
    )
    return _dataset("fashion-mnist", (x_train, y_train), (x_test, y_test), FASHION_CLASSES)


def _find(folder: Path, stem: str) -> Path:
    for name in (f"{stem}.gz", stem):
        if (folder / name).is_file():
            return folder / name
    raise ConfigurationError(f"{folder}: expected {stem}.gz there; put the four IDX files in it")


def _dataset(
    name: str, train: tuple[Array, Array], test: tuple[Array, Array], class_names: tuple[str, ...]
) -> Dataset:
    mean, std = _moments(train[0])
    return Dataset(name, *train, *test, class_names, tuple(mean.tolist()), tuple(std.tolist()))


def _moments(x: Array) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and standard deviation per channel; a constant channel counts as deviating by 1."""
    axes = (0, *range(2, x.ndim))
    mean = x.mean(axes, dtype=np.float64)
    centre = mean.reshape(-1, *(1,) * (x.ndim - 2))
    # block by block: x.std would hold all of x as float64 at once, 376 MB for Fashion-MNIST
    blocks = (x[at : at + MOMENTS_BLOCK] for at in range(0, len(x), MOMENTS_BLOCK))
    squares = sum(np.square(block - centre).sum(axes) for block in blocks)
    std = np.sqrt(squares / (x.size / x.shape[1]))
    return mean, np.where(std > 0, std, 1.0)


_LOADERS: Final[dict[str, Callable[[Path | None], Dataset]]] = {
    "digits": _digits,
    "fashion-mnist": _fashion_mnist,
}
