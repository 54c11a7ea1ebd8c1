"""A folder of pictures of any size: flat and unlabelled, or with a folder for each class.

DIR/*.png                                        unlabelled
DIR/CLASS/*.png                                  labelled
DIR/train/..., DIR/test/...                      with a test part of its own, either of the two

Arrays (.npy), one sample each, may stand in place of pictures: windows of sensors, say.

Labels follow the names of the class folders, or the lines of a file `classes.txt` beside these: it
may also name classes without a folder.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from edge_sdk.damage import DAMAGED, reason_of
from edge_sdk.errors import ConfigurationError, InputError
from edge_sdk.pipeline.samples import (
    CLASSES_NAME,
    COLOURED_MODES,
    PICTURE_SUFFIXES,
    picture_pixels,
)
from edge_sdk.training.data.samples import Array, Part, Samples, checked_samples

logger = logging.getLogger(__name__)

PICTURES_BYTES_MAX: Final = 4 << 30
ARRAY_SUFFIX: Final = ".npy"
# a device that is short of memory shall not train on fewer samples for it
_DAMAGED: Final = (
    *(error for error in DAMAGED if error is not MemoryError),
    Image.DecompressionBombError,
)

Size = tuple[int, int]
Entry = tuple[Path, int]  # a file and its label; -1 without labels


@dataclass(frozen=True, slots=True)
class PictureForm:
    """Form that every picture is brought to: (channels, height, width), 1 channel grey or 3 RGB."""

    channels: int
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class _Decoder:
    """Way from a file to one sample of that shape and type."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[Path], Array]


def read_pictures(
    folder: Path,
    form: PictureForm | None = None,
    *,
    size: Size | None = None,
    most: int | None = None,
) -> Samples:
    """The pictures of a folder as (channels, height, width) uint8, or its arrays as they are.

    Pictures are resized bilinearly. A file that cannot be decoded is left out with a warning that
    names it. Files that are neither pictures nor arrays are passed over.

    Args:
        form: by default grey where all pictures are, else RGB, in the size that all of them have.
        size: height and width, in place of the form's.
        most: files to read of each part, evenly spread.
    Raises: ConfigurationError saying what to put where, or what to resize; InputError where no file
        is left.
    """
    if not folder.is_dir():
        raise ConfigurationError(
            f"{folder}: expected a folder of pictures there, or of a folder for each class"
        )
    sides = {path.name: path for path in _folders(folder)}
    if files := _files(folder) if {"train", "test"} & set(sides) else []:
        raise ConfigurationError(
            f"{folder}: expected pictures here or in train and test, got both, such as"
            f" {files[0].name} and {next(iter({'train', 'test'} & set(sides)))}"
        )
    names: tuple[str, ...]
    if set(sides) == {"train", "test"}:
        names = _classes(sides["train"])
        strange = sorted(set(_classes(sides["test"])) - set(names))
        if strange:
            raise InputError(
                f"{sides['test']}: expected the classes {', '.join(names) or 'none'} of"
                f" {sides['train']}, got also {', '.join(strange)}"
            )
        found = [_entries(sides[side], names, most) for side in ("train", "test")]
    elif set(sides) in ({"train"}, {"test"}):
        missing = next(iter({"train", "test"} - set(sides)))
        raise ConfigurationError(
            f"{folder / missing}: expected a folder there, next to {next(iter(sides))}; or put its"
            f" content into {folder} itself, and it is parted for you"
        )
    else:
        names = _classes(folder)
        found = [_entries(folder, names, most)]
    parts = decoded_parts(folder, found, form, size=size, labelled=bool(names))
    skipped = sum(map(len, found)) - sum(map(len, parts))
    samples = checked_samples(
        folder.resolve().name, parts[0], (*parts, None)[1], source=folder, class_names=names
    )
    return replace(samples, skipped=skipped, what="damaged files")


def decoded_parts(
    folder: Path,
    found: Sequence[Sequence[Entry]],
    form: PictureForm | None = None,
    *,
    size: Size | None = None,
    labelled: bool = True,
    groups: Mapping[Path, int] | None = None,
) -> list[Part]:
    """The files of each part, decoded; what cannot be decoded is left out with a warning.

    Args:
        folder: of the files, for errors.
        found: files and labels of each part.
        form, size: as `read_pictures` takes them.
        groups: by file, the person that it is of; None if unknown.
    Raises: ConfigurationError where pictures have several sizes and none is asked for; InputError
        where no file of a part is left, or all together are too large.
    """
    decoder = _decoder(folder, [path for entries in found for path, _ in entries], form, size)
    needed = sum(map(len, found)) * int(np.prod(decoder.shape)) * decoder.dtype.itemsize
    if needed > PICTURES_BYTES_MAX:
        raise InputError(
            f"{folder}: expected pictures of at most {PICTURES_BYTES_MAX} bytes together, got"
            f" {needed}; make them smaller with --resize, or take fewer"
        )
    parts = []
    for entries in found:
        x = np.empty((len(entries), *decoder.shape), decoder.dtype)
        kept = _fill(x, entries, decoder)
        if not kept:
            raise InputError(f"{folder}: none of {len(entries)} pictures can be decoded")
        labels = np.array([label for _, label in kept], np.int64)
        people = None
        if groups is not None:
            people = np.array([groups[path] for path, _ in kept], np.int64)
        parts.append(Part(x[: len(kept)], labels if labelled else None, people))
    return parts


def files_of(folder: Path) -> list[Path]:
    """Pictures and arrays in a folder, by name."""
    return _files(folder)


def holds_pictures(folder: Path) -> bool:
    """Whether a folder is one that `read_pictures` reads, by the names of its entries."""
    return bool(_files(folder) or any(_files(inner) for inner in _folders(folder))) or any(
        (folder / side).is_dir() for side in ("train", "test")
    )


