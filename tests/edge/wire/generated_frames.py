"""Frames to try: generated ones, and the bytes of a frame written out by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_sdk.wire import frames
from edge_sdk.wire.frames import Tensor

DTYPES = tuple(dtype.newbyteorder("=") for dtype in frames.DATATYPES.values())
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
parameters = st.dictionaries(st.text(max_size=8), scalars, max_size=3).map(
    lambda given_: {key: value for key, value in given_.items() if key != "binary_data_size"}
)
headers = st.fixed_dictionaries(
    {}, optional={"id": st.text(max_size=40), "model_name": st.text(), "parameters": parameters}
)
requests = st.lists(st.tuples(st.text(max_size=20), parameters), max_size=3)


def examples(normal: int) -> settings:
    """That many examples in the normal run, and as many times more as the profile asks for."""
    return settings(max_examples=normal * settings().max_examples // 100)


@st.composite
def arrays(draw: st.DrawFn) -> NDArray[Any]:
    """Any dtype of the wire, rank 0 to 8, empty ones too; finite values of every magnitude."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.sampled_from((0, 1, 1, 2, 2, 3)), max_size=8)))
    count = math.prod(shape)
    random_bytes = np.random.default_rng(draw(st.integers(0, 2**32))).bytes(count * dtype.itemsize)
    array = np.frombuffer(random_bytes, dtype)
    if dtype.kind == "f":
        array = np.where(np.isfinite(array), array, dtype.type(0))
    return array.reshape(shape)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """One named tensor with its parameters."""
    return Tensor(draw(st.text(min_size=1, max_size=100)), draw(arrays()), draw(parameters))


def prefixed(text: bytes, tail: bytes = b"") -> bytes:
    """`text` as the JSON of a frame as it goes over MQTT."""
    return len(text).to_bytes(4, "big") + text + tail


def framed(header: object, tail: bytes = b"") -> bytes:
    """The same for a value; the standard library writes NaN and integers of any length."""
    return prefixed(json.dumps(header).encode(), tail)


def one_tensor(**changes: object) -> dict[str, Any]:
    """A request of one tensor of two floats in JSON, with some of its members changed."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1.5, -2], **changes}
    return {"inputs": [tensor]}
