"""Damaged files: what a worn card makes of bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Final

import numpy as np

# the first bytes of each entry in a ZIP file's list of its members
ZIP_ENTRY: Final = b"PK\x01\x02"


def flipped(raw: bytes, start: int, stop: int) -> Iterator[bytes]:
    """The bytes with one bit turned over, once for each bit from byte `start` to before `stop`."""
    for at in range(start, stop):
        for bit in range(8):
            damaged = bytearray(raw)
            damaged[at] ^= 1 << bit
            yield bytes(damaged)


def damaged_arrays(array: np.ndarray) -> Iterator[bytes]:
    """The array as a .npy file with a damaged header, and as a .npz file with a damaged list."""
    plain, archive = io.BytesIO(), io.BytesIO()
    np.save(plain, array)
    yield from flipped(plain.getvalue(), 0, 70)  # spaces follow
    np.savez(archive, array)
    raw = archive.getvalue()
    yield from flipped(raw, raw.index(ZIP_ENTRY), len(raw))
