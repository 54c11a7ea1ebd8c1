"""Sources of rows of numbers, cut into windows: `csv:FILE` and `serial:DEV`."""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from edge_sdk.checks import check_fields
from edge_sdk.errors import ConfigurationError, InputError
from edge_sdk.manifest import TensorSpec
from edge_sdk.pipeline.samples import converted
from edge_sdk.pipeline.sources.feed import Array, Feed, Item
from edge_sdk.pipeline.sources.lines import GrowingFile, Line, LineSplitter
from edge_sdk.pipeline.sources.memory import SavedPlace
from edge_sdk.pipeline.windows import Columns, WindowCutter, WindowForm
from profiles.checks import optional, whole

SERIAL_WAIT_S: Final = 0.2
# Rows before the first one that fits the model: a board may greet with a few numbers, or the first
# row may be cut. After so many, the columns are wrong.
UNFIT_MOST: Final = 20
_BETWEEN: Final = re.compile(r"[,;\s]+")


@dataclass(frozen=True, slots=True)
class RowKeys:
    """Options of a source of rows.

    Attributes:
        columns: as in `WindowForm`.
        window: rows of a window; None takes the model's.
        step: rows between the starts of two windows; None is half a window.
    """

    columns: tuple[str, ...] = ()
    window: int | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, window=optional(whole(1)), step=optional(whole(1)))


class RowCutter:
    """Rows of text in, windows that fit the model out. A row with a hole begins a new window.

    Args:
        keys: what the user asked for.
        feed: for the model's input and for what is refused.
    """

    def __init__(self, keys: RowKeys, feed: Feed) -> None:
        self._keys = keys
        self._feed = feed
        self._columns: Columns | None = None
        self._cutter: WindowCutter | None = None
        self._form = WindowForm(1)
        self._spec: TensorSpec | None = None

    def begin(self, first: Sequence[str]) -> bool:
        """Take the first line of a table. Other columns than before begin a new window.

        Returns: whether it is a header, so no row.
        Raises: ConfigurationError if a column that the user named is not in it.
        """
        before, self._columns = self._columns, None
        columns = Columns(first, self._keys.columns)
        if before is None or columns.names != before.names:
            self.gap()
            self._cutter = None
        self._columns = columns
        return columns.header

    def take(self, cells: Sequence[str], where: str) -> Array | None:
        """Take a row.

        Args:
            where: for errors.
        Returns: the sample that it completes, in the model's shape; else None.
        Raises: ConfigurationError if the rows cannot fit the model.
        """
        if self._columns is None:
            self._feed.hole(f"{where}: the table's header does not have the columns asked for", 0)
            return None
        try:
            row = self._columns.row(cells)
        except InputError as err:
            self._feed.hole(f"{where}: {err}", self.gap())
            return None
        try:
            spec, cutter = self.fit()
        except ConfigurationError as err:
            raise ConfigurationError(f"{self._feed.name}: {err}") from err
        window = cutter.push(row)
        try:
            return None if window is None else _in_shape(where, window, spec)
        except InputError as err:
            self._feed.refuse(str(err))
            return None

    def fit(self) -> tuple[TensorSpec, WindowCutter]:
        """The model's input as it is now, and what cuts rows of the table for it.

        Raises: ConfigurationError if the table's columns cannot fill the input.
        """
        assert self._columns is not None, "begin the table first"
        spec, names = self._feed.spec(), self._columns.names
        if spec is self._spec and self._cutter is not None:
            return spec, self._cutter
        length = window_length(spec, len(names))
        window = self._keys.window or length
        if window is None or window != length:
            asked = "" if self._keys.window is None else f" with window={self._keys.window}"
            raise ConfigurationError(
                f"the model takes {spec.shape}, which {len(names)} columns"
                f" ({', '.join(names)[:200]}){asked} cannot fill; name the columns, as in"
                " ?columns=ax,ay,az"
                + ("" if length is None else f", and window={length} or no window")
            )
        self._spec = spec
        self._form = WindowForm(window, self._keys.step, self._keys.columns)
        self._cutter = WindowCutter(len(names), self._form)
        return spec, self._cutter

    @property
    def form(self) -> WindowForm:
        """The windows that are cut."""
        return self._form

    def gap(self) -> int:
        """Begin a new window.

        Returns: windows that were begun and are lost.
        """
        return 0 if self._cutter is None else self._cutter.break_off()


