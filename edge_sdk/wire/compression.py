"""Compression of bytes on the wire: zstandard frames that say how many bytes they hold.

The receiver knows that number from the shape of the tensor. It compares it before anything is
allocated, so no short message can grow. zstandard is imported by the first codec that needs it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from edge_sdk.errors import FrameError

if TYPE_CHECKING:
    import zstandard

Bytes = NDArray[np.uint8]

# Level 15 makes features of up to 4 KiB 6 to 10 % smaller than level 1, in 20 to 60 us in place of
# 4 to 10; 16 KiB take 1.3 ms in place of 0.05.
LEVEL: Final = 15
LEVEL_LONG: Final = 1
LONG_BYTES: Final = 4096
# a frame with a larger window than its content would make the decoder allocate the window
WINDOW_LEAST: Final = 1024

_own = threading.local()  # compressors may not be shared between threads


def compress(body: Bytes) -> Bytes:
    """A frame that holds the bytes."""
    level = LEVEL if len(body) <= LONG_BYTES else LEVEL_LONG
    compressor = _compressors().get(level)
    if compressor is None:
        compressor = _module().ZstdCompressor(level=level, write_content_size=True)
        _compressors()[level] = compressor
    return np.frombuffer(compressor.compress(np.ascontiguousarray(body).data), np.uint8)


def decompress(frame: Bytes, size: int) -> Bytes:
    """The `size` bytes that a frame holds.

    Raises: FrameError for anything else than one whole frame of that size, before memory is taken.
    """
    zstandard = _module()
    raw = frame.tobytes()
    try:
        announced = zstandard.get_frame_parameters(raw)
        # a frame without a size announces 2**64 - 1, the same as -1
        if announced.content_size != size or announced.window_size > max(size, WINDOW_LEAST):
            raise FrameError(
                f"compressed bytes: expected a frame of {size} bytes by the shape, got one of"
                f" {announced.content_size} with a window of {announced.window_size}"
            )
        body = zstandard.ZstdDecompressor().decompress(raw, allow_extra_data=False)
    except zstandard.ZstdError as err:
        raise FrameError(f"compressed bytes: expected a zstandard frame ({err})") from err
    if len(body) != size:
        raise FrameError(f"compressed bytes: expected {size} bytes by the shape, got {len(body)}")
    return np.frombuffer(body, np.uint8)


def load_compression() -> None:
    """Import the library now, so that no query waits for it."""
    _module()


def _module() -> Any:
    import zstandard  # noqa: PLC0415 - 20 ms and 0.3 MiB that most devices do not need

    return zstandard


def _compressors() -> dict[int, zstandard.ZstdCompressor]:
    """Compressors of this thread, by level."""
    try:
        kept: dict[int, zstandard.ZstdCompressor] = _own.by_level
    except AttributeError:
        kept = _own.by_level = {}
    return kept
