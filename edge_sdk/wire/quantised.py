"""Quantised samples: whole numbers of steps, as bytes; the sizes of the steps stand in front.

    scale        C numbers of 2 bytes: the upper half of a float32, rounded up
    zero point   C bytes
    values       one byte each in 8 bits; two a byte in 4 bits, the first in the upper half

    value = scale_c * (q - zero_point_c); the range of a channel includes 0, so zeros stay zero

C is the number of channels, the first axis of a sample with more axes than one, or 1 where the
whole sample has one scale. The shape says the number of bytes, before any is looked at. Pure numpy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edge_sdk.errors import FrameError

Array = NDArray[Any]
Floats = NDArray[np.float32]

# A smaller scale is no normal float32, and 1 / scale would overflow.
SMALLEST_SCALE: Final = 2e-38
# Keeps 255 * scale finite in float32, for any sender's scale.
LARGEST_SCALE: Final = 1e36
_OF_CHANNEL: Final = 3  # bytes: scale and zero point


@dataclass(frozen=True, slots=True)
class Steps:
    """Step sizes of a sample: how it becomes whole numbers.

    Attributes:
        bits: of a value: 4, or up to 8, which take a byte each.
        by_channel: a scale for each channel, not one for the sample.
    """

    bits: int
    by_channel: bool

    @property
    def last(self) -> int:
        """The largest whole number: 255 in 8 bits."""
        return (1 << self.bits) - 1

    def channels(self, shape: tuple[int, ...]) -> int:
        """Scales of one sample of that shape."""
        return shape[0] if self.by_channel and len(shape) > 1 else 1

    def size(self, shape: tuple[int, ...]) -> int:
        """Bytes of one sample of that shape."""
        values = math.prod(shape)
        return _OF_CHANNEL * self.channels(shape) + (-(-values // 2) if self.bits == 4 else values)


def quantise(z: Floats, steps: Steps) -> NDArray[np.uint8]:
    """The bytes of one sample.

    Args:
        z: one sample without a batch axis; finite, magnitudes up to 1e36.
    Returns: `steps.size(z.shape)` bytes. After `restore`, a value is off by at most half a step
        of its channel; a step is the range (0 included) / `steps.last`, rounded up by 1/128 at
        most.
    """
    rows = z.reshape(steps.channels(z.shape), -1)
    low = np.minimum(rows.min(axis=1, initial=0), 0)
    high = np.maximum(rows.max(axis=1, initial=0), 0)
    halves = _upper_halves(np.maximum((high - low) / np.float32(steps.last), SMALLEST_SCALE))
    scale = _floats(halves)
    zero_point = np.rint(-low / scale)
    q = rows / scale[:, None]
    np.rint(q, out=q)
    q += zero_point[:, None]
    # if the ends of the range are no whole numbers of steps, rounding passes the last by one
    np.clip(q, 0, steps.last, out=q)
    values = q.astype(np.uint8).ravel()
    if steps.bits == 4:
        values = _pairs(values)
    return np.concatenate([halves.view(np.uint8), zero_point.astype(np.uint8), values])


def restore(body: NDArray[np.uint8], steps: Steps, shape: tuple[int, ...]) -> Floats:
    """The sample in bytes of `quantise`: float32 of that shape.

    Raises: FrameError for another number of bytes than the shape's, or a scale that cannot be.
    """
    size = steps.size(shape)
    if len(body) != size:
        raise FrameError(f"smashed data: expected {size} bytes by the shape, got {len(body)}")
    channels, count = steps.channels(shape), math.prod(shape)
    scale = _floats(np.frombuffer(body[: 2 * channels].tobytes(), "<u2"))
    if not ((scale > 0) & (scale <= LARGEST_SCALE)).all():  # NaN fails every comparison
        raise FrameError("smashed data: expected a scale above 0 for each channel")
    zero_point = body[2 * channels : _OF_CHANNEL * channels].astype(np.float32)
    values = body[_OF_CHANNEL * channels :]
    if steps.bits == 4:
        values = _singles(values)[:count]
    z = values.astype(np.float32).reshape(channels, -1)
    z -= zero_point[:, None]
    z *= scale[:, None]
    return z.reshape(shape)


def _upper_halves(scale: Floats) -> NDArray[np.uint16]:
    """The upper 16 bits of float32 above 0, rounded up."""
    bits = scale.astype("<f4").view("<u4")
    return ((bits + np.uint32(0xFFFF)) >> np.uint32(16)).astype("<u2")


def _floats(halves: NDArray[np.uint16]) -> Floats:
    return (halves.astype("<u4") << np.uint32(16)).view("<f4").astype(np.float32, copy=False)


def _pairs(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    if len(values) % 2:
        values = np.append(values, np.uint8(0))
    return (values[0::2] << np.uint8(4)) | values[1::2]


def _singles(pairs: NDArray[np.uint8]) -> NDArray[np.uint8]:
    values = np.empty(2 * len(pairs), np.uint8)
    values[0::2] = pairs >> np.uint8(4)
    values[1::2] = pairs & np.uint8(15)
    return values
