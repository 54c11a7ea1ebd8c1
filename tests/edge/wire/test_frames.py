"""Frames: what is sent comes back on every carrier; what is no frame is refused, cheaply.

In the normal run about 12,000 generated frames; `make faults` makes it ten times as many.
"""

from __future__ import annotations

import gc
import json
import math
import random
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from edge_sdk.errors import FrameError, FrameTooLargeError
from edge_sdk.wire import frames
from edge_sdk.wire.frames import Frame, Limits, Tensor

DTYPES = tuple(dtype.newbyteorder("=") for dtype in frames.DATATYPES.values())
MUTANTS_PER_FRAME = 25
# orjson makes an 80-byte dict of the three bytes `{},`: what a peer can make us hold per byte sent
BYTES_PER_BYTE = 64
SLACK_BYTES = 256_000

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


def same(left: Tensor, right: Tensor) -> bool:
    """Bit for bit: -0.0 is not 0.0 here."""
    return (
        (left.name, left.parameters) == (right.name, right.parameters)
        and (left.array.dtype, left.array.shape) == (right.array.dtype, right.array.shape)
        and left.array.tobytes() == right.array.tobytes()
    )


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


# what is no frame


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


DEEP = "[" * 990 + "]" * 990
JUNK = (
    "null", "true", "false", "0", "1", "2", "-1", "-0", "1.0", "2.5", "1e400", "1e39", "NaN",
    "-Infinity", "4", "8", "1e308", '""', '"FP32"', '"x"', "{}", "[]", "[[]]", '"\\ud800"',
    '{"binary_data_size":-1}', '{"binary_data_size":1e3}', '{"binary_data_size":[]}', "[1,[2]]",
    '{"binary_data_size":18446744073709551615}', '{"a":{"a":{"a":{}}}}', "[0]", "[-1]", "[true]",
    "[1.0]", "[null]", "[4611686018427387904,4611686018427387904]", "[0,4611686018427387904]",
    "[4000000]", "[0,4000000,4000000]", "[18446744073709551615,0]", "[1,1,1,1,1,1,1,1]",
    "[0,0,0,0,0,0,0,0,0]", "[[1,2],[3]]", "[[[]]]", "[{}]", "9223372036854775808",
    "18446744073709551616",
)  # fmt: skip
LONG_JUNK = (DEEP, '{"a":' + DEEP + "}", "9" * 5000, '"' + "x" * 3000 + '"')
SOUND = {
    "name": ('"x"', '"z3"', '"\\u0000"'),
    "datatype": tuple(f'"{datatype}"' for datatype in frames.DATATYPES),
    "shape": ("[]", "[2]", "[1,2]", "[0]", "[2,0,3]"),
    "data": ("[]", "[1]", "[1,2]", "[[1,2]]", "[0.5,-1]"),
    "parameters": ("{}", '{"binary_data_size":2}', '{"binary_data_size":8}', '{"scale":0.5}'),
}


