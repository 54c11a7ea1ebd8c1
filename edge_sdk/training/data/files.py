"""Find and read data files, compressed or plain."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final, cast

from edge_sdk.errors import ConfigurationError, InputError

PIECE_BYTES: Final = 1 << 20


def find(folder: Path, names: Sequence[str], remedy: str) -> Path:
    """The first of `names` that is a file in `folder`.

    Raises: ConfigurationError naming the folder, the first name and what to do.
    """
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ConfigurationError(f"{folder}: expected the file {names[0]}, found none; {remedy}")


def read_bytes(path: Path, most: int) -> bytearray:
    """The file's first bytes, at most `most`; decompressed if the name ends in .gz or .xz.

    Raises: InputError naming a file that cannot be read.
    """
    raw = bytearray()
    try:
        with _open(path) as file:
            # piece by piece: gzip allocates all that it is asked for at once
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
