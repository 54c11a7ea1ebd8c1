"""Finding and reading data files: packed or plain, whole or refused by name."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final, cast

from edge_sdk.errors import ConfigurationError, InputError

PIECE_BYTES: Final = 1 << 20


def need_folder(name: str, folder: Path | None, what: str) -> Path:
    """`folder`, or ConfigurationError saying what to put where."""
    if folder is None:
        raise ConfigurationError(f"{name}: say where {what} are, with --data DIR")
    return folder


def find(folder: Path, names: Sequence[str], remedy: str) -> Path:
    """The first of `names` that is a file in `folder`.

    Raises: ConfigurationError naming the folder, the first name and the remedy.
    """
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ConfigurationError(f"{folder}: expected {names[0]} there; {remedy}")


def read_bytes(path: Path, most: int) -> bytearray:
    """The file's bytes, unpacked where the name ends in .gz or .xz, and no more than `most`.

    Raises: InputError naming the file where it cannot be read.
    """
    raw = bytearray()
    try:
        with _open(path) as file:
            # piece by piece: asked for its limit at once, gzip allocates all of it
            while len(raw) < most and (piece := file.read(min(PIECE_BYTES, most - len(raw)))):
                raw += piece
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as err:  # BadGzipFile is an OSError
        raise InputError(f"{path}: cannot be read ({err})") from err
    return raw


def _open(path: Path) -> IO[bytes]:
    match path.suffix:
        case ".gz":
            return cast("IO[bytes]", gzip.open(path))
        case ".xz":
            return cast("IO[Any]", lzma.open(path))
        case _:
            return path.open("rb")