def _entries(folder: Path, names: Sequence[str], most: int | None) -> list[Entry]:
    """The files of one part with their labels."""
    files = _files(folder)
    if files and names:
        raise ConfigurationError(
            f"{folder}: expected pictures, or a folder of pictures for each class; got both, such"
            f" as {files[0].name} and {names[0]}"
        )
    found = [(path, label) for label, name in enumerate(names) for path in _class(folder, name)]
    found = found or [(path, -1) for path in files]
    if not found:
        raise ConfigurationError(
            f"{folder}: expected pictures ({', '.join(PICTURE_SUFFIXES)}) or a folder of them for"
            " each class, got none"
        )
    if most is not None and len(found) > most:
        found = [found[row] for row in np.linspace(0, len(found) - 1, most).astype(int)]
    return found


def _fill(x: Array, entries: Sequence[Entry], decoder: _Decoder) -> list[Entry]:
    """Decode files into `x`, one after the other without gaps.

    Returns: those that could be decoded.
    """
    kept: list[Entry] = []
    for path, label in entries:
        try:
            x[len(kept)] = decoder.read(path)
        except _DAMAGED as err:
            logger.warning("%s: skipped, cannot be decoded (%s)", path, reason_of(err))
        else:
            kept.append((path, label))
    return kept


def _decoder(
    folder: Path, paths: Sequence[Path], form: PictureForm | None, size: Size | None
) -> _Decoder:
    arrays = [path for path in paths if path.suffix.lower() == ARRAY_SUFFIX]
    if arrays and len(arrays) < len(paths):
        other = next(path for path in paths if path not in arrays)
        raise ConfigurationError(
            f"{folder}: expected pictures or arrays, got both, such as {other} and {arrays[0]}"
        )
    if arrays:
        return _array_decoder(folder, paths)
    if form is None:
        form = _common_form(folder, paths, size)
    elif size is not None:
        form = PictureForm(form.channels, *size)
    shape = (form.channels, form.height, form.width)
    return _Decoder(shape, np.dtype(np.uint8), partial(_pixels, form=form))


def _common_form(folder: Path, paths: Sequence[Path], size: Size | None) -> PictureForm:
    """Grey where all pictures are, else RGB; in `size`, or in the size that all of them have."""
    sizes: dict[Size, Path] = {}
    coloured = False
    for path in paths:
        try:
            with Image.open(path) as image:  # reads the header alone
                width, height = image.size
                coloured |= image.mode in COLOURED_MODES
        except _DAMAGED:
            continue  # named when it is decoded
        sizes.setdefault((height, width), path)
        if size is None and len(sizes) > 1:
            (one, first), (two, second) = sizes.items()
            raise ConfigurationError(
                f"{folder}: expected pictures of one size, got {_size(one)} ({first.name}) and"
                f" {_size(two)} ({second.name}); --resize {_size(one)} brings all to one size"
            )
    if not sizes:
        raise InputError(f"{folder}: none of {len(paths)} pictures can be decoded")
    return PictureForm(3 if coloured else 1, *(next(iter(sizes)) if size is None else size))


def _pixels(path: Path, form: PictureForm) -> Array:
    with Image.open(path) as image:
        pixels = picture_pixels(image, form.channels, form.height, form.width)
    return pixels.transpose(2, 0, 1)


def _array_decoder(folder: Path, paths: Sequence[Path]) -> _Decoder:
    """Arrays of the shape and type of the first that can be read."""
    for path in paths:
        try:
            first = _array(path)
        except _DAMAGED:
            continue  # named when it is decoded
        return _Decoder(first.shape, first.dtype, partial(_array, like=first))
    raise InputError(f"{folder}: none of {len(paths)} arrays can be read")


def _array(path: Path, like: Array | None = None) -> Array:
    # mapped, so a size that the file does not have takes no memory
    array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):  # a renamed .npz
        raise TypeError(f"expected one array, got {type(array).__name__}")
    if like is not None and (array.shape, array.dtype) != (like.shape, like.dtype):
        raise ValueError(
            f"expected {like.dtype} of shape {like.shape} like the first, got {array.dtype} of"
            f" shape {array.shape}"
        )
    return array


def _classes(folder: Path) -> tuple[str, ...]:
    """Names of the classes, in the order of their labels."""
    found = tuple(path.name for path in _folders(folder) if _files(path))
    listed = folder / CLASSES_NAME
    if not listed.is_file():
        return found
    try:  # "-sig", because editors put a byte order mark in front
        lines = listed.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as err:
        raise InputError(f"{listed}: expected text in UTF-8, one class a line ({err})") from err
    names = tuple(line.strip() for line in lines if line.strip())
    strange = sorted(set(found) - set(names))
    if strange or len(set(names)) != len(names):
        wrong = f"none for {', '.join(strange)}" if strange else "a class twice"
        raise InputError(f"{listed}: expected one line for each folder of a class, got {wrong}")
    return names


def _class(folder: Path, name: str) -> list[Path]:
    return _files(folder / name) if (folder / name).is_dir() else []


def _folders(folder: Path) -> list[Path]:
    return sorted(e for e in folder.iterdir() if e.is_dir() and not e.name.startswith("."))


def _files(folder: Path) -> list[Path]:
    known = (*PICTURE_SUFFIXES, ARRAY_SUFFIX)
    return sorted(
        entry
        for entry in folder.iterdir()
        if entry.is_file() and not entry.name.startswith(".") and entry.suffix.lower() in known
    )


def _size(size: Size) -> str:
    return f"{size[0]}x{size[1]}"
