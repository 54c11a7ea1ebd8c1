"""Windows of a CSV table: the sensors in columns, the instants in rows.

    csv:motion.csv?columns=ax,ay,az&window=128&step=64&label=activity&group=person

Labels are the texts of their column, in alphabetical order. A window never spans a hole, two labels
or two people. No window spans two runs of ten windows either, so parts that are made of whole runs
(edge_sdk.training.data.split) share no row.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np

from edge_sdk.errors import ConfigurationError, InputError
from edge_sdk.pipeline.windows import WINDOW_KEYS, Columns, Window, WindowCutter, WindowForm
from edge_sdk.pipeline.words import Word
from edge_sdk.training.data.samples import Array, Part, Samples, checked_samples

logger = logging.getLogger(__name__)

TABLE_KEYS: Final = (*WINDOW_KEYS, "label", "group")
WINDOWS_BYTES_MAX: Final = 4 << 30
RUN: Final = 10
NAMED_HOLES: Final = 5
_DELIMITERS: Final = (",", ";", "\t")

Line = tuple[int, list[str]]  # its number, and its cells


def read_table(word: Word) -> Samples:
    """The windows (n, channels, window) float32 of a CSV file.

    A line in which a sensor has no number, or the label no text, is a hole. The first five are
    named, and the windows that holes break are counted.

    Args:
        word: `csv:FILE?...` with the options of TABLE_KEYS. The file has a header, or its columns
            are called 1, 2, ...
    Raises: ConfigurationError saying what to put where, or which option is wrong; InputError where
        the file is no table, or no window is left.
    """
    path = Path(word.rest)
    form = WindowForm(
        word.whole("window"),
        word.whole("step") if "step" in word.options else None,
        word.names("columns"),
    )
    if not path.is_file():
        raise ConfigurationError(
            f"{path}: expected a CSV file there, with the sensors in columns and a header"
        )
    apart = [word.options[key] for key in ("label", "group") if key in word.options]
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise InputError(f"{path}: expected lines of numbers, got an empty file")
    try:
        columns = Columns(first[1], form.columns, apart)
    except ConfigurationError as err:
        raise ConfigurationError(f"{path}: {err}") from err
    recording = _Recording(path, form, columns, apart)
    for line, cells in lines if columns.header else chain([first], lines):
        recording.add(line, cells)
    return recording.samples(labelled="label" in word.options, grouped="group" in word.options)


class _Recording:
    """Windows of the lines so far, each with its run and the texts of the columns apart.

    Args:
        apart: names of the columns of label and group, as far as there are any.
    """

    def __init__(
        self, path: Path, form: WindowForm, columns: Columns, apart: Sequence[str]
    ) -> None:
        self._path = path
        self._form = form
        self._columns = columns
        self._apart = apart
        self._cutter = WindowCutter(len(columns.names), form)
        self._windows: list[Window] = []
        self._texts: list[tuple[str, ...]] = []
        self._runs: list[int] = []
        self._run = 0
        self._before: tuple[str, ...] = ()
        self._bytes = self._holes = self._lost = 0

    def add(self, number: int, cells: list[str]) -> None:
        """Take the next line.

        Raises: InputError where the windows take too much memory.
        """
        try:
            row, texts = self._columns.row(cells), self._texts_of(cells)
        except InputError as err:
            self._holes += 1
            self._lost += self._break_off()
            if self._holes <= NAMED_HOLES:
                logger.warning("%s: line %d: skipped, %s", self._path, number, err)
            return
        if texts != self._before:
            self._break_off()
            self._before = texts
        window = self._cutter.push(row)
        if window is None:
            return
        self._bytes += window.nbytes
        if self._bytes > WINDOWS_BYTES_MAX:
            raise InputError(
                f"{self._path}: expected windows of at most {WINDOWS_BYTES_MAX} bytes together;"
                " give a larger step, or fewer rows"
            )
        self._windows.append(window)
        self._texts.append(texts)
        self._runs.append(self._run)
        if self._runs[-RUN:] == [self._run] * RUN:
            self._break_off()

    def samples(self, *, labelled: bool, grouped: bool) -> Samples:
        """All windows.

        Raises: InputError where there is none.
        """
        if self._holes > NAMED_HOLES:
            logger.warning("%s: %d lines with holes in all", self._path, self._holes)
        if not self._windows:
            raise InputError(
                f"{self._path}: expected {self._form.window} rows in a row with one label and"
                f" without a hole, found no such window; {self._holes} lines have holes"
            )
        columns = list(zip(*self._texts, strict=True))
        people = columns.pop() if grouped else None
        labels = columns.pop() if labelled else None
        classes, y = (None, None) if labels is None else _numbered(labels)
        part = Part(
            np.stack(self._windows),
            y,
            None if people is None else _numbered(people)[1],
            np.array(self._runs, np.int64),
        )
        samples = checked_samples(
            self._path.stem, part, None, source=self._path, class_names=classes or ()
        )
        return replace(samples, skipped=self._lost, what="windows with holes")

    def _texts_of(self, cells: Sequence[str]) -> tuple[str, ...]:
        texts = tuple(self._columns.text(cells, name) for name in self._apart)
        for name, text in zip(self._apart, texts, strict=True):
            if not text:
                raise InputError(f"column {name}: expected a text, got nothing")
        return texts

    def _break_off(self) -> int:
        self._run += 1
        return self._cutter.break_off()


def _numbered(texts: Sequence[str]) -> tuple[list[str], Array]:
    """The different texts in alphabetical order, and for each text its place among them."""
    names, places = np.unique(texts, return_inverse=True)
    return [str(name) for name in names], places.astype(np.int64)


def _lines(path: Path) -> Iterator[Line]:
    """The lines that are not empty."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            head = file.readline(1 << 16)
            file.seek(0)
            reader = csv.reader(file, delimiter=max(_DELIMITERS, key=head.count))
            for cells in reader:
                if any(cell.strip() for cell in cells):
                    yield reader.line_num, cells
    except (OSError, UnicodeDecodeError, csv.Error) as err:
        raise InputError(f"{path}: expected a CSV file of text ({err})") from err
