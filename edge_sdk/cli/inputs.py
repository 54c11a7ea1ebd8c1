"""Reads the files of `splitedge agent predict` as samples of a bundle's input shape."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from tokenize import TokenError
from typing import Final

import numpy as np

from edge_sdk.errors import InputError
from edge_sdk.manifest import TensorSpec
from edge_sdk.session import Array

# errors that numpy and Pillow raise for a damaged file
DAMAGED: Final = (OSError, ValueError, EOFError, MemoryError, SyntaxError, TokenError)
DAMAGED_IMAGE: Final = (*DAMAGED, struct.error, zlib.error, IndexError, TypeError, OverflowError)


def read_samples(file: Path, spec: TensorSpec) -> Iterator[tuple[str, Array]]:
    """The samples in a file, each with a name for the output.

    Args:
        file: a .npy array of one sample or several, where a single channel may lack its axis; or an
            image, which is resized and keeps pixel values 0..255.
        spec: of the bundle's input.
    Raises: InputError naming the file, what was expected and what was got.
    """
    if file.suffix == ".npy":
        yield from _from_array(file, _load_npy(file), spec)
    else:
        yield str(file), _load_image(file, spec)


def _from_array(file: Path, array: Array, spec: TensorSpec) -> Iterator[tuple[str, Array]]:
    shape = spec.shape
    shapes = (shape, shape[1:]) if shape[0] == 1 else (shape,)
    many = array.shape not in shapes
    if many and array.shape[1:] not in shapes:
        expected = f"an array of shape {shape}, or (n, {', '.join(map(str, shape))}) for n samples"
        raise InputError(f"{file}: expected {expected}, got {array.shape}")
    samples = _converted(file, array, spec.dtype).reshape(-1, *shape)
    if not len(samples):
        raise InputError(f"{file}: expected at least one sample, got shape {array.shape}")
    for index, sample in enumerate(samples):
        yield (f"{file}[{index}]" if many else str(file)), sample


def _converted(file: Path, array: Array, dtype: str) -> Array:
    if array.dtype.kind not in "fiu":
        raise InputError(f"{file}: expected numbers as {dtype}, got {array.dtype}")
    # numpy makes float64 of a list and int64 of whole numbers; both are accepted
    with np.errstate(over="ignore", invalid="ignore"):
        converted: Array = array.astype(dtype)
    if not np.isfinite(array).all() or not np.isfinite(converted).all():
        raise InputError(f"{file}: expected finite {dtype} values, got NaN, infinity or too large")
    if converted.dtype.kind != "f" and not np.array_equal(converted, array):
        raise InputError(
            f"{file}: expected {dtype} values, got {array.dtype} values that {dtype} cannot hold"
        )
    return converted


def _load_npy(file: Path) -> Array:
    try:
        array: Array = np.load(file, allow_pickle=False)
    except DAMAGED as err:
        raise InputError(f"{file}: not a readable .npy file ({_reason(err)})") from err
    if not isinstance(array, np.ndarray):  # a renamed .npz
        raise InputError(
            f"{file}: expected one array, got {type(array).__name__}; save it with numpy.save"
        )
    return array


def _load_image(file: Path, spec: TensorSpec) -> Array:
    from PIL import Image

    last = len(spec.shape) == 3 and spec.shape[0] not in (1, 3)  # channels behind the pixels
    shape = (spec.shape[2], *spec.shape[:2]) if last else spec.shape
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise InputError(
            f"{file}: this bundle takes arrays of shape {spec.shape}, not images; use a .npy file"
        )
    channels, height, width = shape
    try:
        with Image.open(file) as image:
            converted = image.convert("L" if channels == 1 else "RGB")
            pixels = np.asarray(converted.resize((width, height), Image.Resampling.BILINEAR))
    except (*DAMAGED_IMAGE, Image.DecompressionBombError) as err:
        raise InputError(f"{file}: not a readable image ({_reason(err)})") from err
    rows = pixels[..., None] if channels == 1 else pixels
    planes = rows if last else rows.transpose(2, 0, 1)
    return np.ascontiguousarray(planes).astype(spec.dtype)


def _reason(err: BaseException) -> str:
    text = getattr(err, "strerror", None) or str(err) or type(err).__name__
    return " ".join(text.split())[:200]
