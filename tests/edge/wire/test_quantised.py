"""Codecs that travel as bytes: bounded errors, exact zeros, sizes known from the shape, rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from edge_sdk.errors import FrameError, InputError
from edge_sdk.manifest import Codec
from edge_sdk.wire.codecs import decode, encode, rows_of
from edge_sdk.wire.frames import Tensor, unpack
from edge_sdk.wire.messages import Query, pack_query, read_query
from edge_sdk.wire.rows import alike, stack

Floats = NDArray[np.float32]

SHAPES = arrays.array_shapes(min_dims=1, max_dims=4, max_side=6)
BY_CHANNEL: tuple[Codec, ...] = ("int8-channel", "int4-channel", "int4-channel-zstd")
WHOLE: tuple[Codec, ...] = ("int8-zstd", "int6-zstd", "int4-zstd")
LAST = {"int8-channel": 255, "int8-zstd": 255, "int6-zstd": 63}  # 15 of the others


def floats(size: float) -> st.SearchStrategy[Floats]:
    return SHAPES.flatmap(
        lambda shape: arrays.arrays(
            np.float32, (1, *shape), elements=st.floats(-size, size, width=32)
        )
    )


def restored(z: Floats, codec: Codec) -> Floats:
    return decode(*encode(z, codec), z.shape[1:])


def steps_of(z: Floats, codec: Codec) -> NDArray[np.float64]:
    """One step of each channel, by hand: its range with 0 in it, over the last whole number."""
    sample, last = z[0].astype(np.float64), LAST.get(codec, 15)
    by_channel = codec in BY_CHANNEL and sample.ndim > 1
    rows = sample.reshape(len(sample) if by_channel else 1, -1)
    ranges = np.maximum(rows.max(axis=1), 0) - np.minimum(rows.min(axis=1), 0)
    steps: NDArray[np.float64] = (ranges / last).reshape(-1, *(1 for _ in sample.shape[1:]))
    return steps


@pytest.mark.parametrize("codec", [*BY_CHANNEL, *WHOLE])
@pytest.mark.parametrize("size", [1.0, 1e30])
@given(data=st.data())
def test_a_value_is_off_by_at_most_half_a_step_of_its_channel(
    codec: Codec, size: float, data: st.DataObject
) -> None:
    """A step is rounded up by 1/128 at most; 1e-4 of a step is float32's own rounding."""
    z = data.draw(floats(float(np.float32(size))))
    bound = steps_of(z, codec) * (1 + 1 / 128) * (0.5 + 1e-4) + 2e-38
    assert (np.abs(restored(z, codec)[0].astype(np.float64) - z[0]) <= bound).all()


@pytest.mark.parametrize("codec", [*BY_CHANNEL, *WHOLE])
@given(data=st.data())
def test_zeros_stay_exactly_zero(codec: Codec, data: st.DataObject) -> None:
    z = data.draw(floats(1000.0))
    assert (restored(z, codec)[z == 0] == 0).all()


def test_codes_of_a_channel_by_hand() -> None:
    """Channel 1: 0 to 15 by steps of 1. Channel 2: -2 to 5.5 by steps of 0.5, zero point 4."""
    z = np.array([[[0, 1, 15], [-2, 5.5, 0.2]]], np.float32)
    array, parameters = encode(z, "int4-channel")
    assert parameters == {"codec": "int4-channel"}
    # the upper halves of 1.0 = 0x3f800000 and 0.5 = 0x3f000000, the less significant byte first
    scales, zero_points = [0x80, 0x3F, 0x00, 0x3F], [0, 4]
    values = [0x01, 0xF0, 0xF4]  # 0 1 15 · 0 15 4, two a byte
    assert array.tolist() == [scales + zero_points + values]
    assert decode(array, parameters, (2, 3)).tolist() == [[[0, 1, 15], [-2, 5.5, 0]]]


