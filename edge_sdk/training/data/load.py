"""Labelled data sets by name, read from disk; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from edge_sdk.errors import ConfigurationError
from edge_sdk.installation import names_function
from edge_sdk.training.data.arrays import npz
from edge_sdk.training.data.cifar import cifar10, cifar100
from edge_sdk.training.data.dataset import Array, Dataset, Part, make_dataset
from edge_sdk.training.data.har import uci_har
from edge_sdk.training.data.idx import FASHION_CLASSES, fashion_mnist, read_idx
from edge_sdk.training.data.images import image_folder
from edge_sdk.training.data.user import from_function

__all__ = ["FASHION_CLASSES", "Array", "Dataset", "load_dataset", "read_idx"]


def load_dataset(name: str, folder: Path | None = None) -> Dataset:
    """The data set of that name.

    Args:
        name: `digits` (from scikit-learn), `fashion-mnist`, `cifar-10`, `cifar-100` or `uci-har`
            (the published files in `folder`), `images` (`folder`/train/CLASS/*.png and
            `folder`/test/CLASS/*.png), a file `NAME.npz` (in `folder`), or `module:function`.
            The last runs code of this machine: never pass a name that a peer sent.
    Raises: ConfigurationError naming what is known, or what to put where; InputError naming a
        damaged file.
    """
    if name in _LOADERS:
        return _LOADERS[name](folder)
    if name.endswith(".npz"):
        return npz((folder or Path()) / name)
    if names_function(name):
        return from_function(name, folder)
    known = ", ".join(_LOADERS)
    raise ConfigurationError(
        f"data set {name!r}: expected one of {known}, a file NAME.npz, or module:function"
    )


def _digits(_folder: Path | None) -> Dataset:
    # scikit-learn ships 1,797 handwritten digits, 8x8, 0..16; every fifth is for test
    from sklearn.datasets import load_digits  # noqa: PLC0415 - heavy, and only needed here

    bunch = load_digits()
    x = bunch.images.astype(np.float32)[:, None]
    y = bunch.target.astype(np.int64)
    test = np.arange(len(x)) % 5 == 4
    return make_dataset(
        "digits",
        Part(x[~test], y[~test]),
        Part(x[test], y[test]),
        source="digits",
        class_names=tuple("0123456789"),
    )


_LOADERS: Final[dict[str, Callable[[Path | None], Dataset]]] = {
    "digits": _digits,
    "fashion-mnist": fashion_mnist,
    "cifar-10": cifar10,
    "cifar-100": cifar100,
    "uci-har": uci_har,
    "images": image_folder,
}
