"""Samples with or without labels, named by one word, and parted by one rule.

    digits                          of scikit-learn
    fashion-mnist=DIR, cifar-10=DIR, cifar-100=DIR, uci-har=DIR
                                    the published files in DIR
    DIR                             pictures, flat or a folder for each class
    FILE.npz                        x_train, and perhaps y_train, x_test, y_test, class_names
    module:function                 returns x_train, y_train, x_test, y_test; y and the test part
                                    may be None

The rule of the parts: `test` is the data's own test part, else a fifth of all samples; `held_out`
is a fifth of the rest, at most 4,000; `train` is what is left. Rows are drawn by the seed. What
chooses a threshold sees `held_out`; figures are of `test`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from edge_sdk.errors import ConfigurationError, InputError
from edge_sdk.installation import names_function
from edge_sdk.training.data.arrays import read_npz
from edge_sdk.training.data.dataset import Array, Dataset
from edge_sdk.training.data.load import load_dataset
from edge_sdk.training.data.pictures import PictureForm, Pictures, read_pictures
from edge_sdk.training.data.user import call_function

PUBLISHED: Final = ("fashion-mnist", "cifar-10", "cifar-100", "uci-har", "images")
GRAMMAR: Final = (
    "digits, fashion-mnist=DIR, cifar-10=DIR, cifar-100=DIR, uci-har=DIR, a folder of pictures,"
    " FILE.npz or module:function"
)
TEST_SHARE: Final = 0.2
HELD_OUT_SHARE: Final = 0.2
HELD_OUT_MOST: Final = 4000
LEAST: Final = 6
_SPLIT_STREAM: Final = 0x5350  # keeps the split apart from other draws of the same seed


@dataclass(frozen=True, slots=True)
class Part:
    """Samples (n, ...), and their labels (n,) int64 where there are any."""

    x: Array
    y: Array | None

    def __len__(self) -> int:
        return len(self.x)

    def rows(self, picked: Array) -> Part:
        """Some of the samples."""
        return Part(self.x[picked], None if self.y is None else self.y[picked])


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples that a word of the grammar names.

    Attributes:
        train: all samples, or the training part. test: the data's own test part.
        class_names: in label order; empty where the data name none.
        skipped: files that could not be read.
    """

    name: str
    train: Part
    test: Part | None
    class_names: tuple[str, ...] = ()
    skipped: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Parts:
    """Samples after the split; no sample is in two parts."""

    train: Part
    held_out: Part
    test: Part


def read_samples(word: str, *, form: PictureForm | None = None, most: int | None = None) -> Samples:
    """The samples that a word of the grammar names.

    Args:
        word: see the module; `module:function` runs code of this machine.
        form: what pictures of a folder are brought to; without it a folder is refused.
        most: samples to read of each part of a folder.
    Raises: ConfigurationError naming the grammar, or what to put where; InputError naming the file
        or array that is not sound.
    """
    name, _, folder = word.partition("=")
    if name in PUBLISHED and folder:
        return _labelled(load_dataset(name, Path(folder)))
    if word == "digits":
        return _labelled(load_dataset(word))
    if word in PUBLISHED:
        raise ConfigurationError(f"data {word}: say where its files are: {word}=DIR")
    if word.endswith(".npz"):
        return _from_npz(Path(word))
    if Path(word).is_dir():
        return _from_folder(Path(word), form, most)
    if names_function(word):
        return _from_function(word)
    raise ConfigurationError(f"data {word!r}: expected {GRAMMAR}; no folder has that name")


