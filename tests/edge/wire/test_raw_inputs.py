"""Raw inputs on the wire: they come back to the last bit, and take fewer bytes than a PNG."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from PIL import Image

from edge_sdk.errors import FrameError
from edge_sdk.wire.compression import compress
from edge_sdk.wire.raw_inputs import PIXELS, PLANES, decode_raw, encode_raw
from edge_sdk.wire.rows import stack

SHAPES = st.one_of(
    arrays.array_shapes(min_dims=1, max_dims=4, max_side=5),
    st.sampled_from([(3, 4, 5), (4, 5, 3), (1, 6, 6), (6, 6, 1), (5, 5, 4), (3, 3, 3)]),
)
INPUTS = SHAPES.flatmap(
    lambda shape: st.one_of(
        arrays.arrays(np.uint8, shape),
        arrays.arrays(np.float32, shape, elements=st.integers(0, 255).map(float)),
        arrays.arrays(np.float32, shape, elements=st.floats(-1e6, 1e6, width=32)),
        arrays.arrays(np.int64, shape, elements=st.integers(-(2**40), 2**40)),
    )
)


@given(INPUTS)
def test_inputs_come_back_to_the_last_bit(x: NDArray[np.generic]) -> None:
    tensor = encode_raw(x)
    back = decode_raw(tensor.array, tensor.parameters, str(x.dtype), x.shape)
    assert back.dtype == x.dtype
    assert back.tobytes() == x[None].tobytes()


@given(st.lists(arrays.arrays(np.uint8, (3, 4, 4)), min_size=2, max_size=4))
def test_inputs_together_come_back_too(samples: list[NDArray[np.uint8]]) -> None:
    rows = stack([encode_raw(x) for x in samples])
    back = decode_raw(rows.array, rows.parameters, "uint8", (3, 4, 4))
    np.testing.assert_array_equal(back, np.stack(samples))


def gradient() -> NDArray[np.uint8]:
    """A picture in colours that changes slowly, with a little noise, (3, 32, 32)."""
    down, right = np.mgrid[:32, :32]
    noise = np.random.default_rng(0).integers(0, 3, (32, 32))
    grey = 3 * down + 2 * right + noise
    return np.stack([grey, grey + 20, grey + 40]).astype(np.uint8)


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_a_picture_takes_fewer_bytes_than_a_png(dtype: str) -> None:
    x = gradient()
    file = BytesIO()
    Image.fromarray(x.transpose(1, 2, 0)).save(file, "PNG", optimize=True)
    tensor = encode_raw(x.astype(dtype))
    assert tensor.parameters == {"codec": PIXELS}
    assert tensor.array.nbytes < len(file.getvalue())


def test_a_negative_zero_is_no_pixel() -> None:
    x = np.array([-0.0, 1.0], np.float32)
    assert encode_raw(x).parameters == {"codec": PLANES}


def bytes_of(*values: int) -> NDArray[np.uint8]:
    return compress(np.array(values, np.uint8))[None]


NAN = np.frombuffer(np.array([np.nan] * 2, "<f4").tobytes(), np.uint8).reshape(2, 4).T.ravel()


@pytest.mark.parametrize(
    ("array", "codec", "message"),
    [
        (bytes_of(0, 1, 2), "zip", "codec: expected one of pixels-zstd, planes-zstd"),
        (bytes_of(0, 1), PIXELS, "expected a frame of 3 bytes by the shape"),
        (bytes_of(0, 1), PLANES, "expected a frame of 8 bytes by the shape"),
        (bytes_of(8, 1, 2), PIXELS, "the way of its pixels, got 8"),
        (bytes_of(2, 1, 2), PIXELS, "the way of its pixels, got 2"),
        (bytes_of(4, 1, 2), PIXELS, "the way of its pixels, got 4"),
        (bytes_of(*NAN.tolist()), PLANES, "finite"),
    ],
)
def test_bytes_that_no_device_sends_are_refused(
    array: NDArray[np.uint8], codec: str, message: str
) -> None:
    with pytest.raises(FrameError, match=message):
        decode_raw(array, {"codec": codec}, "float32", (2,))
