from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from edge_sdk.errors import FrameError, InputError
from edge_sdk.wire import codecs, frames

FINITE = st.floats(-(2.0**100), 2.0**100, width=32)
ARRAYS = hnp.arrays(np.float32, hnp.array_shapes(max_dims=4, max_side=6), elements=FINITE)


def through(z: NDArray[np.float32], codec: Any) -> NDArray[np.float32]:
    array, parameters = codecs.encode(z, codec)
    return codecs.decode(array, parameters)


@given(ARRAYS)
def test_int8_is_off_by_at_most_half_a_step(z: NDArray[np.float32]) -> None:
    array, parameters = codecs.encode(z, "int8")
    back = codecs.decode(array, parameters)
    assert array.dtype == np.uint8
    assert back.shape == z.shape
    # 1e-5 of a half step: the float32 products on both sides round too
    half_step = parameters["scale"] / 2 * (1 + 1e-5)
    assert np.abs(back.astype(np.float64) - z).max() <= half_step + np.abs(z).max() * 1e-6


@given(ARRAYS)
def test_int8_step_is_the_range_with_zero_over_255(z: NDArray[np.float32]) -> None:
    _, parameters = codecs.encode(z, "int8")
    low, high = min(float(z.min()), 0.0), max(float(z.max()), 0.0)
    if z.min() != z.max() and (high - low) / 255 > 2e-38:
        assert parameters["scale"] == pytest.approx((high - low) / 255, rel=1e-6)


@given(FINITE, hnp.array_shapes(max_dims=3, max_side=4))
def test_int8_keeps_a_constant_exactly(value: float, shape: tuple[int, ...]) -> None:
    z = np.full(shape, value, np.float32)
    np.testing.assert_array_equal(through(z, "int8"), z)


@given(ARRAYS)
def test_int8_keeps_zeros_exactly(z: NDArray[np.float32]) -> None:
    z = z.copy()
    z.flat[0] = 0.0
    assert through(z, "int8").flat[0] == 0.0


@given(hnp.arrays(np.float32, hnp.array_shapes(), elements=st.floats(-65504, 65504, width=32)))
def test_fp16_rounds_to_the_nearest_half(z: NDArray[np.float32]) -> None:
    back = through(z, "fp16")
    # 11 significant bits: half a unit is 2**-11 of the value; 2**-25 below the normal numbers
    assert (np.abs(back - z) <= np.maximum(np.abs(z) * 2.0**-11, 2.0**-25)).all()


@given(hnp.arrays(np.float32, 5, elements=st.floats(-(2.0**110), 2.0**110, width=32)))
def test_fp16_is_never_infinite(z: NDArray[np.float32]) -> None:
    assert np.isfinite(through(z, "fp16")).all()


def test_fp16_clips_to_its_largest_finite_value() -> None:
    z = np.array([1e9, -1e9, 1.0], np.float32)
    np.testing.assert_array_equal(through(z, "fp16"), np.array([65504, -65504, 1], np.float32))


@given(ARRAYS)
def test_fp32_changes_nothing(z: NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(through(z, "fp32"), z)


def test_int8_by_hand() -> None:
    # range -1 .. 4.1 in 255 steps of 0.02, so zero is step 50 and 4.1 is step 255
    z = np.array([-1.0, 0.0, 0.021, 4.1], np.float32)
    array, parameters = codecs.encode(z, "int8")
    assert array.tolist() == [0, 50, 51, 255]
    assert parameters["scale"] == pytest.approx(0.02)
    assert parameters["zero_point"] == 50


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2e36])
def test_a_broken_activation_is_refused_before_it_is_sent(codec: Any, bad: float) -> None:
    with pytest.raises(InputError, match="finite"):
        codecs.encode(np.array([0.0, bad, 1.0], np.float32), codec)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
def test_survives_the_wire(codec: Any) -> None:
    z = np.random.default_rng(0).normal(size=(1, 4, 3, 3)).astype(np.float32)
    array, parameters = codecs.encode(z, codec)
    raw = frames.pack_request({}, [frames.Tensor("z2", array, parameters)])
    received = frames.unpack(raw).tensor("z2")
    back = codecs.decode(received.array, received.parameters)
    np.testing.assert_array_equal(back, codecs.decode(array, parameters))


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"scale": 0.1},
        {"scale": 0.0, "zero_point": 0},
        {"scale": -1.0, "zero_point": 0},
        {"scale": float("nan"), "zero_point": 0},
        {"scale": 1e37, "zero_point": 0},
        {"scale": True, "zero_point": 0},
        {"scale": "1", "zero_point": 0},
        {"scale": 1.0, "zero_point": 256},
        {"scale": 1.0, "zero_point": -1},
        {"scale": 1.0, "zero_point": 1.5},
    ],
)
def test_an_unsound_scale_from_a_peer_is_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(FrameError, match="scale"):
        codecs.decode(np.zeros(3, np.uint8), parameters)


def test_decoded_values_are_finite_for_any_bytes_of_a_peer() -> None:
    back = codecs.decode(np.full(3, 255, np.uint8), {"scale": 1e36, "zero_point": 0})
    assert np.isfinite(back).all()


def test_a_dtype_of_no_codec_is_refused() -> None:
    with pytest.raises(FrameError, match="int64"):
        codecs.decode(np.zeros(3, np.int64), {})


def test_an_empty_tensor_is_no_surprise() -> None:
    z = np.zeros((0, 3), np.float32)
    for codec in ("fp32", "fp16", "int8"):
        assert through(z, codec).shape == (0, 3)
