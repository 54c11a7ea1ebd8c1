"""Windows cut from rows of numbers: the samples of an accelerometer, one row at each instant.

Training data (`csv:FILE` of edge_sdk.training.data) and the sources of a running agent cut the same
windows, so a model sees on the device what it was trained on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edge_sdk.checks import check_fields
from edge_sdk.errors import ConfigurationError, InputError
from profiles.checks import optional, whole

# keys of a word (edge_sdk.pipeline.words) that say how windows are cut
WINDOW_KEYS: Final = ("columns", "window", "step")

Window = NDArray[np.float32]

_LARGEST: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class WindowForm:
    """Form of the windows.

    Attributes:
        window: rows of a window.
        step: rows from the start of a window to the start of the next; None for half a window.
        columns: names of the sensor columns in the order of the channels, or their numbers from 1
            on; empty for all columns that have no other purpose.
    """

    window: int
    step: int | None = None
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, window=whole(1), step=optional(whole(1)))

    @property
    def stride(self) -> int:
        """The step in rows, also where it is left to its default."""
        return max(1, self.window // 2) if self.step is None else self.step


class WindowCutter:
    """Rows in, windows out. A window never spans a hole.

    Args:
        channels: numbers of a row.
    """

    def __init__(self, channels: int, form: WindowForm) -> None:
        self._rows = np.empty((form.window, channels), np.float32)
        self._form = form
        self._held = 0
        self._pass = 0  # rows to pass over, where the step is longer than the window

    def push(self, row: Sequence[float]) -> Window | None:
        """Take the next row.

        Returns: (channels, window) float32 of its own memory where this row completes a window,
            else None.
        """
        if self._pass:
            self._pass -= 1
            return None
        self._rows[self._held] = row
        self._held += 1
        if self._held < self._form.window:
            return None
        whole_window = np.ascontiguousarray(self._rows.T)
        if whole_window.base is not None:  # one channel: the transpose is a view
            whole_window = whole_window.copy()
        kept = max(0, self._form.window - self._form.stride)
        self._rows[:kept] = self._rows[self._form.window - kept :].copy()
        self._held = kept
        self._pass = max(0, self._form.stride - self._form.window)
        return whole_window

    def break_off(self) -> int:
        """Forget the rows held, because the next one does not follow on them.

        Returns: windows that were begun and are lost.
        """
        lost = math.ceil(self._held / self._form.stride)
        self._held = self._pass = 0
        return lost


class Columns:
    """Columns of a table of text, by name or by number.

    Args:
        first: the cells of the table's first line. It is a header if none of them is a number;
            without a header the columns are called 1, 2, ...
        wanted: sensor columns; empty for all but the others.
        others: columns with another purpose, such as a label.
    Raises: ConfigurationError naming a column that the table does not have, and those it has.
    """

    def __init__(
        self, first: Sequence[str], wanted: Sequence[str] = (), others: Iterable[str] = ()
    ) -> None:
        cells = [cell.strip().lstrip("\ufeff") for cell in first]
        self.header = not any(_is_number(cell) for cell in cells)
        self._names = cells if self.header else [str(n + 1) for n in range(len(cells))]
        apart = {self._place(name) for name in others}
        places = [self._place(name) for name in wanted]
        self._places = places or [at for at in range(len(cells)) if at not in apart]
        if not self._places or apart & set(self._places):
            raise ConfigurationError(
                f"columns: expected sensor columns among {', '.join(self._names)}, apart from"
                f" {', '.join(self._names[at] for at in sorted(apart)) or 'none'}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sensor columns, in the order of the channels."""
        return tuple(self._names[at] for at in self._places)

    def row(self, cells: Sequence[str]) -> list[float]:
        """The sensor values of one line.

        Raises: InputError naming the column that has no finite number.
        """
        values = []
        for at in self._places:
            cell = cells[at] if at < len(cells) else ""
            if not _is_number(cell):
                raise InputError(
                    f"column {self._names[at]}: expected a finite number, got"
                    f" {cell.strip()[:40] or 'nothing'}"
                )
            values.append(float(cell))
        return values

    def text(self, cells: Sequence[str], name: str) -> str:
        """The text of one column of one line; empty where the line is too short."""
        at = self._place(name)
        return cells[at].strip() if at < len(cells) else ""

    def _place(self, name: str) -> int:
        if name in self._names:
            return self._names.index(name)
        if name.isascii() and name.isdecimal() and 1 <= int(name) <= len(self._names):
            return int(name) - 1
        raise ConfigurationError(
            f"column {name}: expected one of {', '.join(self._names)}, or a number from 1 to"
            f" {len(self._names)}"
        )


def _is_number(cell: str) -> bool:
    try:
        return abs(float(cell)) <= _LARGEST  # NaN is not
    except ValueError:
        return False
