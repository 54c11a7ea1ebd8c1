"""IDX files, and Fashion-MNIST, which is published as IDX files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import numpy as np

from edge_sdk.errors import InputError
from edge_sdk.training.data.files import find, read_bytes
from edge_sdk.training.data.samples import Array, Part, Samples, checked_samples

FASHION_CLASSES: Final = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
IDX_BYTES_MAX: Final = 1 << 30


def read_idx(path: Path) -> Array:
    """The array of an IDX file; decompressed if the name ends in .gz.

    Raises: InputError naming the file and what is wrong with it.
    """
    raw = read_bytes(path, IDX_BYTES_MAX)
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


def fashion_mnist(folder: Path) -> Samples:
    """60,000 + 10,000 grey images of 28 x 28 in 10 classes, uint8, from four IDX files."""
    train, test = (
        _part(folder, _find(folder, f"{side}-images"), _find(folder, f"{side}-labels"))
        for side in ("train", "t10k")
    )
    return checked_samples("fashion-mnist", train, test, source=folder, class_names=FASHION_CLASSES)


def _part(folder: Path, images_path: Path, labels_path: Path) -> Part:
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.shape[1:] != (28, 28) or not images.size or labels.shape != images.shape[:1]:
        raise InputError(
            f"{folder}: expected images of 28 x 28 and as many labels, at least one, "
            f"got shapes {images.shape} and {labels.shape}; put the published files there"
        )
    if labels.max() > 9:
        raise InputError(f"{folder}: expected labels 0..9, got {labels.max()}")
    return Part(images[:, None], labels)


def _find(folder: Path, stem: str) -> Path:
    stem += "-idx3-ubyte" if stem.endswith("images") else "-idx1-ubyte"
    return find(folder, (f"{stem}.gz", stem), "put the four IDX files in it")
