"""Frames made to hurt: refused with one kind of error, in little memory.

In the normal run about 11,000 generated frames; `make faults` makes it ten times as many.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from edge_sdk.errors import FrameError
from edge_sdk.wire import frames
from edge_sdk.wire.frames import Frame, Limits, Tensor
from tests.edge.wire.generated_frames import (
    DTYPES,
    examples,
    framed,
    headers,
    one_tensor,
    prefixed,
    tensors,
)

MUTANTS_PER_FRAME = 25
# orjson makes an 80-byte dict of the three bytes `{},`: what a peer can make us hold per byte sent
BYTES_PER_BYTE = 64
SLACK_BYTES = 256_000
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
