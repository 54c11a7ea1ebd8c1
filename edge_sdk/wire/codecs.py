"""Codecs: smashed data on the wire, one sample at a time.

    fp32          unchanged
    fp16          half the bytes; values beyond the half-precision range are clipped, never infinite
    int8          a quarter of the bytes; affine UINT8 as in ONNX's QuantizeLinear:
                  value = scale * (q - zero_point); the range includes 0, so zeros stay exactly zero
    int8-channel  a scale for each channel, 8 bits a value (edge_sdk.wire.quantised)
    int4-channel  a scale for each channel, 4 bits a value: an eighth of the bytes
    int8-zstd, int6-zstd, int4-zstd, int4-channel-zstd
                  so many bits a value, by one scale or by channel, and then compressed without loss

Of the first three the receiver needs only the array's dtype and, for int8, the tensor parameters
`scale` and `zero_point`: numbers, or arrays with a value a row (edge_sdk.wire.rows). The others
travel as bytes, with the parameter `codec`; the receiver knows the shape from the model. Pure
numpy: the device encodes in the path of a query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edge_sdk.errors import FrameError, InputError, shown
from edge_sdk.manifest import Codec
from edge_sdk.wire.compression import compress, decompress
from edge_sdk.wire.quantised import SMALLEST_SCALE, Steps, quantise, restore

Array = NDArray[Any]

FP16_MAX: Final = 65504.0
# Keeps 255 * scale finite in float32, for any sender's scale. Larger values mean a broken network.
LARGEST: Final = 1e36
# Tensor parameters of an array that travels as bytes, and the tensor beside those of several rows.
CODEC: Final = "codec"
SIZES: Final = "sizes"
_QUANTISED: Final[Mapping[str, Steps]] = {
    "int8-channel": Steps(8, by_channel=True),
    "int4-channel": Steps(4, by_channel=True),
    "int8-zstd": Steps(8, by_channel=False),
    "int6-zstd": Steps(6, by_channel=False),
    "int4-zstd": Steps(4, by_channel=False),
    "int4-channel-zstd": Steps(4, by_channel=True),
}
_COMPRESSED: Final = "-zstd"


def encode(z: NDArray[np.float32], codec: Codec) -> tuple[Array, dict[str, Any]]:
    """One sample's smashed data, as the array and the tensor parameters to send.

    Args:
        z: float32 of any shape; the range of fp16 and int8 is that of the whole array. For a codec
            that travels as bytes, (1, ...): one sample with its batch axis.
    Returns: an array of the same shape and its parameters; or (1, bytes) UINT8 with the parameter
        `codec`. After `decode`, fp32 is exact; fp16 is off by half a unit in the last place; int8
        by at most `scale / 2`, where scale is the range (0 included) / 255. A constant array is
        exact under int8. Of the others, see `edge_sdk.wire.quantised.quantise`.
    Raises: InputError if z holds NaN, infinity or a magnitude above 1e36.
    """
    low, high = _range(z)
    if codec in _QUANTISED:
        body = quantise(z[0], _QUANTISED[codec])
        return (compress(body) if is_compressed(codec) else body)[None], {CODEC: codec}
    return _ENCODERS[codec](z, low, high)


def decode(
    array: Array, parameters: Mapping[str, Any], shape: tuple[int, ...] | None = None
) -> NDArray[np.float32]:
    """The float32 values of an array from `encode`: its shape, or (rows, *shape) of bytes.

    Args:
        shape: of one sample, which an array that travels as bytes does not tell.
    Raises: FrameError for a dtype of no codec, int8 without a valid scale and zero point, or bytes
        that are not those of the shape.
    """
    if CODEC in parameters:
        return _decode_bytes(array, parameters, shape)
    if array.dtype == np.uint8:
        scale, zero_point = _affine(array, parameters)
        values = array.astype(np.float32)
        values -= zero_point
        values *= scale
        return values
    if array.dtype in (np.float16, np.float32):
        return array.astype(np.float32, copy=False)
    raise FrameError(f"smashed data: expected float32, float16 or uint8, got {array.dtype}")


def is_compressed(codec: Codec) -> bool:
    """Whether the codec needs the library of edge_sdk.wire.compression."""
    return codec.endswith(_COMPRESSED)


def rows_of(array: Array, parameters: Mapping[str, Any]) -> int:
    """The number of samples in an array, which a receiver bounds before it decodes them."""
    sizes = parameters.get(SIZES)
    if CODEC in parameters and isinstance(sizes, np.ndarray):
        return len(sizes)
    return len(array) if array.ndim else 0


def _decode_bytes(
    array: Array, parameters: Mapping[str, Any], shape: tuple[int, ...] | None
) -> NDArray[np.float32]:
    word = parameters[CODEC]
    steps = _QUANTISED.get(word) if isinstance(word, str) else None
    if steps is None or shape is None:
        known = ", ".join(_QUANTISED)
        raise FrameError(f"smashed data: codec: expected one of {known}, got {shown(word)}")
    samples = np.empty((rows_of(array, parameters), *shape), np.float32)
    for sample, body in zip(samples, bodies_of(array, parameters), strict=True):
        values = decompress(body, steps.size(shape)) if is_compressed(word) else body
        sample[...] = restore(values, steps, shape)
    return samples


def bodies_of(array: Array, parameters: Mapping[str, Any]) -> Iterator[NDArray[np.uint8]]:
    """The bytes of each row of an array that travels as bytes.

    Raises: FrameError for an array of another dtype or shape, or sizes that do not add up.
    """
    sizes = parameters.get(SIZES)
    if array.dtype != np.uint8:
        raise FrameError(f"smashed data: expected bytes as uint8, got {array.dtype}")
    if not isinstance(sizes, np.ndarray):
        if array.ndim != 2 or len(array) != 1:
            raise FrameError(f"smashed data: expected bytes (1, n), got {shown(array.shape)}")
        yield array[0]
        return
    if array.ndim != 1 or (sizes < 0).any() or sum(sizes.tolist()) != len(array):
        raise FrameError(f"smashed data: expected the rows' sizes to add up to {array.size} bytes")
    start = 0
    for size in sizes.tolist():
        yield array[start : start + size]
        start += size


def _range(z: NDArray[np.float32]) -> tuple[float, float]:
    if not z.size:
        return 0.0, 0.0
    low, high = float(z.min()), float(z.max())
    if not (low >= -LARGEST and high <= LARGEST):  # NaN fails every comparison
        raise InputError(
            f"smashed data: expected finite values, got {low:g} to {high:g};"
            " check the bundle's weights and the input"
        )
    return low, high


def _encode_fp32(
    z: NDArray[np.float32],
    _low: float,
    _high: float,
) -> tuple[Array, dict[str, Any]]:
    return z, {}


def _encode_fp16(z: NDArray[np.float32], low: float, high: float) -> tuple[Array, dict[str, Any]]:
    if low < -FP16_MAX or high > FP16_MAX:
        z = z.clip(-FP16_MAX, FP16_MAX)
    return z.astype(np.float16), {}


def _encode_int8(z: NDArray[np.float32], low: float, high: float) -> tuple[Array, dict[str, Any]]:
    if low == high:
        return _constant(z.shape, low)
    low, high = min(low, 0.0), max(high, 0.0)
    # rounded to float32 first: sender and receiver then compute with the same number
    scale = float(np.float32(max((high - low) / 255, SMALLEST_SCALE)))
    zero_point = round(-low / scale)
    steps = z * np.float32(1 / scale)
    np.rint(steps, out=steps)
    steps += zero_point
    # if the ends of the range are no whole numbers of steps, rounding reaches 256 at most
    np.clip(steps, 0, 255, out=steps)
    return steps.astype(np.uint8), {"scale": scale, "zero_point": zero_point}


def _constant(shape: tuple[int, ...], value: float) -> tuple[Array, dict[str, Any]]:
    """The code of a constant array: one step of exactly the value's size, up or down from zero."""
    zero_point = 1 if value < 0 else 0
    steps = np.full(shape, 1 if value > 0 else 0, np.uint8)
    return steps, {"scale": abs(value) or 1.0, "zero_point": zero_point}