def split_samples(samples: Samples, *, seed: int, most: int | None = None) -> Parts:
    """The three parts, drawn by the seed.

    Args:
        most: samples for training and held-out together, drawn by the seed.
    Raises: InputError for fewer than six samples.
    """
    random = np.random.default_rng([seed, _SPLIT_STREAM])
    rows = random.permutation(len(samples.train))
    test = samples.test
    if len(rows) < LEAST:
        raise InputError(f"{samples.name}: expected at least {LEAST} samples, got {len(rows)}")
    if test is None:
        count = max(1, round(TEST_SHARE * len(rows)))
        test, rows = samples.train.rows(np.sort(rows[:count])), rows[count:]
    if most is not None:
        rows = rows[:most]
    held_out = min(max(1, round(HELD_OUT_SHARE * len(rows))), HELD_OUT_MOST)
    return Parts(
        train=samples.train.rows(np.sort(rows[held_out:])),
        held_out=samples.train.rows(np.sort(rows[:held_out])),
        test=test,
    )


def _labelled(data: Dataset) -> Samples:
    train, test = Part(data.x_train, data.y_train), Part(data.x_test, data.y_test)
    return Samples(data.name, train, test, data.class_names)


def _from_folder(folder: Path, form: PictureForm | None, most: int | None) -> Samples:
    if form is None:
        raise ConfigurationError(
            f"{folder}: holds pictures, and this model takes none: its input is no (channels,"
            " height, width) of 1 or 3 channels; give FILE.npz or module:function"
        )
    train, test, names = read_pictures(folder, form, most=most)
    skipped = (*train.damaged, *(() if test is None else test.damaged))
    return Samples(folder.name, _of(train), None if test is None else _of(test), names, skipped)


def _of(pictures: Pictures) -> Part:
    return Part(pictures.x, pictures.y)


def _from_npz(path: Path) -> Samples:
    if not path.is_file():
        raise ConfigurationError(
            f"{path}: expected a file there, with the array x_train and perhaps y_train, x_test,"
            " y_test and class_names (numpy.savez)"
        )
    arrays = read_npz(path)
    names = arrays.get("class_names")
    if names is not None and (names.ndim != 1 or names.dtype.kind != "U"):
        raise InputError(f"{path}: class_names: expected a row of text, got {names.dtype}")
    return _from_arrays(
        str(path),
        path.stem,
        tuple(arrays.get(key) for key in ("x_train", "y_train", "x_test", "y_test")),
        () if names is None else tuple(map(str, names)),
    )


def _from_function(word: str) -> Samples:
    result = call_function(word, None)
    if not isinstance(result, tuple | list) or len(result) not in (1, 2, 4):
        raise InputError(
            f"data {word!r}: expected x_train, y_train, x_test, y_test (or the first two, or the"
            f" first), got {type(result).__name__}"
        )
    arrays = [None if entry is None else np.asarray(entry) for entry in result]
    return _from_arrays(f"data {word!r}", word, (*arrays, None, None, None)[:4], ())


def _from_arrays(
    source: str, name: str, arrays: tuple[Array | None, ...], class_names: tuple[str, ...]
) -> Samples:
    x_train, y_train, x_test, y_test = arrays
    if x_train is None:
        raise InputError(f"{source}: expected the array x_train, got none")
    train = _part(source, "train", x_train, y_train)
    test = None if x_test is None else _part(source, "test", x_test, y_test)
    if test is not None and test.x.shape[1:] != train.x.shape[1:]:
        raise InputError(
            f"{source}: expected samples of one shape, got {train.x.shape[1:]} in x_train and"
            f" {test.x.shape[1:]} in x_test"
        )
    return Samples(name, train, test, class_names)


def _part(source: str, side: str, x: Array, y: Array | None) -> Part:
    if x.ndim < 2 or not len(x) or x.dtype.kind not in "biuf":
        raise InputError(
            f"{source}: x_{side}: expected numbers of shape (samples, ...), at least one sample,"
            f" got {x.dtype} of shape {x.shape}"
        )
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise InputError(f"{source}: x_{side}: expected finite values, got NaN or infinity")
    if y is None:
        return Part(x, None)
    if y.shape != (len(x),) or y.dtype.kind not in "iu" or y.min() < 0:
        raise InputError(
            f"{source}: y_{side}: expected whole numbers from 0 on of shape ({len(x)},), got"
            f" {y.dtype} of shape {y.shape}"
        )
    return Part(x, y.astype(np.int64))
