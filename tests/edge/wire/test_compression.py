"""Compressed bytes: they come back, and no short message can make a receiver take much memory."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_sdk.errors import FrameError
from edge_sdk.wire.codecs import decode, encode
from edge_sdk.wire.compression import LONG_BYTES, compress, decompress

Bytes = NDArray[np.uint8]


def as_bytes(raw: bytes) -> Bytes:
    return np.frombuffer(raw, np.uint8)


@given(st.binary(max_size=300))
def test_bytes_come_back(raw: bytes) -> None:
    frame = compress(as_bytes(raw))
    assert decompress(frame, len(raw)).tobytes() == raw
    assert zstandard.ZstdDecompressor().decompress(frame.tobytes()) == raw  # a frame as any other


def test_long_bytes_come_back() -> None:
    raw = np.random.default_rng(0).integers(0, 4, LONG_BYTES + 1).astype(np.uint8)
    frame = compress(raw)
    assert len(frame) < len(raw) / 3  # two bits a byte, and what the frame itself takes
    np.testing.assert_array_equal(decompress(frame, len(raw)), raw)


def test_a_bomb_is_refused_by_what_it_announces() -> None:
    """64 MiB of zeros take 2 kB. They are refused, and so is a frame that hides its size."""
    zeros = bytes(1 << 26)
    bomb = zstandard.ZstdCompressor().compress(zeros)
    assert len(bomb) < 10_000
    hidden = zstandard.ZstdCompressor(write_content_size=False).compress(zeros)
    for raw in (bomb, hidden):
        with pytest.raises(FrameError, match="expected a frame of 100 bytes by the shape"):
            decompress(as_bytes(raw), 100)


def test_a_frame_that_says_less_than_it_holds_is_refused() -> None:
    """The size stands in the frame's header: one byte after its magic number and descriptor."""
    raw = bytearray(zstandard.ZstdCompressor(write_content_size=True).compress(bytes(200)))
    assert raw[5] == 200
    raw[5] = 100
    with pytest.raises(FrameError):
        decompress(as_bytes(bytes(raw)), 100)


def test_a_frame_with_a_window_larger_than_its_content_is_refused() -> None:
    """A decoder would allocate the window of a frame that is cut off: here 64 MiB."""
    # magic number; content size in one byte would be "single segment", so two bytes: 256 + 44
    header = bytes.fromhex("28b52ffd") + bytes([0b0100_0000, 16 << 3]) + (44).to_bytes(2, "little")
    with pytest.raises(FrameError, match=f"a window of {1 << 26}"):
        decompress(as_bytes(header), 300)


@given(st.binary(max_size=60), st.integers(0, 200))
def test_any_bytes_are_a_frame_or_refused(raw: bytes, size: int) -> None:
    for given_bytes in (raw, b"\x28\xb5\x2f\xfd" + raw):
        try:
            assert len(decompress(as_bytes(given_bytes), size)) == size
        except FrameError as err:
            assert "compressed bytes: expected" in str(err)  # noqa: PT017 - either is right


def test_what_follows_a_frame_is_refused() -> None:
    frame = compress(as_bytes(b"abc"))
    with pytest.raises(FrameError):
        decompress(np.concatenate([frame, frame]), 3)


def test_a_query_that_would_grow_is_refused_before_it_does() -> None:
    array, parameters = encode(np.zeros((1, 8, 64, 64), np.float32), "int8-zstd")
    assert array.size < 100
    with pytest.raises(FrameError, match="expected a frame of 19 bytes by the shape"):
        decode(array, parameters, (16,))


def test_the_library_is_imported_by_the_first_codec_that_needs_it() -> None:
    program = (
        "import sys, numpy as np; from edge_sdk.wire.codecs import encode;"
        "z = np.ones((1, 4), np.float32); import edge_sdk.bundles.runner;"
        "encode(z, 'int4-channel'); assert 'zstandard' not in sys.modules;"
        "encode(z, 'int8-zstd'); assert 'zstandard' in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True)