def window_length(spec: TensorSpec, channels: int) -> int | None:
    """Rows of a window that fills the model's input; None if rows of these channels cannot.

    The input is (channels, window) or (window, channels), perhaps with axes of 1; or (channels,)
    for single rows; or (window,) for one channel.
    """
    axes = tuple(size for size in spec.shape if size > 1)
    if len(axes) == 2 and channels in axes:
        return axes[1] if axes[0] == channels else axes[0]
    if axes == (channels,):
        return 1
    if len(axes) == 1 and channels == 1:
        return axes[0]
    return 1 if not axes and channels == 1 else None


def _in_shape(where: str, window: Array, spec: TensorSpec) -> Array:
    """A (channels, window) window in the model's shape and dtype.

    Raises: InputError naming `where`, if the dtype cannot hold a value.
    """
    axes = tuple(size for size in spec.shape if size > 1)
    if len(axes) == 2 and axes != window.shape:
        window = window.T
    return converted(where, np.ascontiguousarray(window.reshape(spec.shape)), spec.dtype)


class CsvSource:
    """Windows of a CSV file that grows, across rotation and restarts.

    Args:
        place: is moved as windows are answered.
        separator: between two columns; None is a comma, or what the first line has in its place.
    """

    newest = False
    patient = False

    def __init__(
        self, file: GrowingFile, place: SavedPlace, keys: RowKeys, separator: str | None = None
    ) -> None:
        self._file = file
        self._place = place
        self._keys = keys
        self._given_separator = separator
        self._separator = separator or ","

    def items(self, feed: Feed) -> Iterator[Item]:
        """One item for each window, named by the line that completes it."""
        cutter = RowCutter(self._keys, feed)
        places: deque[dict[str, Any]] = deque(maxlen=1)
        begun = False
        top = True  # of a file: there were no lines yet, or blank ones
        for line in self._file.lines(feed):
            if line.gap:
                cutter.gap()
            top = top or line.first
            if not line.text.strip():
                continue
            begins, top = top, False
            if begins and self._begin(cutter, line, feed, begun=begun):
                begun = True
                continue
            begun = True
            where = f"{feed.name} line {line.number}"
            sample = self._take(cutter, line, where, feed)
            places = _places(places, cutter.form.window)
            places.append(self._file.place(line))
            if sample is not None:
                yield Item(where, sample, _next_start(places, cutter.form))

    def answered(self, mark: Mapping[str, Any]) -> None:
        """Go on from there after a restart."""
        self._place.move(mark)

    def close(self) -> None:
        """Save the place. The file is closed with its last reader."""
        self._place.save()

    def _begin(self, cutter: RowCutter, line: Line, feed: Feed, *, begun: bool) -> bool:
        """Whether the first line with text is no row: a header, or one that is given again."""
        self._separator = self._given_separator or _separator_of(line.text)
        try:
            header = cutter.begin(self._cells(line.text))
        except (ConfigurationError, csv.Error) as err:
            if not begun:
                raise ConfigurationError(f"{feed.name}: {err}") from err
            feed.hole(
                f"{feed.name} line {line.number}: {err}", 0
            )  # a later file; the next may be right again
            return True
        return header or line.again

    def _take(self, cutter: RowCutter, line: Line, where: str, feed: Feed) -> Array | None:
        """The sample that a row completes; a line that is no row of a table is a hole."""
        try:
            cells = self._cells(line.text)
        except csv.Error as err:  # a carriage return within, or a field without an end
            feed.hole(f"{where}: {err}", cutter.gap())
            return None
        return cutter.take(cells, where)

    def _cells(self, text: str) -> list[str]:
        return next(csv.reader([text], delimiter=self._separator))


