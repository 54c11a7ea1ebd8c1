from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_sdk.errors import InputError
from edge_sdk.manifest import TensorSpec
from edge_sdk.pipeline.samples import read_samples
from tests.damage import damaged_arrays


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """2 rows of 3 pixels, red above blue."""
    pixels = np.zeros((2, 3, 3), np.uint8)
    pixels[0, :, 0] = 200
    pixels[1, :, 2] = 100
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


def test_channels_are_where_the_bundle_has_them(picture: Path) -> None:
    ((_, first),) = read_samples(picture, TensorSpec("float32", (3, 2, 3)))
    ((_, last),) = read_samples(picture, TensorSpec("uint8", (2, 5, 3)))
    assert first.dtype == np.float32
    assert first[0].tolist() == [[200, 200, 200], [0, 0, 0]]
    assert last.shape == (2, 5, 3)
    assert last[0, 0].tolist() == [200, 0, 0]
    assert last[1, 4].tolist() == [0, 0, 100]


def test_grey_pictures_of_both_layouts(picture: Path) -> None:
    ((_, first),) = read_samples(picture, TensorSpec("uint8", (1, 2, 3)))
    ((_, last),) = read_samples(picture, TensorSpec("uint8", (2, 5, 1)))
    assert first.shape == (1, 2, 3)
    assert last.shape == (2, 5, 1)
    assert first[0, 0, 0] == last[0, 0, 0]


@pytest.mark.parametrize("shape", [(1, 2, 3), (3, 2, 3), (2, 5, 3)])
@pytest.mark.parametrize(
    ("mode", "ending"), [("I;16", "png"), ("I;16", "tiff"), ("I", "tiff"), ("F", "tiff")]
)
def test_a_picture_that_a_byte_cannot_hold_is_refused(
    mode: str, ending: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    file = tmp_path / f"depth.{ending}"
    Image.new(mode, (3, 2), 30_000).save(file)
    expected = rf"depth\.{ending}: expected 8-bit grey or colour, got Pillow's mode {mode}"
    with pytest.raises(InputError, match=expected):
        list(read_samples(file, TensorSpec("uint8", shape)))


def npy(header: str) -> bytes:
    """A file in numpy's format with that header."""
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(64)


def header(descr: str = "'<f4'", shape: str = "(2, 3)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"


@pytest.mark.parametrize(
    "content",
    [
        b"PK\x03\x04" + bytes(60),  # the beginning of a ZIP file
        npy("{[1]: 2}"),
        npy("{'descr': '<f4', 1: False, 'shape': (2, 3)}"),
        npy(header(shape=f"({10**24},)")),
        npy(header(descr="()")),
        npy("1" + "+1" * 4000),
    ],
    ids=["zip", "key", "keys", "size", "type", "depth"],
)
def test_a_damaged_npy_file_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "torn.npy"
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"torn\.npy: not a readable \.npy file"):
        list(read_samples(file, TensorSpec("float32", (1, 2, 3))))


def test_whichever_bit_of_an_array_is_damaged_it_is_read_or_refused_by_name(tmp_path: Path) -> None:
    refused = set()
    for damaged in damaged_arrays(np.zeros((1, 2, 3), np.float32)):
        (tmp_path / "worn.npy").write_bytes(damaged)
        try:
            ((_, sample),) = read_samples(tmp_path / "worn.npy", TensorSpec("float32", (1, 2, 3)))
        except InputError as err:
            assert "worn.npy: " in str(err)  # noqa: PT017 - some bits are of the numbers
            refused.add(type(err.__cause__).__name__)
        else:
            assert sample.shape == (1, 2, 3)
    assert refused > {"BadZipFile", "TokenError", "ValueError"}


def test_bundle_that_takes_no_images(picture: Path) -> None:
    with pytest.raises(InputError, match="takes arrays of shape"):
        list(read_samples(picture, TensorSpec("float32", (9, 2, 4))))
