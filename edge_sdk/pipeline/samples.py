"""Samples of a bundle's input shape, out of what people have: arrays, pictures, files of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from edge_sdk.damage import DAMAGED, reason_of
from edge_sdk.errors import InputError
from edge_sdk.manifest import TensorSpec

if TYPE_CHECKING:
    from PIL.Image import Image

Array = NDArray[Any]

# endings of files of a folder
PICTURE_SUFFIXES: Final = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
SAMPLE_SUFFIXES: Final = (".npy", *PICTURE_SUFFIXES)
# Pillow's modes of 8 bits a value; of any other mode, convert() makes all above 255 white
GREY_MODES: Final = ("1", "L", "LA")
COLOURED_MODES: Final = ("P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV")
# the file beside folders of classes that lists them in the order of their labels
CLASSES_NAME: Final = "classes.txt"


def read_samples(
    file: Path, spec: TensorSpec, changed: Callable[[str], None] = lambda _: None
) -> Iterator[tuple[str, Array]]:
    """The samples in a file, each with a name for the output.

    Args:
        file: a .npy array of one sample or several, where a single channel may lack its axis; or an
            image, which is resized and keeps pixel values 0..255.
        spec: of the bundle's input.
        changed: called with a sentence on a picture that was resized or made grey.
    Raises: InputError naming the file, what was expected and what was got.
    """
    if file.suffix.lower() == ".npy":
        yield from samples_of(str(file), _load_npy(file), spec)
    else:
        yield str(file), _load_image(file, spec, changed)


def samples_of(name: str, array: Array, spec: TensorSpec) -> Iterator[tuple[str, Array]]:
    """The samples in an array, named `name`, or `name[0]`, `name[1]` and so on if there are many.

    Args:
        array: one sample, or many along a first axis; a single channel may lack its axis.
        spec: of the bundle's input.
    Raises: InputError naming `name`, what was expected and what was got.
    """
    shape = spec.shape
    shapes = (shape, shape[1:]) if shape[0] == 1 else (shape,)
    many = array.shape not in shapes
    if many and array.shape[1:] not in shapes:
        expected = f"an array of shape {shape}, or (n, {', '.join(map(str, shape))}) for n samples"
        raise InputError(f"{name}: expected {expected}, got {array.shape}")
    samples = converted(name, array, spec.dtype).reshape(-1, *shape)
    if not len(samples):
        raise InputError(f"{name}: expected at least one sample, got shape {array.shape}")
    for index, sample in enumerate(samples):
        yield (f"{name}[{index}]" if many else name), sample


def converted(name: str, array: Array, dtype: str) -> Array:
    """Numbers as another dtype, each with its value, or rounded to a float.

    Raises: InputError naming `name`, if there is a number that the dtype cannot hold.
    """
    if array.dtype.kind not in "fiu":
        raise InputError(f"{name}: expected numbers as {dtype}, got {array.dtype}")
    # numpy makes float64 of a list and int64 of whole numbers; both are accepted
    with np.errstate(over="ignore", invalid="ignore"):
        numbers: Array = array.astype(dtype)
    if not np.isfinite(array).all() or not np.isfinite(numbers).all():
        raise InputError(f"{name}: expected finite {dtype} values, got NaN, infinity or too large")
    if numbers.dtype.kind != "f" and not np.array_equal(numbers, array):
        raise InputError(
            f"{name}: expected {dtype} values, got {array.dtype} values that {dtype} cannot hold"
        )
    return numbers


def picture_sample(name: str, picture: Image, spec: TensorSpec) -> Array:
    """A picture as a sample: grey or RGB as the bundle has it, resized, pixel values 0..255.

    Args:
        name: of the picture, for errors.
        spec: of the bundle's input: channels first or last.
    Raises: InputError for a bundle that takes no pictures, and for a picture that has not 8 bits a
        value; one of DAMAGED for a picture that cannot be decoded.
    """
    last, channels, height, width = _picture_form(name, spec)
    try:
        rows = picture_pixels(picture, channels, height, width)
    except InputError as err:
        raise InputError(f"{name}: {err}") from err
    planes = rows if last else rows.transpose(2, 0, 1)
    return np.ascontiguousarray(planes).astype(spec.dtype)


def picture_pixels(picture: Image, channels: int, height: int, width: int) -> NDArray[np.uint8]:
    """Pixels (height, width, channels) of a picture, as training and devices make them of it.

    Args:
        channels: 1 for grey, 3 for RGB.
        height, width: the picture is resized to them bilinearly.
    Raises: InputError, without a name, for a picture that has not 8 bits a value; one of DAMAGED
        for a picture that cannot be decoded.
    """
    from PIL import Image  # noqa: PLC0415 - the running agent reads pictures only if told to

    if picture.mode not in (*GREY_MODES, *COLOURED_MODES):
        raise InputError(f"expected 8-bit grey or colour, got Pillow's mode {picture.mode}")
    converted = picture.convert("L" if channels == 1 else "RGB")
    resized = converted.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(resized, np.uint8).reshape(height, width, channels)


def _picture_form(name: str, spec: TensorSpec) -> tuple[bool, int, int, int]:
    """Whether the channels come last, and channels, height and width."""
    last = len(spec.shape) == 3 and spec.shape[0] not in (1, 3)  # channels behind the pixels
    shape = (spec.shape[2], *spec.shape[:2]) if last else spec.shape
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise InputError(
            f"{name}: this bundle takes arrays of shape {spec.shape}, not images; use a .npy file"
        )
    return last, shape[0], shape[1], shape[2]


def _load_npy(file: Path) -> Array:
    try:
        array: Array = np.load(file, allow_pickle=False)
    except DAMAGED as err:
        raise InputError(f"{file}: not a readable .npy file ({reason_of(err)})") from err
    if not isinstance(array, np.ndarray):  # a renamed .npz
        raise InputError(
            f"{file}: expected one array, got {type(array).__name__}; save it with numpy.save"
        )
    return array


def _load_image(file: Path, spec: TensorSpec, changed: Callable[[str], None]) -> Array:
    from PIL import Image  # noqa: PLC0415 - as above

    _, channels, height, width = _picture_form(str(file), spec)  # before the file is opened
    try:
        with Image.open(file) as image:
            sample = picture_sample(str(file), image, spec)
            changes = []
            if image.size != (width, height):
                changes.append(f"resized from {image.width} x {image.height} to {width} x {height}")
            if channels == 1 and image.mode not in ("L", "1"):
                changes.append("made grey")
            if changes:
                changed(f"{file} was {' and '.join(changes)}, as the model takes it")
            return sample
    except InputError:  # a ValueError too
        raise
    except (*DAMAGED, Image.DecompressionBombError) as err:
        raise InputError(f"{file}: not a readable image ({reason_of(err)})") from err
