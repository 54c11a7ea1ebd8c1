"""The C library's memory in a simulation: kept for the next batch, given back after many rounds.

By itself glibc returns every large block to the system as soon as it is free, and each batch asks
for the same blocks again: the system then fills them with zeros, page by page. Kept, `cnn6` trains
1.1 to 1.3 times as fast, and `cnn8` 1.1 times. No value changes.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Final

# of malloc.h
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3

# Freed memory up to this size stays with the process until `trim_memory`.
KEPT_BYTES: Final = 1 << 30
# the largest block that glibc before 2.35 can be told to keep
BLOCK_BYTES_BEFORE: Final = 1 << 25


@cache
def keep_freed_memory() -> None:
    """Let this process keep freed memory, where the C library can (glibc's mallopt)."""
    library = _glibc()
    if library is not None:
        # with _TRIM_THRESHOLD alone, blocks of 128 KiB and more would be given back at once
        if not library.mallopt(_MMAP_THRESHOLD, KEPT_BYTES):
            library.mallopt(_MMAP_THRESHOLD, BLOCK_BYTES_BEFORE)
        library.mallopt(_TRIM_THRESHOLD, KEPT_BYTES)


def trim_memory() -> None:
    """Return free pages to the system, where the C library can (glibc's malloc_trim)."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    """The C library, if it has both functions."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    known = all(hasattr(library, name) for name in ("mallopt", "malloc_trim"))
    return library if known else None