def _affine(array: Array, parameters: Mapping[str, Any]) -> tuple[Any, Any]:
    """Scale and zero point as float32: numbers of the whole array, or arrays of its rows."""
    scale, zero_point = parameters.get("scale"), parameters.get("zero_point")
    if isinstance(scale, np.ndarray) and isinstance(zero_point, np.ndarray):
        if (scale > 0).all() and (scale <= LARGEST).all():  # NaN fails every comparison
            of_rows = (-1, *(1 for _ in array.shape[1:]))
            return scale.reshape(of_rows), zero_point.astype(np.float32).reshape(of_rows)
        raise FrameError("smashed data: expected a scale above 0 for each row")
    if (
        (type(scale) is float or type(scale) is int)
        and type(zero_point) is int
        and 0 < scale <= LARGEST
        and 0 <= zero_point <= 255
    ):
        return np.float32(scale), np.float32(zero_point)
    raise FrameError(
        "smashed data: expected a scale above 0 and a zero_point from 0 to 255,"
        f" got {scale!r:.100} and {zero_point!r:.100}"
    )


_ENCODERS: Final[
    Mapping[Codec, Callable[[NDArray[np.float32], float, float], tuple[Array, dict[str, Any]]]]
] = {"fp32": _encode_fp32, "fp16": _encode_fp16, "int8": _encode_int8}
