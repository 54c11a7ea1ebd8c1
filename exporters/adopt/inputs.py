"""Samples as a model's raw input takes them, and labels in the order of its classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edge_sdk.manifest import TensorSpec
from edge_sdk.training.data.load import Part, Parts, Samples, open_data
from exporters.adopt.graph.preprocess import Layout, Preprocessing, layout_of, picture_form
from exporters.errors import ExportError

Array = NDArray[Any]

LEAST: Final = 6
NAMED: Final = 6  # class names on one line


def open_inputs(word: str, raw: TensorSpec, *, most: int) -> Samples:
    """The samples that a word of the grammar names; pictures in the size of the raw input.

    Args:
        most: files to read of each part of a folder.
    Raises: ExportError where there are too few samples; what `open_data` raises.
    """
    form = picture_form(raw.shape)
    if form is None and Path(word.partition("?")[0]).is_dir():
        raise ExportError(
            f"{word}: a folder is read as pictures, and this model takes none: its input is no"
            " (channels, height, width) of 1 or 3 channels; give FILE.npz, csv:FILE or"
            " module:function"
        )
    samples = open_data(word, form=form, most=most)
    if len(samples.train) < LEAST:
        raise ExportError(
            f"{samples.name}: expected at least {LEAST} samples, got {len(samples.train)}"
        )
    return samples


def as_inputs(samples: Samples, raw: TensorSpec, *, layout: Layout | None = None) -> Samples:
    """Samples in the shape of the raw input; their values and dtype stay.

    Args:
        layout: that was asked for, for the advice.
    Raises: ExportError where the shape does not fit, or a uint8 input gets other values.
    """
    train, test = (
        None if part is None else replace(part, x=_shaped(samples.name, part.x, raw, layout))
        for part in (samples.train, samples.test)
    )
    assert train is not None
    return replace(samples, train=train, test=test)


def as_raw(x: Array, raw: TensorSpec) -> Array:
    """A batch in the dtype of the raw input, in one block of memory."""
    return np.ascontiguousarray(x, np.dtype(raw.dtype))


def doubts(
    word: str, samples: Samples, raw: TensorSpec, preprocessing: Preprocessing
) -> tuple[str, ...]:
    """Warnings about inputs that fit the model in shape, and may not fit it in scale.

    Args:
        word: of the grammar, that `samples` were read by.
    """
    pictures = Path(word.partition("?")[0]).is_dir() and samples.train.x.dtype == np.uint8
    told = preprocessing.input or preprocessing.mean or preprocessing.graph
    if not pictures or told or raw.dtype != "float32":
        return ()
    line = (
        "pixels reach the model as 0..255; if it was trained on 0..1 or on normalised values, give"
        " --mean and --std (for 0..1: --mean 0 --std 255)"
    )
    return (line,)


def names_of(classes: int, given: Sequence[str] | None, samples: Samples) -> tuple[str, ...]:
    """A name for each class: those given, those of the data where their number fits, or numbers.

    Raises: ExportError where the number of given names is another.
    """
    if given is not None:
        if len(given) != classes or len(set(given)) != classes:
            raise ExportError(
                f"class names: expected {classes} different ones, one a line in the order of the"
                f" model's output, got {len(given)}"
            )
        return tuple(given)
    if len(samples.class_names) == classes:
        return samples.class_names
    return tuple(map(str, range(classes)))


def origin_of_names(names: Sequence[str], given: Sequence[str] | None, samples: Samples) -> str:
    """Line that says where the names of `names_of` come from; only their order can be wrong."""
    if given is not None:
        return f"classes: {_some(names)}, as given"
    if names == samples.class_names:
        return (
            f"classes: {_some(names)}, as {samples.name} names them; if the model has another"
            " order, give --class-names"
        )
    return f"classes: {_some(names)}; --class-names gives them names"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= NAMED else (*names[: NAMED - 1], "...", names[-1]))


def with_labels(
    parts: Parts, samples: Samples, class_names: Sequence[str], *, wanted: bool, named: bool
) -> Parts:
    """The parts with labels in the order of the model's classes; without any unless wanted.

    Args:
        samples: those that were parted.
        named: whether the class names were given: labels are then matched by name.
    Raises: ExportError where labels are wanted and there are none, or they do not fit.
    """
    if wanted and parts.test.y is None:
        raise ExportError(
            f"--labels: expected labels of the test part, {samples.name} has none; leave out"
            " --labels, or give data with a folder for each class or the array y_test"
        )
    places = _places(samples, class_names) if wanted and named else None

    def moved(part: Part) -> Part:
        if not wanted or part.y is None:
            return replace(part, y=None)
        return replace(part, y=_moved(part.y, places, len(class_names), samples))

    return Parts(moved(parts.train), moved(parts.held_out), moved(parts.test))


def _places(samples: Samples, class_names: Sequence[str]) -> Array | None:
    if not samples.class_names:
        return None
    strange = [name for name in samples.class_names if name not in class_names]
    if strange:
        if len(samples.class_names) == len(class_names):
            return None  # other words for the same classes, in the same order
        raise ExportError(
            f"--labels: class {strange[0]!r} of {samples.name} is not among the class names; rename"
            " the folder, or put the name into the file"
        )
    return np.array([list(class_names).index(name) for name in samples.class_names])


def _moved(y: Array, places: Array | None, classes: int, samples: Samples) -> Array:
    if places is None and samples.class_names and len(samples.class_names) != classes:
        raise ExportError(
            f"--labels: {samples.name} has {len(samples.class_names)} classes, the model {classes};"
            " name the model's classes with --class-names, and labels are matched by name"
        )
    if places is not None:
        moved: Array = places[y]
        return moved
    if len(y) and y.max() >= classes:
        raise ExportError(
            f"--labels: expected labels 0 to {classes - 1}, the model's classes, got {y.max()} in"
            f" {samples.name}"
        )
    return y


def _shaped(name: str, x: Array, raw: TensorSpec, layout: Layout | None) -> Array:
    sample, wanted = x.shape[1:], raw.shape
    if sample != wanted:
        grey = [axis for axis in (0, len(wanted) - 1) if wanted[axis] == 1]
        without = [axis for axis in grey if sample == wanted[:axis] + wanted[axis + 1 :]]
        if without:
            x = np.expand_dims(x, 1 + without[0])
        elif len(sample) == 3 and layout_of(wanted) == "nhwc" and _turned(sample) == wanted:
            x = x.transpose(0, 2, 3, 1)
        elif len(sample) == 3 and layout_of(wanted) == "nchw" and sample == _turned(wanted):
            x = x.transpose(0, 3, 1, 2)
        else:
            raise ExportError(
                f"{name}: expected samples of shape {wanted}, the raw input, got {sample};"
                f" {_advice(sample, wanted, layout)}"
            )
    if raw.dtype == "uint8" and x.dtype != np.uint8:
        whole = all(
            ((block >= 0) & (block <= 255) & (block == np.floor(block))).all()
            for block in np.array_split(x, max(1, len(x) // 1000))
        )
        if not whole:
            raise ExportError(
                f"{name}: --input uint8: expected whole numbers 0 to 255, got others; use"
                " --input float32"
            )
    return x


def _advice(sample: tuple[int, ...], wanted: tuple[int, ...], layout: Layout | None) -> str:
    if len(wanted) != 2 or sample != wanted[::-1]:
        return "--resize HxW takes pictures of another size, --shape fixes open sizes"
    if layout is not None:
        other = "nhwc" if layout == "nchw" else "nchw"
        return (
            f"by the number of means, --layout {layout} is the order that the model has itself; for"
            f" such windows give --layout {other}, which turns them"
        )
    return (
        "the published model turns windows with --layout nchw if they are (channels, steps), as"
        " tables and sensors give them, with --layout nhwc if they are (steps, channels)"
    )


def _turned(shape: Sequence[int]) -> tuple[int, ...]:
    """(channels, height, width) as (height, width, channels)."""
    return (shape[1], shape[2], shape[0])
