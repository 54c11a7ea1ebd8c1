"""Errors that numpy and Pillow raise for a damaged file: one list for all that read such files."""

from __future__ import annotations

import struct
import zipfile
import zlib
from tokenize import TokenError
from typing import Final

try:
    from lzma import LZMAError
except ImportError:  # pragma: no cover - a Python that was built without it
    from zlib import error as LZMAError  # type: ignore[assignment]  # it raises none

# numpy takes a file with the first bytes of a ZIP file for a .npz
DAMAGED: Final = (
    OSError,
    ValueError,
    EOFError,
    MemoryError,
    SyntaxError,
    TokenError,
    TypeError,
    LookupError,
    OverflowError,
    RuntimeError,  # too deep, encrypted, or of a compression that zipfile does not know
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
    LZMAError,
)


def reason_of(err: BaseException) -> str:
    """The fault of a damaged file, in one line of at most 200 characters."""
    text = getattr(err, "strerror", None) or str(err) or type(err).__name__
    return " ".join(text.split())[:200]
