"""Folders of images, one for each class: DIR/train/CLASS/*.png and DIR/test/CLASS/*.png."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from edge_sdk.errors import ConfigurationError, InputError
from edge_sdk.training.data.dataset import Array, Dataset, Part, make_dataset
from edge_sdk.training.data.files import need_folder

IMAGE_BYTES_MAX: Final = 4 << 30
SUFFIXES: Final = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
# Pillow's mode -> ours; 16-bit and float images are refused, because a byte cannot hold them
_MODES: Final = {
    "1": "L", "L": "L", "P": "RGB", "RGB": "RGB", "RGBA": "RGB", "CMYK": "RGB", "YCbCr": "RGB",
}  # fmt: skip


def image_folder(folder: Path | None) -> Dataset:
    """Images of one size, uint8: grey ones (1, h, w), coloured ones (3, h, w) RGB.

    Classes are the folders of DIR/train in order of name, samples the files in order of name.
    Names that begin with a dot are left out.

    Raises: ConfigurationError saying what to put where; InputError naming an image and what is
        wrong with it.
    """
    folder = need_folder("images", folder, "train/CLASS/*.png and test/CLASS/*.png")
    names = _folders(folder / "train")
    strange = sorted(set(_folders(folder / "test")) - set(names))
    if strange:
        raise InputError(
            f"{folder / 'test'}: expected the classes {', '.join(names)} of"
            f" {folder / 'train'}, got also {', '.join(strange)}"
        )
    train_files, test_files = (_files(folder / side, names) for side in ("train", "test"))
    size, mode = _form(train_files[0][0])
    needed = (len(train_files) + len(test_files)) * size[0] * size[1] * len(mode)
    if needed > IMAGE_BYTES_MAX:
        raise InputError(
            f"{folder}: expected images of at most {IMAGE_BYTES_MAX} bytes together, got"
            f" {needed}; make them smaller, or give a Python function (module:function)"
        )
    train, test = (_part(files, size, mode) for files in (train_files, test_files))
    return make_dataset(folder.name, train, test, source=folder, class_names=names)


def _folders(part: Path) -> list[str]:
    if not part.is_dir():
        raise ConfigurationError(
            f"{part}: expected a folder there; put a folder of images for each class in it"
        )
    names = sorted(e.name for e in part.iterdir() if e.is_dir() and not e.name.startswith("."))
    if not names:
        raise ConfigurationError(f"{part}: expected a folder of images for each class, got none")
    return names


def _files(part: Path, names: Sequence[str]) -> list[tuple[Path, int]]:
    found = []
    for label, name in enumerate(names):
        entries = sorted((part / name).iterdir()) if (part / name).is_dir() else []
        for path in entries:
            if path.name.startswith("."):
                continue
            if path.suffix.lower() not in SUFFIXES:
                raise InputError(f"{path}: expected an image ({', '.join(SUFFIXES)}); remove it")
            found.append((path, label))
    if not found:
        raise ConfigurationError(f"{part}: expected images ({', '.join(SUFFIXES)}), got none")
    return found


def _part(files: Sequence[tuple[Path, int]], size: tuple[int, int], mode: str) -> Part:
    width, height = size
    x = np.empty((len(files), len(mode), height, width), np.uint8)  # "L" is 1 channel, "RGB" 3
    for row, (path, _) in enumerate(files):
        x[row] = _pixels(path, size, mode)
    return Part(x, np.array([label for _, label in files], np.int64))


def _pixels(path: Path, size: tuple[int, int], mode: str) -> Array:
    (width, height), got = _form(path)  # from the header, before anything is decoded
    if ((width, height), got) != (size, mode):
        raise InputError(
            f"{path}: expected {size[0]} x {size[1]} {mode} like the first image, got"
            f" {width} x {height} {got}; convert all images to one size and mode"
        )
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert(mode), np.uint8)
    except (OSError, ValueError, SyntaxError) as err:  # Pillow's word for a broken PNG
        raise InputError(f"{path}: cannot be decoded ({err})") from err
    return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)


def _form(path: Path) -> tuple[tuple[int, int], str]:
    try:
        with Image.open(path) as image:
            size, mode = image.size, image.mode
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as err:
        raise InputError(f"{path}: expected an image that Pillow can read ({err})") from err
    if mode not in _MODES:
        raise InputError(f"{path}: expected 8-bit grey or colour, got Pillow's mode {mode}")
    return size, _MODES[mode]
