"""Kinds of sources, as a user names them: `folder:DIR`, `camera:0`, `csv:FILE`, ..."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final, cast

from edge_sdk.errors import ConfigurationError
from edge_sdk.installation import install_command, names_function, user_function
from edge_sdk.pipeline.sources.camera import CameraSource, is_live, opencv_capture
from edge_sdk.pipeline.sources.feed import Source
from edge_sdk.pipeline.sources.folder import FolderSource, Start
from edge_sdk.pipeline.sources.function import FunctionSource
from edge_sdk.pipeline.sources.json_lines import JsonLinesSource
from edge_sdk.pipeline.sources.lines import GrowingFile
from edge_sdk.pipeline.sources.memory import SavedPlace, SeenFiles, memory_file
from edge_sdk.pipeline.sources.rows import CsvSource, RowKeys, SerialSource, serial_port
from edge_sdk.pipeline.windows import WINDOW_KEYS
from edge_sdk.pipeline.words import Word, read_word, without_login

STARTS: Final = ("last", "start", "end")
BAUD: Final = 115_200


@dataclass(frozen=True, slots=True)
class Opened:
    """A source and its name for people."""

    source: Source
    name: str


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Folders that a source's word speaks of.

    Attributes:
        base: relative paths start there, and modules of the user are searched there.
        state: of the device, for what is remembered across restarts; None remembers nothing.
    """

    base: Path
    state: Path | None = None


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of source.

    Attributes:
        example: a word of this kind.
        about: its inputs, in a few words.
        keys: of its options.
    """

    example: str
    about: str
    keys: tuple[str, ...]
    open: Callable[[Word, Surroundings], Opened]


def open_source(text: str, around: Surroundings) -> Opened:
    """The source that a word names. A file or device that is not there yet is waited for.

    Raises: ConfigurationError saying which part of the word is wrong, or what to install.
    """
    head = text.partition("?")[0]
    kind = SOURCES.get(head.partition(":")[0])
    if kind is not None:
        # a kind without options takes all of the text: a URL may have a question mark
        plain = Word(text, *_halves(text))
        return kind.open(read_word(text, kind.keys) if kind.keys else plain, around)
    known = ", ".join(each.example for each in SOURCES.values())
    if not names_function(text):
        raise ConfigurationError(f"source {text}: expected one of {known}, or module:function")
    try:
        function = user_function(text, (around.base,), what="source")
    except ConfigurationError as err:
        raise ConfigurationError(f"{err}; other sources are {known}") from err
    return Opened(FunctionSource(function, text), text)


def _folder(word: Word, around: Surroundings) -> Opened:
    folder = _path(word, around)
    seen = SeenFiles(memory_file(around.state, "folder", folder))
    return Opened(FolderSource(folder, seen, _start(word)), str(folder))


def _csv(word: Word, around: Surroundings) -> Opened:
    path = _path(word, around)
    separator = word.options.get("separator")
    if separator is not None and len(separator) != 1:
        raise word.fault(f"separator: expected one character, got {separator}")
    start = _start(word)
    place = SavedPlace(memory_file(around.state, "csv", path))
    file = GrowingFile(path, place.place if start == "last" else None, from_end=start == "end")
    return Opened(CsvSource(file, place, _row_keys(word), separator), str(path))


def _serial(word: Word, _around: Surroundings) -> Opened:
    device = _rest(word)
    _need_module(word, "serial", "serial")
    port = partial(serial_port, device, word.whole("baud", BAUD))
    return Opened(SerialSource(port, _row_keys(word)), device)


def _camera(word: Word, around: Surroundings) -> Opened:
    place = _rest(word)
    _need_module(word, "cv2", "camera")
    live = is_live(place)
    place = place if live else str(around.base / Path(place).expanduser())
    name = without_login(place)  # it stands in every row, in the status and in logs
    return Opened(CameraSource(partial(opencv_capture, place), name, live=live), f"camera {name}")


def _stdin(word: Word, _around: Surroundings) -> Opened:
    if word.text != "-":
        raise word.fault("expected - alone, for standard input")
    return Opened(JsonLinesSource(), "standard input")


def _halves(text: str) -> tuple[str, str]:
    kind, _, rest = text.partition(":")
    return kind, rest


def _rest(word: Word) -> str:
    if not word.rest:
        raise word.fault(f"expected more behind the colon, as in {SOURCES[word.kind].example}")
    return word.rest


def _path(word: Word, around: Surroundings) -> Path:
    return (around.base / Path(_rest(word)).expanduser()).absolute()


def _start(word: Word) -> Start:
    start = word.options.get("from", "last")
    if start not in STARTS:
        raise word.fault(f"from: expected one of {', '.join(STARTS)}, got {start}")
    return cast("Start", start)


def _row_keys(word: Word) -> RowKeys:
    window = word.whole("window") if "window" in word.options else None
    step = word.whole("step") if "step" in word.options else None
    return RowKeys(word.names("columns"), window, step)


def _need_module(word: Word, module: str, extra: str) -> None:
    if find_spec(module) is None:
        raise word.fault(f"this source needs {module}: {install_command(extra)}")


SOURCES: Final[Mapping[str, Kind]] = {
    "folder": Kind("folder:DIR", "pictures and .npy files, as they arrive", ("from",), _folder),
    "camera": Kind("camera:0", "the newest frame of a camera, device or URL", (), _camera),
    "csv": Kind(
        "csv:FILE", "windows of a file that grows", (*WINDOW_KEYS, "separator", "from"), _csv
    ),
    "serial": Kind(
        "serial:/dev/ttyUSB0", "windows of lines of numbers", (*WINDOW_KEYS, "baud"), _serial
    ),
    "-": Kind("-", "JSON lines on standard input", (), _stdin),
}
