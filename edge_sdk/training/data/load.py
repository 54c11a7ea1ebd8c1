"""One grammar for data, `DATA`: a word names samples on this machine; nothing is downloaded.

    digits                               of scikit-learn
    fashion-mnist=DIR, cifar-10=DIR, cifar-100=DIR, emnist=DIR, uci-har=DIR, cinic-10=DIR,
    tiny-imagenet=DIR, imagenette=DIR, isic=DIR, ham10000=DIR
                                         the published files in DIR
    DIR                                  pictures, flat (no labels) or a folder for each class
    FILE.npz                             x_train, and perhaps y_train, x_test, y_test, class_names
    csv:FILE?window=128&label=NAME       windows of rows of numbers
    module:function                      returns x_train, y_train, x_test, y_test

docs/data.md has the whole grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np

from edge_sdk.errors import ConfigurationError
from edge_sdk.installation import names_function
from edge_sdk.pipeline.words import read_word
from edge_sdk.training.data.arrays import npz
from edge_sdk.training.data.cifar import cifar10, cifar100
from edge_sdk.training.data.dataset import Dataset, labelled_dataset
from edge_sdk.training.data.har import uci_har
from edge_sdk.training.data.idx import FASHION_CLASSES, emnist, fashion_mnist, read_idx
from edge_sdk.training.data.picture_sets import cinic10, imagenette, tiny_imagenet
from edge_sdk.training.data.pictures import PictureForm, Size, holds_pictures, read_pictures
from edge_sdk.training.data.samples import Array, Part, Samples, checked_samples
from edge_sdk.training.data.skin import ham10000, isic
from edge_sdk.training.data.split import HELD_OUT_SHARE, SEED, Parts, split_samples
from edge_sdk.training.data.table import TABLE_KEYS, read_table
from edge_sdk.training.data.user import from_function

__all__ = [
    "FASHION_CLASSES",
    "HELD_OUT_SHARE",
    "OF_PICTURES",
    "PUBLISHED",
    "SEED",
    "Array",
    "Dataset",
    "Part",
    "Parts",
    "Samples",
    "data_word",
    "described",
    "labelled_dataset",
    "load_dataset",
    "open_data",
    "picture_size",
    "read_idx",
    "split_samples",
    "with_resize",
]  # fmt: skip

# published data sets in files, and what to put into their folder
PUBLISHED: Final[Mapping[str, tuple[Callable[[Path], Samples], str]]] = {
    "fashion-mnist": (fashion_mnist, "the four IDX files"),
    "cifar-10": (cifar10, "the six batches of the binary version"),
    "cifar-100": (cifar100, "the two files of the binary version"),
    "emnist": (emnist, "the IDX files of a split and its mapping"),
    "uci-har": (uci_har, "uci_har.npz or the folder 'UCI HAR Dataset'"),
    "cinic-10": (cinic10, "the folders train and test"),
    "tiny-imagenet": (tiny_imagenet, "the content of tiny-imagenet-200.zip"),
    "imagenette": (imagenette, "the folders train and val"),
    "isic": (isic, "the table and the folder of the training part of ISIC 2019"),
    "ham10000": (ham10000, "HAM10000_metadata.csv and the folders of its pictures"),
}
# published pictures of many sizes, which `?resize=HxW` brings to one
_RESIZED: Final[Mapping[str, Callable[[Path, Size | None], Samples]]] = {
    "imagenette": imagenette,
    "isic": isic,
    "ham10000": ham10000,
}
# published sets whose files are folders of pictures themselves
OF_PICTURES: Final = frozenset({"cinic-10", "tiny-imagenet", *_RESIZED})
SIDE_MAX: Final = 10_000
GRAMMAR: Final = (
    f"digits, {', '.join(f'{name}=DIR' for name in PUBLISHED)}, a folder of pictures, FILE.npz,"
    " csv:FILE?window=ROWS or module:function"
)


def open_data(
    text: str,
    *,
    form: PictureForm | None = None,
    most: int | None = None,
    folder: Path | None = None,
) -> Samples:
    """The samples that a word of the grammar names.

    Args:
        text: see the module. `module:function` runs code of this machine: never pass a word that a
            peer sent.
        form: form of pictures, where a model settles it.
        most: files to read of each part of a folder.
        folder: searched for a user's module; the current one if None.
    Raises: ConfigurationError naming the grammar, or what to put where; InputError naming the file
        or array that is not sound.
    """
    name = text.partition("=")[0]
    # a name goes before a folder of that name, which can be given as ./digits
    for known, read in (
        (text == "digits", _digits),
        (name in PUBLISHED, lambda: _published(text, name)),
        (text.startswith("csv:"), lambda: read_table(read_word(text, TABLE_KEYS))),
        (_folder_of(text) is not None, lambda: _from_folder(text, form, most)),
        (text.endswith(".npz"), lambda: npz(Path(text))),
        (names_function(text), lambda: from_function(text, folder)),
    ):
        if known:
            return read()
    raise ConfigurationError(f"data {text!r}: expected {GRAMMAR}; there is no folder of that name")


def with_resize(text: str, resize: str | None) -> str:
    """The word with the size that pictures of its folder are brought to.

    Args:
        resize: HEIGHTxWIDTH; None leaves the word as it is.
    Raises: ConfigurationError for a size that is none, or a word that names no folder.
    """
    if resize is None:
        return text
    picture_size(resize)
    if not Path(text).is_dir():
        raise ConfigurationError(f"--resize: expected a folder of pictures as data, got {text!r}")
    return f"{text}?resize={resize}"


def picture_size(text: str) -> tuple[int, int]:
    """Height and width of HEIGHTxWIDTH; a single number stands for both.

    Raises: ConfigurationError.
    """
    sizes = text.lower().split("x")
    if len(sizes) not in (1, 2) or not all(s.isascii() and s.isdecimal() for s in sizes):
        raise ConfigurationError(
            f"--resize: expected HEIGHTxWIDTH in pixels, 48x192 say, got {text or 'nothing'}"
        )
    height, width = int(sizes[0]), int(sizes[-1])
    if not (0 < height <= SIDE_MAX and 0 < width <= SIDE_MAX):
        raise ConfigurationError(f"--resize: expected 1 to {SIDE_MAX} pixels a side, got {text}")
    return height, width


def load_dataset(name: str, folder: Path | None = None, *, held_out: float = 0.0) -> Dataset:
    """The labelled data set of a name and a folder, as recipes of the first version write it.

    Args:
        name: a word of the grammar; of a published set without its folder; `images` for a folder
            of pictures; or a file NAME.npz in `folder`.
        held_out: share of the training part that is held out of it.
    Raises: as `open_data` and `labelled_dataset`.
    """
    samples = open_data(data_word(name, folder), folder=folder)
    return labelled_dataset(samples, held_out=held_out)


def data_word(name: str, folder: Path | None) -> str:
    """The word of the grammar that a name and a folder stand for.

    Raises: ConfigurationError where `images` comes without a folder.
    """
    if name == "images":
        if folder is None:
            raise ConfigurationError("images: expected a folder of pictures; name it with --data")
        return str(folder)
    if folder is None:
        return name
    if name in PUBLISHED:
        return f"{name}={folder}"
    return str(folder / name) if name.endswith(".npz") else name


def described(samples: Samples, parts: Mapping[str, int]) -> str:
    """One line about what was read.

    Args:
        parts: number of samples by part.
    """
    shape = " x ".join(map(str, samples.train.x.shape[1:]))
    classes = f" in {samples.classes} classes" if samples.classes else " without labels"
    each = ", ".join(f"{count:,} {side.replace('_', '-')}" for side, count in parts.items())
    skipped = f"; {samples.skipped:,} skipped ({samples.what})" if samples.skipped else ""
    total = sum(parts.values())
    return (
        f"{samples.name}: {total:,} samples of {shape} {samples.train.x.dtype}{classes}:"
        f" {each}{skipped}"
    )


def _published(text: str, name: str) -> Samples:
    read, content = PUBLISHED[name]
    known = ("split",) if name == "emnist" else ("resize",) if name in _RESIZED else ()
    options = read_word(text, known).options
    place = text.removeprefix(name).removeprefix("=").partition("?")[0]
    if not place:
        raise ConfigurationError(
            f"{name}: expected a folder with {content}; name it: --data {name}=DIR"
        )
    if not Path(place).is_dir():
        raise ConfigurationError(f"{place}: expected a folder there with {content} of {name}")
    if name in _RESIZED:
        size = picture_size(options["resize"]) if "resize" in options else None
        return _RESIZED[name](Path(place), size)
    return emnist(Path(place), **options) if name == "emnist" else read(Path(place))


def _folder_of(text: str) -> Path | None:
    """The folder that a word names, with options or without; None where it names none."""
    places = (text, text.partition("?")[0])
    return next((Path(place) for place in places if place and Path(place).is_dir()), None)


def _from_folder(text: str, form: PictureForm | None, most: int | None) -> Samples:
    folder = _folder_of(text)
    assert folder is not None
    size = None
    if str(folder) != str(Path(text)):
        size = picture_size(read_word(text, ("resize",)).options.get("resize", ""))
    if any(folder.glob("train-images-idx3-ubyte*")) and not holds_pictures(folder):
        if size is not None:
            raise ConfigurationError(f"{folder}: holds IDX files, which --resize does not resize")
        return fashion_mnist(folder)
    return read_pictures(folder, form, size=size, most=most)


def _digits() -> Samples:
    # scikit-learn ships 1,797 handwritten digits, 8x8, 0..16; every fifth is for test. Its file is
    # read without it: to import sklearn.datasets takes a second of a processor
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    rows = np.loadtxt(file, delimiter=",", dtype=np.float32)  # 64 pixels and the label
    x = rows[:, :-1].reshape(-1, 1, 8, 8)
    y = rows[:, -1].astype(np.int64)
    test = np.arange(len(x)) % 5 == 4
    return checked_samples(
        "digits",
        Part(x[~test], y[~test]),
        Part(x[test], y[test]),
        source="digits",
        class_names=tuple("0123456789"),
    )
