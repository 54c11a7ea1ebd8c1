"""Data sets in .npz files; nothing in them is unpickled."""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.lib import format as npy

from edge_sdk.errors import ConfigurationError, InputError
from edge_sdk.training.data.dataset import Array, Dataset, Part, make_dataset

ARRAY_BYTES_MAX: Final = 8 << 30
REQUIRED: Final = ("x_train", "y_train", "x_test", "y_test")
TEST: Final = ("x_test", "y_test")
_UNREADABLE: Final = (
    OSError,
    EOFError,
    ValueError,
    SyntaxError,
    NotImplementedError,  # a compression that zipfile does not know
    RuntimeError,  # encrypted
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


def npz(path: Path, *, test: bool = True) -> Dataset:
    """A data set of the arrays `x_train`, `y_train`, `x_test` and `y_test`.

    The file may hold `class_names`, `group_train` and `group_test` too.

    Args:
        test: require a test part; False lets the file leave it out, and it is empty then.
    Raises: ConfigurationError if the file is missing; InputError naming it, the array and what is
        wrong with it.
    """
    if not path.is_file():
        raise ConfigurationError(
            f"{path}: expected a file there; put it in {path.parent}, with the arrays"
            f" {', '.join(REQUIRED)} (numpy.savez)"
        )
    arrays = read_npz(path)
    if test or any(key in arrays for key in TEST):
        return dataset_of(path.stem, path, arrays, group="group")
    # a training sample stands in for the test part while the arrays are checked
    kinds = [kind for kind in "xy" if _is_rows(arrays, kind)]
    stand_in = {f"{kind}_test": arrays[f"{kind}_train"][:1] for kind in kinds}
    dataset = dataset_of(path.stem, path, arrays | stand_in, group="group")
    return dataset.head(len(dataset.y_train), 0)


def read_npz(path: Path) -> dict[str, Array]:
    """All arrays of the file by name.

    Sizes are checked before memory is taken: the archive's own figures, at most 8 GiB together.

    Raises: InputError naming the file and the array.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            total = sum(member.file_size for member in archive.infolist())
            if total > ARRAY_BYTES_MAX:
                raise InputError(
                    f"{path}: expected at most {ARRAY_BYTES_MAX} bytes of arrays, got {total};"
                    " give a Python function (module:function) that maps them instead"
                )
            return {
                member.filename.removesuffix(".npy"): _array(path, archive, member)
                for member in archive.infolist()
            }
    except _UNREADABLE as err:
        if isinstance(err, InputError):
            raise
        raise InputError(f"{path}: cannot be read as .npz ({err})") from err


def dataset_of(name: str, path: Path, arrays: dict[str, Array], group: str) -> Dataset:
    """A data set of the arrays of an .npz file.

    Args:
        group: prefix of the arrays that name the person of each sample, as `group_train`.

    Raises: InputError naming the file, the array and what is wrong with it.
    """
    missing = [key for key in REQUIRED if key not in arrays]
    if missing:
        raise InputError(
            f"{path}: expected the arrays {', '.join(REQUIRED)}, got {', '.join(arrays) or 'none'}"
        )
    train, test = (
        Part(arrays[f"x_{side}"], arrays[f"y_{side}"], arrays.get(f"{group}_{side}"))
        for side in ("train", "test")
    )
    class_names = arrays.get("class_names")
    if class_names is not None and (class_names.ndim != 1 or class_names.dtype.kind != "U"):
        raise InputError(
            f"{path}: class_names: expected a row of text,"
            f" got {class_names.dtype} of shape {class_names.shape}"
        )
    names = None if class_names is None else [str(entry) for entry in class_names]
    return make_dataset(name, train, test, source=path, class_names=names)


def _is_rows(arrays: dict[str, Array], kind: str) -> bool:
    return arrays.get(f"{kind}_train", np.array(0)).ndim > 0


def _array(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    with archive.open(member) as file:
        shape, dtype = _header(file)
        expected = file.tell() + math.prod(shape) * dtype.itemsize
    if dtype.hasobject:
        raise InputError(
            f"{path}: {member.filename}: expected plain numbers or text, got Python objects,"
            " which would be unpickled; save it as a number or str array"
        )
    if expected != member.file_size:
        raise InputError(
            f"{path}: {member.filename}: expected {expected} bytes for shape {shape}"
            f" of {dtype}, got {member.file_size}"
        )
    with archive.open(member) as file:
        array: Array = npy.read_array(file, allow_pickle=False)
    return array


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(file)
    return shape, dtype