class SerialSource:
    """Windows of the lines that come in at a serial port.

    A line without a number is a header if the first row behind it has as many cells. Other text,
    such as a greeting of the device, is none; with a number in it, it is a hole. So is a line of
    numbers that cannot fill the model, as long as no row could: UNFIT_MOST of them.

    Args:
        open_port: opens it; the port has `read(size)`, `in_waiting` and `close()`.
    """

    newest = False
    patient = False

    def __init__(self, open_port: Callable[[], Any], keys: RowKeys) -> None:
        self._open_port = open_port
        self._keys = keys

    def items(self, feed: Feed) -> Iterator[Item]:
        """One item for each window, numbered.

        Raises: ConfigurationError if no row fits the model.
        """
        cutter = RowCutter(self._keys, feed)
        begun = False
        before: list[str] = []
        unfit = number = 0
        for text in self._lines(feed, cutter):
            cells = [cell for cell in _BETWEEN.split(text.strip()) if cell]
            if not cells:
                continue
            where = f"{feed.name}: the line {text.strip()[:60]}"
            if not begun:
                if Columns(cells).header:
                    before = cells
                    continue
                try:
                    self._begin(cutter, before, cells)
                except (ConfigurationError, InputError) as err:
                    unfit += isinstance(err, ConfigurationError)
                    if unfit > UNFIT_MOST:
                        raise ConfigurationError(f"{feed.name}: {err}") from err
                    feed.hole(f"{where}: {err}", 0)
                    continue
                begun = True
            sample = cutter.take(cells, where)
            if sample is not None:
                number += 1
                yield Item(f"{feed.name} window {number}", sample)

    def answered(self, mark: object) -> None:
        """Nothing to remember: a port has no past."""

    def close(self) -> None:
        """The port is closed by the thread that reads it."""

    def _begin(self, cutter: RowCutter, before: list[str], cells: list[str]) -> None:
        """Begin the table with its first row.

        Raises: InputError if the line is none; ConfigurationError if the row lacks a column that
            the user named, or cannot fill the model.
        """
        first = before if len(before) == len(cells) else cells
        try:
            Columns(first, self._keys.columns).row(cells)
        except ConfigurationError:
            Columns(cells).row(cells)  # a line with text in it is not the table's
            raise
        cutter.begin(first)
        cutter.fit()

    def _lines(self, feed: Feed, cutter: RowCutter) -> Iterator[str]:
        while not feed.stopped:
            try:
                port = self._open_port()
            except OSError as err:  # pyserial's errors are of that kind
                feed.away(_why(err))
                continue
            feed.back()
            cutter.gap()
            try:
                yield from _port_lines(port, feed)
            except OSError as err:
                feed.away(_why(err))
            finally:
                port.close()


def serial_port(device: str, baud: int) -> Any:
    """An open serial port.

    Raises: OSError if it is not there; ModuleNotFoundError without pyserial.
    """
    import serial  # noqa: PLC0415 - the extra [serial]

    return serial.Serial(device, baud, timeout=SERIAL_WAIT_S)


def _port_lines(port: Any, feed: Feed) -> Iterator[str]:
    splitter = LineSplitter()
    partial = True  # the first line began before the port was opened
    while not feed.stopped:
        for raw in splitter.push(port.read(max(1, port.in_waiting))):
            if not partial:
                yield raw.decode("utf-8", "replace")
            partial = False


def _why(err: OSError) -> str:
    return (err.strerror or str(err)).strip()[:200]


def _separator_of(line: str) -> str:
    if "," in line:
        return ","
    return next((each for each in ";\t" if each in line), ",")


def _places(places: deque[dict[str, Any]], window: int) -> deque[dict[str, Any]]:
    """Places of the rows of one window, and of the row before it."""
    if places.maxlen == window + 1:
        return places
    return deque(places, maxlen=window + 1)


def _next_start(places: deque[dict[str, Any]], form: WindowForm) -> dict[str, Any]:
    """The place before the first row of the next window."""
    rows_of_next = form.window - form.stride  # that this window has too
    return places[-1] if rows_of_next <= 0 else places[-1 - rows_of_next]
