"""Frames: what is sent comes back on every carrier, up to the limits."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from edge_sdk.errors import FrameError, FrameTooLargeError
from edge_sdk.wire import frames
from edge_sdk.wire.frames import Frame, Limits, Tensor
from tests.edge.wire.generated_frames import (
    DTYPES,
    arrays,
    examples,
    framed,
    headers,
    one_tensor,
    parameters,
    prefixed,
    requests,
    tensors,
)


def same(left: Tensor, right: Tensor) -> bool:
    """Bit for bit: -0.0 is not 0.0 here."""
    return (
        (left.name, left.parameters) == (right.name, right.parameters)
        and (left.array.dtype, left.array.shape) == (right.array.dtype, right.array.shape)
        and left.array.tobytes() == right.array.tobytes()
    )


# round trips


@examples(250)
@given(headers, st.lists(tensors(), max_size=4), requests)
def test_a_request_survives_every_carrier(
    header: dict[str, Any], sent: list[Tensor], requested: list[tuple[str, dict[str, Any]]]
) -> None:
    outputs = [{"name": name, "parameters": asked} for name, asked in requested]
    over_mqtt = frames.unpack(frames.pack_request({**header, "outputs": outputs}, sent))

    text, parts = frames.encode({**header, "outputs": outputs}, sent, key="inputs")
    over_http = frames.decode(b"".join((text, *parts)), len(text), frames.HTTP_LIMITS)

    described = [
        {
            "name": tensor.name,
            "datatype": dict(zip(DTYPES, frames.DATATYPES, strict=True))[tensor.array.dtype],
            "shape": tensor.array.shape,
            "data": tensor.array.tolist() if tensor.array.ndim else [tensor.array.item()],
            "parameters": tensor.parameters,
        }
        for tensor in sent
    ]
    as_json = json.dumps({**header, "inputs": described, "outputs": outputs}).encode()
    json_only = frames.decode(as_json, None, frames.HTTP_LIMITS)

    for frame in (over_mqtt, over_http, json_only):
        assert frame.header == header
        assert frame.requested == tuple(requested)
        assert len(frame.tensors) == len(sent)
        assert all(map(same, frame.tensors, sent))
        assert all(tensor.array.flags.aligned for tensor in frame.tensors)


@examples(100)
@given(headers, st.lists(tensors(), max_size=4))
def test_a_response_survives_and_asks_for_nothing(
    header: dict[str, Any], sent: list[Tensor]
) -> None:
    frame = frames.unpack(frames.pack_response(header, sent))
    assert frame.header == header
    assert frame.parameters == header.get("parameters", {})
    assert frame.requested == ()
    assert all(map(same, frame.tensors, sent))


def test_a_frame_is_the_bytes_the_protocol_says() -> None:
    sent = Tensor("x", np.array([[1, 2], [3, 255]], np.uint8), {"scale": 0.5})
    text = (
        b'{"id":"q","inputs":[{"name":"x","datatype":"UINT8","shape":[2,2],'
        b'"parameters":{"scale":0.5,"binary_data_size":4}}]}'
    )
    assert frames.pack_request({"id": "q"}, [sent]) == prefixed(text, b"\x01\x02\x03\xff")


def test_a_strided_array_is_sent_row_by_row() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    for view in (rows.T, rows[:, ::2], rows[::-1], np.asfortranarray(rows)):
        received = frames.unpack(frames.pack_request({}, [Tensor("x", view)]))
        np.testing.assert_array_equal(received.tensor("x").array, view)


@pytest.mark.parametrize("dtype", ["float64", "int32", "bool", "complex64", "U3", "object", ">f4"])
def test_a_dtype_off_the_list_is_not_sent(dtype: str) -> None:
    with pytest.raises(FrameError, match=r"tensor x: expected one of FP32, .*got"):
        frames.pack_request({}, [Tensor("x", np.zeros(1, dtype))])


def test_a_missing_tensor_is_named_with_those_there_are() -> None:
    tensor = Tensor("a", np.zeros(1, np.int8))
    with pytest.raises(FrameError, match=r"expected a tensor 'z3', got a$"):
        Frame({}, (tensor,)).tensor("z3")
    with pytest.raises(FrameError, match=r"got none$"):
        Frame({}).tensor("z3")


# an implementation that is not ours: NVIDIA's client


@examples(150)
@given(st.lists(arrays(), min_size=1, max_size=3), st.text(max_size=10), st.data())
def test_tritonclient_requests_are_read(
    sent: list[NDArray[Any]], request_id: str, data: st.DataObject
) -> None:
    inputs = []
    for number, array in enumerate(sent):
        datatype = dict(zip(DTYPES, frames.DATATYPES, strict=True))[array.dtype]
        tensor = InferInput(f"t{number}", list(array.shape), datatype)
        inputs.append(tensor.set_data_from_numpy(array, binary_data=data.draw(st.booleans())))
    body, header_bytes = InferenceServerClient.generate_request_body(
        inputs,
        outputs=[InferRequestedOutput("logits", binary_data=True, class_count=2)],
        request_id=request_id,
        parameters={"deadline_ms": 250},
    )
    frame = frames.decode(body, header_bytes, frames.HTTP_LIMITS)
    assert frame.header.get("id", "") == request_id
    assert frame.parameters == {"deadline_ms": 250}
    assert frame.requested == (("logits", {"binary_data": True, "classification": 2}),)
    for number, array in enumerate(sent):
        received = frame.tensor(f"t{number}").array
        assert (received.dtype, received.shape) == (array.dtype, array.shape)
        assert received.tobytes() == array.tobytes()


@examples(150)
@given(st.lists(arrays(), max_size=3), parameters)
def test_tritonclient_reads_our_responses(sent: list[NDArray[Any]], asked: dict[str, Any]) -> None:
    header = {"id": "7", "model_name": "net", "parameters": asked}
    answer = [Tensor(f"t{number}", array) for number, array in enumerate(sent)]
    text, parts = frames.encode(header, answer, key="outputs")
    body = b"".join((text, *parts))
    result = InferenceServerClient.parse_response_body(body, header_length=len(text))
    assert result.get_response()["id"] == "7"
    assert result.get_response()["parameters"] == asked
    for number, array in enumerate(sent):
        received = result.as_numpy(f"t{number}")
        assert (received.dtype, received.shape) == (array.dtype, array.shape)
        assert received.tobytes() == array.tobytes()


# limits, exactly


def test_a_frame_may_be_as_long_as_the_limit() -> None:
    raw = frames.pack_request({}, [Tensor("x", np.zeros(100, np.uint8))])
    frames.unpack(raw, Limits(frame_bytes=len(raw)))
    with pytest.raises(FrameTooLargeError, match=f"at most {len(raw) - 1} bytes, got {len(raw)}"):
        frames.unpack(raw, Limits(frame_bytes=len(raw) - 1))

    body, header_bytes = raw[4:], int.from_bytes(raw[:4], "big")
    frames.decode(body, header_bytes, Limits(frame_bytes=len(body)))
    with pytest.raises(FrameTooLargeError):
        frames.decode(body, header_bytes, Limits(frame_bytes=len(body) - 1))


def test_the_default_limit_over_mqtt_is_two_million_bytes() -> None:
    envelope = (
        len(frames.pack_request({}, [Tensor("x", np.zeros(1_900_000, np.uint8))])) - 1_900_000
    )
    room = 2_000_000 - envelope
    raw = frames.pack_request({}, [Tensor("x", np.zeros(room, np.uint8))])
    assert len(raw) == 2_000_000
    assert frames.unpack(raw).tensor("x").array.size == room
    with pytest.raises(FrameTooLargeError):
        frames.unpack(frames.pack_request({}, [Tensor("x", np.zeros(room + 1, np.uint8))]))


@pytest.mark.parametrize("carrier", ["mqtt", "http", "json"])
def test_the_json_may_be_as_long_as_the_limit(carrier: str) -> None:
    text = json.dumps(one_tensor()).encode()

    def read(limits: Limits) -> Frame:
        if carrier == "mqtt":
            return frames.unpack(prefixed(text), limits)
        return frames.decode(text, len(text) if carrier == "http" else None, limits)

    read(Limits(header_bytes=len(text)))
    with pytest.raises(FrameTooLargeError, match=f"at most {len(text) - 1} bytes, got {len(text)}"):
        read(Limits(header_bytes=len(text) - 1))


def test_sixteen_tensors_and_no_more() -> None:
    one = one_tensor()["inputs"]
    assert len(frames.unpack(framed({"inputs": one * 16})).tensors) == 16
    with pytest.raises(FrameTooLargeError, match="at most 16 tensors, got 17"):
        frames.unpack(framed({"inputs": one * 17}))
    with pytest.raises(FrameTooLargeError):
        frames.unpack(framed({"outputs": one * 17}))


def test_sixteen_requested_outputs_and_no_more() -> None:
    asked = [{"name": "y"}]
    assert len(frames.unpack(framed({"inputs": [], "outputs": asked * 16})).requested) == 16
    with pytest.raises(FrameTooLargeError, match="at most 16 requested outputs, got 17"):
        frames.unpack(framed({"inputs": [], "outputs": asked * 17}))


def test_rank_eight_and_no_more() -> None:
    frames.unpack(framed(one_tensor(shape=[1] * 7 + [2])))
    with pytest.raises(FrameError, match="expected up to 8 sizes"):
        frames.unpack(framed(one_tensor(shape=[1] * 8 + [2])))


def test_names_of_a_hundred_characters_and_no_more() -> None:
    frames.unpack(framed(one_tensor(name="é" * 100)))
    for name in ("é" * 101, ""):
        with pytest.raises(FrameError, match="expected a name of 1 to 100 characters"):
            frames.unpack(framed(one_tensor(name=name)))


@pytest.mark.parametrize("shape", [[6], [2, 3], [1, 6, 1], [0, 6], [6, 0, 1]])
def test_as_many_elements_as_the_limit_and_no_more(shape: list[int]) -> None:
    array = np.zeros(shape, np.int8)
    limits = (Limits(elements=6), Limits(elements=5))
    binary = frames.pack_request({}, [Tensor("x", array)])
    in_json = framed(one_tensor(shape=shape, datatype="INT8", data=array.ravel().tolist()))
    for raw in (binary, in_json):
        assert frames.unpack(raw, limits[0]).tensor("x").array.shape == tuple(shape)
        with pytest.raises(FrameTooLargeError, match="at most 5 elements"):
            frames.unpack(raw, limits[1])


def test_a_list_longer_than_its_shape_is_not_unrolled() -> None:
    with pytest.raises(FrameTooLargeError, match="at most 6 elements"):
        frames.unpack(framed(one_tensor(data=[[0] * 4, [0] * 4])), Limits(elements=6))
