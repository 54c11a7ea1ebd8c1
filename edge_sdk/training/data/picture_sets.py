"""Data sets that are published as folders of pictures: CINIC-10, Tiny ImageNet and Imagenette."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from edge_sdk.errors import ConfigurationError, InputError
from edge_sdk.training.data.cifar import CIFAR10_CLASSES
from edge_sdk.training.data.files import find
from edge_sdk.training.data.pictures import Entry, Size, decoded_parts, files_of
from edge_sdk.training.data.samples import Samples, checked_samples

T = TypeVar("T")

# by the name of its folder
IMAGENETTE_CLASSES: Final = {
    "n01440764": "tench",
    "n02102040": "English springer",
    "n02979186": "cassette player",
    "n03000684": "chain saw",
    "n03028079": "church",
    "n03394916": "French horn",
    "n03417042": "garbage truck",
    "n03425413": "gas pump",
    "n03445777": "golf ball",
    "n03888257": "parachute",
}
_SIDE: Final = 32  # of CINIC-10's pictures
_TINY_SIDE: Final = 64
_IMAGENETTE_SIDE: Final = 64  # ours: the published sides are 160, 320 and more


def cinic10(folder: Path) -> Samples:
    """90,000 + 90,000 RGB pictures of 32 x 32 in 10 classes, uint8, from `train` and `test`.

    The published `valid` is not read: held-out samples are taken from the training part, by the
    rule of all data.

    Raises: ConfigurationError saying what to put where; InputError where nothing can be decoded.
    """
    remedy = "put the published folders train and test in it, with a folder for each class"
    found = [
        _in_classes(_folder(folder, side, remedy), CIFAR10_CLASSES, remedy)
        for side in ("train", "test")
    ]
    return _samples("cinic-10", folder, found, CIFAR10_CLASSES, (_SIDE, _SIDE))


def tiny_imagenet(folder: Path) -> Samples:
    """100,000 + 10,000 RGB pictures of 64 x 64 in 200 classes, uint8.

    `wnids.txt` (a class a line), `train/CLASS/images/*.JPEG`, `val/images/*.JPEG` and
    `val/val_annotations.txt`, in `folder` or in the `tiny-imagenet-200` in it. The published test
    pictures have no labels, so the validation pictures are the test part. Labels are in the order
    of `wnids.txt`.

    Raises: ConfigurationError saying what to put where; InputError naming a file that is not sound.
    """
    root = _inner(folder, ("tiny-imagenet-200",))
    remedy = "put the content of the published tiny-imagenet-200.zip in it"
    listed = find(root, ("wnids.txt",), remedy)
    names = tuple(line for line in _lines(listed) if line)
    if not names or len(set(names)) != len(names):
        raise InputError(f"{listed}: expected different classes, one a line, got {len(names)}")
    train = _folder(root, "train", remedy)
    labelled = [
        (path, label)
        for label, name in enumerate(names)
        for path in files_of(_folder(train, f"{name}/images", remedy))
    ]
    pictures = _folder(root, "val/images", remedy)
    annotations = find(root / "val", ("val_annotations.txt",), remedy)
    places = {name: label for label, name in enumerate(names)}
    tested = []
    for number, line in enumerate(_lines(annotations), start=1):
        name, _, rest = line.partition("\t")
        known = places.get(rest.partition("\t")[0])
        if known is None:
            raise InputError(
                f"{annotations}: line {number}: expected a picture and a class of {listed.name},"
                f" with tabs between, got {line[:60]!r}"
            )
        tested.append((pictures / name, known))
    found = [_some(root, labelled, remedy), _some(root, tested, remedy)]
    return _samples("tiny-imagenet", root, found, names, (_TINY_SIDE, _TINY_SIDE))


def imagenette(folder: Path, size: Size | None = None) -> Samples:
    """9,469 + 3,925 RGB pictures in 10 classes, uint8, from `train` and `val`.

    In `folder` or in the `imagenette2`, `imagenette2-160` or `imagenette2-320` in it.

    Args:
        size: height and width that every picture is brought to; 64 x 64 where None (ours).
    Raises: ConfigurationError saying what to put where; InputError where nothing can be decoded.
    """
    root = _inner(folder, ("imagenette2-160", "imagenette2-320", "imagenette2"))
    remedy = "put the published folders train and val in it, with a folder for each class"
    found = [
        _in_classes(_folder(root, side, remedy), tuple(IMAGENETTE_CLASSES), remedy)
        for side in ("train", "val")
    ]
    names = tuple(IMAGENETTE_CLASSES.values())
    return _samples("imagenette", root, found, names, size or (_IMAGENETTE_SIDE,) * 2)


def _samples(
    name: str, folder: Path, found: Sequence[Sequence[Entry]], names: Sequence[str], size: Size
) -> Samples:
    train, test = decoded_parts(folder, found, size=size)
    samples = checked_samples(name, train, test, source=folder, class_names=names)
    skipped = sum(map(len, found)) - len(train) - len(test)
    return replace(samples, skipped=skipped, what="damaged files")


def _in_classes(folder: Path, names: Sequence[str], remedy: str) -> list[Entry]:
    """The pictures of a folder for each class, with their labels."""
    return [
        (path, label)
        for label, name in enumerate(names)
        for path in _some(folder / name, files_of(_folder(folder, name, remedy)), remedy)
    ]


def _some(folder: Path, found: list[T], remedy: str) -> list[T]:
    if not found:
        raise ConfigurationError(f"{folder}: expected pictures there, found none; {remedy}")
    return found


def _folder(folder: Path, name: str, remedy: str) -> Path:
    if not (folder / name).is_dir():
        raise ConfigurationError(f"{folder}: expected the folder {name}, found none; {remedy}")
    return folder / name


def _inner(folder: Path, names: Sequence[str]) -> Path:
    """The first of the folders that an archive makes; the folder itself where there is none."""
    return next((folder / name for name in names if (folder / name).is_dir()), folder)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as err:
        raise InputError(f"{path}: expected text in UTF-8 ({err})") from err
