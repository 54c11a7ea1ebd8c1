"""A folder of pictures of any size: flat and unlabelled, or with a folder for each class.

DIR/*.png                                        unlabelled
DIR/CLASS/*.png                                  labelled
DIR/train/..., DIR/test/...                      with a test part of its own, either of the two
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from edge_sdk.errors import ConfigurationError, InputError
from edge_sdk.training.data.dataset import Array
from edge_sdk.training.data.images import IMAGE_BYTES_MAX, SUFFIXES

logger = logging.getLogger(__name__)

# what Pillow raises for damaged files of the formats it reads
_DAMAGED: Final = (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)


@dataclass(frozen=True, slots=True)
class PictureForm:
    """Form that every picture is brought to: (channels, height, width), 1 channel grey or 3 RGB."""

    channels: int
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class Pictures:
    """The pictures of one part.

    Attributes:
        x: (n, channels, height, width) uint8.
        y: (n,) int64, or None where they are unlabelled.
        damaged: files that could not be decoded.
    """

    x: Array
    y: Array | None
    damaged: tuple[Path, ...]


def read_pictures(
    folder: Path, form: PictureForm, *, most: int | None = None
) -> tuple[Pictures, Pictures | None, tuple[str, ...]]:
    """The pictures of a folder: all or the training part, its test part, the names of the classes.

    Pictures are resized bilinearly to the form. A picture that cannot be decoded is left out with
    a warning that names it.

    Args:
        most: pictures to read of each part, evenly spread.
    Raises: ConfigurationError saying what to put where; InputError where no picture is left.
    """
    if not folder.is_dir():
        raise ConfigurationError(
            f"{folder}: expected a folder of pictures there, or of a folder for each class"
        )
    sides = {path.name: path for path in _folders(folder)}
    if set(sides) == {"train", "test"} and not _files(folder):
        names = _classes(sides["train"])
        strange = sorted(set(_classes(sides["test"])) - set(names))
        if strange:
            raise InputError(
                f"{sides['test']}: expected the classes {', '.join(names) or 'none'} of"
                f" {sides['train']}, got also {', '.join(strange)}"
            )
        train, test = (_part(sides[side], names, form, most) for side in ("train", "test"))
        return train, test, names
    names = _classes(folder)
    return _part(folder, names, form, most), None, names


def _part(folder: Path, names: Sequence[str], form: PictureForm, most: int | None) -> Pictures:
    files = _files(folder)
    if files and names:
        raise ConfigurationError(
            f"{folder}: expected pictures, or a folder of pictures for each class; got both, such"
            f" as {files[0].name} and {names[0]}"
        )
    found = [(path, label) for label, name in enumerate(names) for path in _files(folder / name)]
    found = found or [(path, -1) for path in files]
    if not found:
        raise ConfigurationError(
            f"{folder}: expected pictures ({', '.join(SUFFIXES)}) or a folder of them for each"
            " class, got none; an IDX data set is named fashion-mnist=DIR"
        )
    if most is not None and len(found) > most:
        found = [found[row] for row in np.linspace(0, len(found) - 1, most).astype(int)]
    needed = len(found) * form.channels * form.height * form.width
    if needed > IMAGE_BYTES_MAX:
        raise InputError(
            f"{folder}: expected pictures of at most {IMAGE_BYTES_MAX} bytes together, got"
            f" {needed}; take fewer with --samples"
        )
    x = np.empty((len(found), form.channels, form.height, form.width), np.uint8)
    labels: list[int] = []
    damaged: list[Path] = []
    for path, label in found:
        try:
            x[len(labels)] = _pixels(path, form)
        except _DAMAGED as err:
            logger.warning("%s: skipped, cannot be decoded (%s)", path, _said(err))
            damaged.append(path)
        else:
            labels.append(label)
    if not labels:
        raise InputError(f"{folder}: none of {len(found)} pictures can be decoded")
    y = np.array(labels, np.int64) if names else None
    return Pictures(x[: len(labels)], y, tuple(damaged))


def _pixels(path: Path, form: PictureForm) -> Array:
    with Image.open(path) as image:
        converted = image.convert("L" if form.channels == 1 else "RGB")
        if converted.size != (form.width, form.height):
            size = (form.width, form.height)
            converted = converted.resize(size, Image.Resampling.BILINEAR)
        pixels = np.asarray(converted, np.uint8)
    return pixels[None] if form.channels == 1 else pixels.transpose(2, 0, 1)


def _classes(folder: Path) -> tuple[str, ...]:
    return tuple(path.name for path in _folders(folder) if _files(path))


def _folders(folder: Path) -> list[Path]:
    return sorted(e for e in folder.iterdir() if e.is_dir() and not e.name.startswith("."))


def _files(folder: Path) -> list[Path]:
    return sorted(
        entry
        for entry in folder.iterdir()
        if entry.is_file() and not entry.name.startswith(".") and entry.suffix.lower() in SUFFIXES
    )


def _said(err: BaseException) -> str:
    return " ".join((str(err) or type(err).__name__).split())[:200]
