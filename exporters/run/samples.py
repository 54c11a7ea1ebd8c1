"""The samples of an export: held-out ones choose, test samples give figures."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_sdk.errors import ConfigurationError, InputError
from edge_sdk.pipeline.samples import CLASSES_NAME
from edge_sdk.training.data.dataset import Dataset, labelled_dataset
from edge_sdk.training.data.load import HELD_OUT_SHARE, open_data
from edge_sdk.training.data.pictures import PictureForm
from edge_sdk.training.data.samples import Samples
from edge_sdk.training.data.split import split_samples
from exporters.errors import ExportError
from exporters.run.record import RunRecord

Array = NDArray[Any]


def run_samples(record: RunRecord, data: str | None) -> Dataset:
    """The data of a run in the three parts that it was trained and tested on.

    Args:
        data: a word for other samples, which no client trained on; None for the run's own data.
    Raises: ExportError if there are none, or none that no client trained on, or for other classes.
    """
    used = record.data
    if data is None and not used.chooses:
        why = "held none out ([data] held_out = 0)"
        if used.split == "local":
            why = 'split each client\'s data by itself (split = "local")'
        raise ExportError(
            "--data: expected samples that no client trained on, to choose the gate's threshold"
            f" by, because this run {why}"
        )
    word = used.source if data is None else data
    try:
        if data is not None:
            samples = open_data(word, form=_form(record))
            _check_classes(record, word, samples)
            found = labelled_dataset(samples)
        else:
            samples = open_data(word, folder=used.folder)
            found = labelled_dataset(samples, held_out=used.held_out)
            found = found.limited(used.train_max, used.test_max)
    except (ConfigurationError, InputError) as err:
        where = "" if data is not None else "; name the run's data by --data if they have moved"
        raise ExportError(f"{err}{where}") from err
    _check(record, word, found.x_test)
    return found


def training_samples(record: RunRecord, word: str) -> tuple[Array, NDArray[np.int64] | None]:
    """Raw inputs to train exits on, and their labels where they have some.

    They are the training part of the data, held-out samples left out.

    Raises: ExportError for data that do not fit the run's network.
    """
    try:
        own = word == record.data.source  # then the run's own held-out part stays out
        samples = open_data(word, form=_form(record), folder=record.data.folder if own else None)
        parts = split_samples(samples, held_out=record.data.held_out if own else HELD_OUT_SHARE)
    except (ConfigurationError, InputError) as err:
        raise ExportError(f"--train-exits: {err}") from err
    _check(record, word, parts.train.x)
    _check_classes(record, word, samples)
    return parts.train.x, parts.train.y


def _form(record: RunRecord) -> PictureForm | None:
    """The form of pictures that the network takes; None where it takes none."""
    shape = record.network.input_shape
    return PictureForm(*shape) if len(shape) == 3 and shape[0] in (1, 3) else None


def _check(record: RunRecord, word: str, x: Array) -> None:
    shape = record.network.input_shape
    if x.shape[1:] != shape:
        raise ExportError(
            f"{word}: expected samples of shape {shape}, as the run was trained on, got"
            f" {x.shape[1:]}"
        )


def _check_classes(record: RunRecord, word: str, samples: Samples) -> None:
    """Check that labels count the classes as the run does, as far as both name them.

    Raises: ExportError.
    """
    known, found = record.class_names, samples.class_names
    unnamed = known == tuple(map(str, range(len(known))))
    if samples.train.y is not None and found and not unnamed and found != known:
        raise ExportError(
            f"{word}: expected the classes of the run in its order, {', '.join(known)}, got"
            f" {', '.join(found)}; a file {CLASSES_NAME} beside the folders of the classes, with"
            " one name a line, sets their order"
        )