def member(key: str, sound: tuple[str, ...]) -> st.SearchStrategy[str]:
    """A JSON member: mostly sound, sometimes junk, missing or there twice."""
    wrong = [f'"{key}":{value}' for value in JUNK + LONG_JUNK]
    odd = ["", f'"{key}":{sound[-1]},"{key}":[]']
    right = [f'"{key}":{value}' for value in sound]
    # one draw a member keeps this fast: as many copies as make nine tenths of them right
    return st.sampled_from(right * (9 * len(wrong + odd) // len(right)) + wrong + odd)


def members(sound: dict[str, tuple[str, ...]]) -> st.SearchStrategy[str]:
    """A JSON object of such members."""
    drawn = st.tuples(*(member(key, values) for key, values in sound.items()))
    return drawn.map(lambda texts: "{" + ",".join(filter(None, texts)) + "}")


TOP = {"id": ('"a"',), "parameters": ("{}", '{"deadline_ms":5}')}
hostile_lists = st.lists(members(SOUND), min_size=1, max_size=3).map(",".join)
hostile_requested = members({"name": ('"y"',), "parameters": ("{}",)})


@st.composite
def hostile_bodies(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """The JSON of a frame, wrong somewhere, and bytes behind it."""
    listed, top = draw(hostile_lists), draw(members(TOP))
    asked = draw(st.none() | hostile_requested)
    tensors_text = (
        f'"outputs":[{listed}]' if asked is None else f'"inputs":[{listed}],"outputs":[{asked}]'
    )
    text = f"{{{tensors_text},{top[1:]}".replace(",}", "}")
    return text.encode(), bytes(draw(st.sampled_from((0, 0, 2, 8, 16))))


def mutate(source: random.Random, raw: bytes) -> bytes:
    """Damage a frame in one to three places; half of the time its length still fits its JSON."""
    prefix, rest = (raw[:4], raw[4:]) if source.random() < 0.5 else (b"", raw)
    for _ in range(source.randint(1, 3)):
        at, end = sorted(source.randrange(len(rest) + 1) for _ in range(2))
        match source.randrange(6):
            case 0 if at < len(rest):
                rest = rest[:at] + bytes([rest[at] ^ 1 << source.randrange(8)]) + rest[at + 1 :]
            case 1:
                rest = rest[:at]
            case 2:
                rest = rest[:at] + source.randbytes(source.randint(1, 8)) + rest[at:]
            case 3:
                rest = rest[:end] + rest[at:]
            case 4:
                rest = rest[:at] + rest[end:]
            case _:
                rest = rest[:at] + source.choice(JUNK).encode() + rest[at:]
    text_bytes = int.from_bytes(prefix, "big") + len(rest) - len(raw) + 4
    return max(text_bytes, 0).to_bytes(4, "big") + rest if prefix else rest


def read_or_refuse(read: Callable[[], Frame], limits: Limits) -> None:
    """Read bytes that may be no frame: either a FrameError, or a frame within `limits`."""
    try:
        frame = read()
    except FrameError:
        return
    values = [*frame.parameters.values(), frame.header.get("id"), frame.header.get("error")]
    assert len(frame.tensors) <= limits.tensors
    assert len(frame.requested) <= limits.tensors
    for tensor in frame.tensors:
        assert tensor.array.dtype in DTYPES
        assert tensor.array.ndim <= limits.rank
        assert tensor.array.size <= limits.elements
        assert np.isfinite(tensor.array).all()
        values += tensor.parameters.values()
    for _, asked in frame.requested:
        values += asked.values()
    assert {type(value) for value in values} <= {str, int, float, bool, type(None)}


@pytest.mark.filterwarnings("error")
@examples(500)
@given(st.binary(max_size=300))
def test_random_bytes_give_frame_errors_only(raw: bytes) -> None:
    """FAULTS row 26."""
    read_or_refuse(lambda: frames.unpack(raw), frames.MQTT_LIMITS)
    read_or_refuse(lambda: frames.unpack(prefixed(raw)), frames.MQTT_LIMITS)
    read_or_refuse(lambda: frames.decode(raw, None, frames.HTTP_LIMITS), frames.HTTP_LIMITS)


@pytest.mark.filterwarnings("error")
@examples(300)
@given(headers, st.lists(tensors(), max_size=3), st.booleans(), st.integers(0, 2**32))
def test_damaged_frames_give_frame_errors_only(
    header: dict[str, Any], sent: list[Tensor], is_request: bool, seed: int
) -> None:
    """FAULTS row 26."""
    raw = frames.pack(header, sent, key="inputs" if is_request else "outputs")
    source = random.Random(seed)
    for number in range(MUTANTS_PER_FRAME):
        mutant = mutate(source, raw)
        note(f"mutant {number}: {mutant[:200]!r}")
        read_or_refuse(partial(frames.unpack, mutant), frames.MQTT_LIMITS)


@pytest.mark.filterwarnings("error")
@examples(1000)
@given(hostile_bodies())
def test_hostile_json_gives_frame_errors_only(body: tuple[bytes, bytes]) -> None:
    """FAULTS row 26."""
    text, tail = body
    read_or_refuse(lambda: frames.unpack(prefixed(text, tail)), frames.MQTT_LIMITS)
    read_or_refuse(lambda: frames.decode(text, None, frames.HTTP_LIMITS), frames.HTTP_LIMITS)


# memory


def peak_bytes(read: Callable[[], Frame], limits: Limits) -> int:
    """The most memory held at once while reading, whatever comes of it."""
    tracemalloc.start()
    try:
        read_or_refuse(read, limits)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text",
    [
        framed(one_tensor(shape=[4_000_000])),
        framed(one_tensor(shape=[4_000_000], data=[])),
        framed(one_tensor(shape=[4_000_000], parameters={"binary_data_size": 16_000_000})),
        framed(one_tensor(shape=[0, 2**62], parameters={"binary_data_size": 0})),
        framed(one_tensor(data=[[]] * 15_000)),
        framed(one_tensor(data=[[[[0]]]] * 7_000)),
        framed(one_tensor(data=[0.5] * 12_000)),
        framed(one_tensor(shape=list(range(10_000)))),
        framed({"inputs": [{}] * 16_000}),
        framed({"inputs": [], "parameters": {str(number): 0.5 for number in range(4_500)}}),
        prefixed(b'{"inputs":' + b"[" * 65_000),
    ],
    ids=lambda raw: raw[4:70].decode(),
)
def test_a_small_frame_cannot_take_much_memory(text: bytes) -> None:
    peak = peak_bytes(lambda: frames.unpack(text), frames.MQTT_LIMITS)
    assert peak < BYTES_PER_BYTE * len(text) + SLACK_BYTES


def test_a_large_frame_takes_its_own_size_again_at_most() -> None:
    array = np.ones(450_000, np.float32)
    raw = frames.pack_request({}, [Tensor("x", array)])
    # a copy where the JSON leaves it unaligned, and a byte a value to tell finite ones
    peak = peak_bytes(lambda: frames.unpack(raw), frames.MQTT_LIMITS)
    assert peak < array.nbytes + array.size + SLACK_BYTES


@examples(150)
@given(hostile_bodies())
def test_no_hostile_frame_takes_much_memory(body: tuple[bytes, bytes]) -> None:
    raw = prefixed(*body)
    peak = peak_bytes(lambda: frames.unpack(raw), frames.MQTT_LIMITS)
    assert peak < BYTES_PER_BYTE * len(raw) + SLACK_BYTES


def test_refused_frames_leave_nothing_behind() -> None:
    source = random.Random(1)
    raw = frames.pack_request({"id": "q"}, [Tensor("x", np.ones(5_000, np.float32))])
    mutants = [mutate(source, raw) for _ in range(500)]

    def read_all() -> None:
        for mutant in mutants:
            read_or_refuse(partial(frames.unpack, mutant), frames.MQTT_LIMITS)

    read_all()  # caches fill once
    tracemalloc.start()
    try:
        read_all()
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept < 50_000  # one frame kept would be 20,000
