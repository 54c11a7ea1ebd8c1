"""Samples in .npz files; nothing in them is unpickled."""

from __future__ import annotations

import math
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.lib import format as npy

from edge_sdk.damage import DAMAGED, reason_of
from edge_sdk.errors import ConfigurationError, InputError
from edge_sdk.training.data.samples import Array, Part, Samples, checked_samples

ARRAY_BYTES_MAX: Final = 8 << 30


def npz(path: Path) -> Samples:
    """Samples of the array `x_train`, and of `y_train`, `x_test` and `y_test` where they are there.

    The file may hold `class_names`, `group_train` and `group_test` too.

    Raises: ConfigurationError if the file is missing; InputError naming it, the array and what is
        wrong with it.
    """
    if not path.is_file():
        raise ConfigurationError(
            f"{path}: expected a file there; put it in {path.parent}, with the array x_train and"
            " perhaps y_train, x_test, y_test and class_names (numpy.savez)"
        )
    return replace(samples_of(path.stem, path, read_npz(path), group="group"), source=str(path))


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
    except DAMAGED as err:
        if isinstance(err, InputError):
            raise
        raise InputError(f"{path}: cannot be read as .npz ({reason_of(err)})") from err


def samples_of(name: str, path: Path, arrays: dict[str, Array], group: str) -> Samples:
    """Samples of the arrays of an .npz file.

    Args:
        group: prefix of the arrays that name the person of each sample, as `group_train`.

    Raises: InputError naming the file, the array and what is wrong with it.
    """
    if "x_train" not in arrays:
        raise InputError(
            f"{path}: expected the array x_train, and perhaps y_train, x_test and y_test, got"
            f" {', '.join(arrays) or 'none'}"
        )
    if "y_test" in arrays and "x_test" not in arrays:
        raise InputError(f"{path}: expected the array x_test next to y_test, got none")
    train, test = (
        Part(arrays[f"x_{side}"], arrays.get(f"y_{side}"), arrays.get(f"{group}_{side}"))
        if f"x_{side}" in arrays
        else None
        for side in ("train", "test")
    )
    assert train is not None
    class_names = arrays.get("class_names")
    if class_names is not None and (class_names.ndim != 1 or class_names.dtype.kind != "U"):
        raise InputError(
            f"{path}: class_names: expected a row of text,"
            f" got {class_names.dtype} of shape {class_names.shape}"
        )
    names = () if class_names is None else [str(entry) for entry in class_names]
    return checked_samples(name, train, test, source=path, class_names=names)


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