@pytest.mark.parametrize(("codec", "values"), [("int8-channel", 35), ("int4-channel", 18)])
def test_the_bytes_follow_from_the_shape(codec: Codec, values: int) -> None:
    z = np.ones((1, 5, 7), np.float32)
    array, _ = encode(z, codec)
    assert array.shape == (1, 5 * 3 + values)  # a scale of 2 bytes and a zero point a channel
    vector, _ = encode(np.ones((1, 35), np.float32), codec)
    assert vector.shape == (1, 3 + values)  # no channels: one scale


@pytest.mark.parametrize("codec", BY_CHANNEL)
def test_rows_of_bytes_are_one_tensor_with_their_sizes_beside_it(codec: Codec) -> None:
    draw = np.random.default_rng(0)
    samples = [draw.normal(size=(1, 2, 3)).astype(np.float32) for _ in range(3)]
    alone = [Tensor("z2", *encode(z, codec)) for z in samples]
    assert alike(alone[0], alone[1])
    together = stack(alone)
    read = read_query(unpack(pack_query(Query("q", "digits", "1", together)))).tensor
    assert read is not None
    assert rows_of(read.array, read.parameters) == 3
    expected = np.concatenate([decode(one.array, one.parameters, (2, 3)) for one in alone])
    np.testing.assert_array_equal(decode(read.array, read.parameters, (2, 3)), expected)


def test_tensors_of_two_codecs_are_no_rows_of_one() -> None:
    z = np.ones((1, 4), np.float32)
    one, other = (Tensor("z2", *encode(z, codec)) for codec in BY_CHANNEL[:2])
    assert not alike(one, other)
    assert not alike(one, Tensor("z2", *encode(z, "int8")))


GOOD = np.array([[0x80, 0x3F, 0, 7, 8]], np.uint8)  # (2,) in 8 bits: scale 1, zero point 0
SHORT = np.array([2, 2], np.int64)


@pytest.mark.parametrize(
    ("array", "parameters", "message"),
    [
        (GOOD, {"codec": "zip"}, "codec: expected one of int8-channel"),
        (GOOD, {"codec": ["int8-channel"]}, "codec: expected one of int8-channel"),
        (GOOD[:, :-1], {"codec": "int8-channel"}, "expected 5 bytes by the shape, got 4"),
        (GOOD.astype(np.float32), {"codec": "int8-channel"}, "bytes as uint8"),
        (GOOD[0], {"codec": "int8-channel"}, r"expected bytes \(1, n\)"),
        (np.repeat(GOOD, 2, axis=0), {"codec": "int8-channel"}, r"expected bytes \(1, n\)"),
        (GOOD[0], {"codec": "int8-channel", "sizes": SHORT}, "add up to 5 bytes"),
        (GOOD, {"codec": "int8-channel", "sizes": np.array([5])}, "add up to 5 bytes"),
        (GOOD[0], {"codec": "int8-channel", "sizes": np.array([9, -4])}, "add up to 5 bytes"),
        (GOOD * 0, {"codec": "int8-channel"}, "a scale above 0"),
        (GOOD | np.uint8(0xC0), {"codec": "int8-channel"}, "a scale above 0"),  # NaN
    ],
)
def test_bytes_that_no_sender_encodes_are_refused(
    array: NDArray[Any], parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(FrameError, match=message):
        decode(array, parameters, (2,))


def test_a_server_of_before_refuses_bytes_and_misreads_none() -> None:
    """A server of 0.1.0 reads uint8 by its scale and zero point, which bytes do not have."""
    array, parameters = encode(np.ones((1, 4), np.float32), "int8-channel")
    assert array.dtype == np.uint8
    assert not {"scale", "zero_point"} & parameters.keys()


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e37])
def test_values_that_are_not_finite_are_not_sent(value: float) -> None:
    with pytest.raises(InputError, match="finite"):
        encode(np.full((1, 2), value, np.float32), "int4-channel")
