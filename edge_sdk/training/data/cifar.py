"""CIFAR-10 and CIFAR-100 in their binary version: records of labels and 3 x 32 x 32 bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from edge_sdk.errors import InputError
from edge_sdk.training.data.files import find, read_bytes
from edge_sdk.training.data.samples import Array, Part, Samples, checked_samples

CIFAR10_CLASSES: Final = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
CIFAR100_CLASSES: Final = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle",
    "bottle", "bowl", "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar",
    "cattle", "chair", "chimpanzee", "clock", "cloud", "cockroach", "couch", "crab", "crocodile",
    "cup", "dinosaur", "dolphin", "elephant", "flatfish", "forest", "fox", "girl", "hamster",
    "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion", "lizard", "lobster",
    "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange",
    "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy",
    "porcupine", "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal",
    "shark", "shrew", "skunk", "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar",
    "sunflower", "sweet_pepper", "table", "tank", "telephone", "television", "tiger", "tractor",
    "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf", "woman",
    "worm",
)  # fmt: skip
PIXELS: Final = 3 * 32 * 32
RECORDS_MAX: Final = 60_000


def cifar10(folder: Path) -> Samples:
    """50,000 + 10,000 RGB images of 32 x 32 in 10 classes, uint8, from six batches.

    `data_batch_1.bin` ... `data_batch_5.bin` and `test_batch.bin`, or with .xz (unpacking takes
    1.5 s a batch) or a leading `cifar10_`, in `folder` or in the `cifar-10-batches-bin` in it.
    """
    batches = [f"data_batch_{number}" for number in range(1, 6)]
    train, test = (
        _part([_find(folder, "cifar-10-batches-bin", "cifar10_", stem) for stem in stems], 1)
        for stems in (batches, ["test_batch"])
    )
    return checked_samples("cifar-10", train, test, source=folder, class_names=CIFAR10_CLASSES)


def cifar100(folder: Path) -> Samples:
    """50,000 + 10,000 RGB images of 32 x 32 in 100 fine classes, uint8, from two files.

    `train.bin` and `test.bin`, or with .xz or a leading `cifar100_`, in `folder` or in the
    `cifar-100-binary` in it.
    """
    train, test = (
        _part([_find(folder, "cifar-100-binary", "cifar100_", stem)], 2)
        for stem in ("train", "test")
    )
    return checked_samples("cifar-100", train, test, source=folder, class_names=CIFAR100_CLASSES)


def read_cifar(path: Path, labels: int) -> tuple[Array, Array]:
    """Images (n, 3, 32, 32) and the last label of each (n,), uint8.

    Args:
        labels: bytes before the pixels: 1 in CIFAR-10; 2 in CIFAR-100, coarse and fine.
    Raises: InputError naming the file and what is wrong with it.
    """
    record = labels + PIXELS
    raw = read_bytes(path, RECORDS_MAX * record + 1)
    if not raw or len(raw) % record or len(raw) > RECORDS_MAX * record:
        raise InputError(
            f"{path}: expected 1 to {RECORDS_MAX} records of {record} bytes, got"
            f" {len(raw)} bytes; put the published file there"
        )
    records = np.frombuffer(raw, np.uint8).reshape(-1, record)
    return records[:, labels:].reshape(-1, 3, 32, 32), records[:, labels - 1]


def _part(paths: list[Path], labels: int) -> Part:
    images, classes = zip(*(read_cifar(path, labels) for path in paths), strict=True)
    return Part(np.concatenate(images), np.concatenate(classes))


def _find(folder: Path, inner: str, prefix: str, stem: str) -> Path:
    plain = [f"{stem}.bin", f"{prefix}{stem}.bin", f"{stem}.bin.xz", f"{prefix}{stem}.bin.xz"]
    names = [*plain, *(f"{inner}/{name}" for name in plain)]
    return find(folder, names, "put the files of the binary version in it, plain or as .bin.xz")
