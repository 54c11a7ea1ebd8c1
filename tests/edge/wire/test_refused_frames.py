"""What is no frame is refused, and the error says why."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from edge_sdk.errors import FrameError
from edge_sdk.wire import frames
from edge_sdk.wire.frames import Tensor
from tests.edge.wire.generated_frames import framed, one_tensor, prefixed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": None}, "a name of 1 to 100"),
        ({"name": 7}, "a name of 1 to 100"),
        ({"datatype": "FP64"}, "expected one of FP32, .* got 'FP64'"),
        ({"datatype": "BYTES"}, "expected one of FP32"),
        ({"datatype": ["FP32"]}, "expected one of FP32"),
        ({"datatype": None}, "expected one of FP32"),
        ({"shape": None}, "sizes, got None"),
        ({"shape": "2"}, "sizes, got '2'"),
        ({"shape": [-2, -1]}, "sizes"),
        ({"shape": [2.0]}, "sizes"),
        ({"shape": [True, 2]}, "sizes"),
        ({"shape": [2**64]}, "sizes"),
        ({"shape": [2**62, 2**62]}, "at most 4000000 elements"),
        ({"shape": [0, 2**62]}, "at most 4000000 elements"),
        ({"shape": [3]}, "3 values by its shape, got 2"),
        ({"shape": []}, "1 values by its shape, got 2"),
        ({"data": None}, "data as a list, or binary_data_size"),
        ({"data": {"0": 1}}, "data as a list, or binary_data_size"),
        ({"data": [1, [2]]}, "lists and numbers mixed"),
        ({"data": [[1, 2], [3]], "shape": [3]}, "different lengths"),
        ({"data": ["1", "2"]}, "expected numbers"),
        ({"data": [True, False]}, "expected numbers"),
        ({"data": [None, 1]}, "expected numbers"),
        ({"data": [1e39, 1]}, "expected finite values"),
        ({"data": [65520, 1], "datatype": "FP16"}, "expected finite values"),
        ({"data": [1.0, 2], "datatype": "UINT8"}, "whole numbers for UINT8"),
        ({"data": [256, 2], "datatype": "UINT8"}, "do not fit UINT8"),
        ({"data": [-129, 2], "datatype": "INT8"}, "do not fit INT8"),
        ({"data": [2**63, 2], "datatype": "INT64"}, "do not fit INT64"),
        ({"parameters": []}, r"tensor x: parameters: expected an object, got \[\]"),
        ({"parameters": False}, "tensor x: parameters"),
        ({"parameters": {"scale": [0.5]}}, "tensor x: parameters: 'scale': expected a string, num"),
        ({"parameters": {"binary_data_size": 4}}, "8 bytes by its shape, 4 announced"),
        ({"parameters": {"binary_data_size": 8}}, "8 bytes announced, 0 left"),
        ({"parameters": {"binary_data_size": -8}}, "-8 announced"),
        ({"parameters": {"binary_data_size": 8.0}}, "8.0 announced"),
        ({"parameters": {"binary_data_size": [8]}}, "'binary_data_size': expected a string, num"),
        ({"parameters": {"binary_data_size": True}, "shape": [1], "datatype": "INT8"}, "True ann"),
    ],
)
def test_a_wrong_tensor_is_refused_saying_why(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FrameError, match=message):
        frames.unpack(framed(one_tensor(**changes)))


@pytest.mark.parametrize("member", ["name", "datatype", "shape", "data"])
def test_a_tensor_without_a_member_is_refused(member: str) -> None:
    header = one_tensor()
    del header["inputs"][0][member]
    with pytest.raises(FrameError):
        frames.unpack(framed(header))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "expected a 4-byte length, got 0"),
        (b"\0\0\0", "expected a 4-byte length, got 3"),
        (b"\0\0\0\3{}", "JSON of 3 bytes announced, got 2"),
        (b"\xff\xff\xff\xff{}", "JSON of at most 65536 bytes, got 4294967295"),
        (prefixed(b""), "not JSON"),
        (prefixed(b"\xff{}"), "not JSON"),
        (prefixed(b"[]"), "expected a JSON object, got list"),
        (prefixed(b"{}", b"x"), "1 bytes after the last tensor"),
        (framed({"inputs": None}), "tensors: expected a list of objects"),
        (framed({"outputs": {}}), "tensors: expected a list of objects"),
        (framed({"inputs": [[]]}), "tensors: expected a list of objects"),
        (framed({"inputs": [], "outputs": [3]}), "requested outputs: expected a list of objects"),
        (framed({"inputs": [], "outputs": [{}]}), "requested output: expected a name, got None"),
        (framed({"inputs": [], "id": 5}), "id: expected a string, got 5"),
        (framed({"inputs": [], "model_name": []}), "model_name: expected a string"),
        (framed({"inputs": [], "model_version": 3}), "model_version: expected a string, got 3"),
        (framed({"outputs": [], "error": {}}), "error: expected a string"),
        (framed({"inputs": [], "parameters": {"a": [1]}}), "'a': expected a string, number or"),
        (framed({"inputs": [], "outputs": [{"name": "y", "parameters": {"a": {}}}]}), "'a': expec"),
        (framed({"inputs": [], "parameters": 0}), "frame: parameters: expected an object, got 0"),
        (framed(one_tensor(data=[float("nan"), 1])), "not JSON"),
        (framed(one_tensor(data=[float("inf"), 1])), "not JSON"),
        (prefixed(b"[" * 60_000), "not JSON"),
    ],
)
def test_what_is_no_frame_is_refused_saying_why(raw: bytes, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        frames.unpack(raw)


def test_a_negative_header_length_is_refused() -> None:
    with pytest.raises(FrameError, match="JSON of -1 bytes announced"):
        frames.decode(b"{}", -1, frames.HTTP_LIMITS)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_value_that_is_not_finite_is_refused(value: float, dtype: type[np.floating[Any]]) -> None:
    raw = frames.pack_request({}, [Tensor("x", np.array([0, value, 1], dtype))])
    with pytest.raises(FrameError, match="tensor x: expected finite values"):
        frames.unpack(raw)
