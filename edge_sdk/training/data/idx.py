"""IDX files, and the data sets that are published as IDX files: Fashion-MNIST and EMNIST."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import numpy as np

from edge_sdk.errors import ConfigurationError, InputError
from edge_sdk.training.data.files import find, read_bytes
from edge_sdk.training.data.samples import Array, Part, Samples, checked_samples

FASHION_CLASSES: Final = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
EMNIST_SPLITS: Final = ("byclass", "bymerge", "balanced", "letters", "digits", "mnist")
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


def emnist(folder: Path, split: str | None = None) -> Samples:
    """Grey images of 28 x 28, uint8: handwritten digits and letters of one of EMNIST's splits.

    `emnist-SPLIT-train-images-idx3-ubyte`, `...-train-labels-idx1-ubyte`, the two of `-test-` and
    `emnist-SPLIT-mapping.txt`, plain or as .gz, in `folder` or in the `gzip` in it. The published
    images lie on their side; these stand upright. Classes have the characters of the mapping as
    names; `letters` counts its labels from 1, these from 0.

    Args:
        split: one of EMNIST_SPLITS; None where the folder holds only one.
    Raises: ConfigurationError saying what to put where, or which splits there are; InputError
        naming a file that is not sound.
    """
    inner = folder / "gzip"
    root = inner if inner.is_dir() else folder
    there = [name for name in EMNIST_SPLITS if any(root.glob(f"emnist-{name}-train-images-*"))]
    remedy = "put the published files emnist-SPLIT-... in it, from the IDX version"
    if split is None and len(there) > 1:
        raise ConfigurationError(
            f"{folder}: expected one split of EMNIST, got {', '.join(there)};"
            f" choose one: emnist={folder}?split={there[0]}"
        )
    if split is not None and split not in EMNIST_SPLITS:
        raise ConfigurationError(
            f"emnist: split: expected one of {', '.join(EMNIST_SPLITS)}, got {split}"
        )
    name = split or next(iter(there), "balanced")
    parts = []
    for side in ("train", "test"):
        stem = f"emnist-{name}-{side}"
        images, labels = (
            read_idx(find(root, (f"{stem}-{kind}.gz", f"{stem}-{kind}"), remedy))
            for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
        )
        _check_images(root, images, labels)
        parts.append(Part(images.transpose(0, 2, 1)[:, None], labels))
    codes = _mapping(find(root, (f"emnist-{name}-mapping.txt",), remedy))
    train, test = (
        Part(np.ascontiguousarray(part.x), _places(root, part.y, sorted(codes))) for part in parts
    )
    names = [codes[label] for label in sorted(codes)]
    return checked_samples(f"emnist-{name}", train, test, source=root, class_names=names)


def _mapping(path: Path) -> dict[int, str]:
    """Characters by label, from lines of a label and the ASCII codes of its characters."""
    try:
        lines = [line.split() for line in path.read_text("ascii").splitlines() if line.strip()]
        return {int(label): chr(int(code)) for label, code, *_ in lines}
    except (OSError, ValueError, OverflowError) as err:
        raise InputError(
            f"{path}: expected a label and an ASCII code on each line ({err})"
        ) from err


def _places(root: Path, labels: Array | None, known: list[int]) -> Array:
    """Labels as places among the known ones."""
    assert labels is not None
    strange = sorted(set(labels.tolist()) - set(known))
    if strange:
        raise InputError(f"{root}: expected labels of the mapping, got {strange[0]}")
    return np.searchsorted(known, labels).astype(np.int64)


def _part(folder: Path, images_path: Path, labels_path: Path) -> Part:
    images, labels = read_idx(images_path), read_idx(labels_path)
    _check_images(folder, images, labels)
    if labels.max() > 9:
        raise InputError(f"{folder}: expected labels 0..9, got {labels.max()}")
    return Part(images[:, None], labels)


def _check_images(folder: Path, images: Array, labels: Array) -> None:
    if images.shape[1:] != (28, 28) or not images.size or labels.shape != images.shape[:1]:
        raise InputError(
            f"{folder}: expected images of 28 x 28 and as many labels, at least one, "
            f"got shapes {images.shape} and {labels.shape}; put the published files there"
        )


def _find(folder: Path, stem: str) -> Path:
    stem += "-idx3-ubyte" if stem.endswith("images") else "-idx1-ubyte"
    return find(folder, (f"{stem}.gz", stem), "put the four IDX files in it")
