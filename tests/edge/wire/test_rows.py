"""Rows: the tensors of several queries cross the wire as one, and every value stays the same."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from edge_sdk.errors import FrameError
from edge_sdk.manifest import Codec
from edge_sdk.wire.codecs import decode, encode
from edge_sdk.wire.frames import Tensor, pack_request, unpack
from edge_sdk.wire.messages import Query, pack_query, read_query
from edge_sdk.wire.rows import alike, stack

VALUES = st.floats(-1e6, 1e6, width=32)
SAMPLES = st.lists(arrays.arrays(np.float32, (1, 2, 3), elements=VALUES), min_size=1, max_size=9)


def tensor(z: np.ndarray[Any, np.dtype[np.float32]], codec: Codec) -> Tensor:
    return Tensor("z2", *encode(z, codec))


@pytest.mark.parametrize("codec", get_args(Codec))
@given(SAMPLES)
def test_the_server_reads_of_rows_together_what_it_reads_of_each_alone(
    codec: Codec, samples: list[np.ndarray[Any, np.dtype[np.float32]]]
) -> None:
    alone = [tensor(z, codec) for z in samples]
    read = read_query(unpack(pack_query(Query("q", "digits", "1", stack(alone))))).tensor
    assert read is not None
    expected = np.concatenate([decode(one.array, one.parameters, (2, 3)) for one in alone])
    np.testing.assert_array_equal(decode(read.array, read.parameters, (2, 3)), expected)


def test_a_row_alone_is_sent_as_before() -> None:
    one = tensor(np.ones((1, 2, 3), np.float32), "int8")
    assert stack([one]) is one
    frame = unpack(pack_query(Query("q", "digits", "1", one)))
    assert [(each.name, each.parameters) for each in frame.tensors] == [("z2", one.parameters)]


def test_the_server_reads_a_query_of_an_older_agent() -> None:
    """An agent of 0.1.0 sends one tensor, with numbers as its parameters."""
    steps = np.array([[0, 128, 255]], np.uint8)
    old = Tensor("z2", steps, {"scale": 0.5, "zero_point": 128})
    raw = pack_request({"id": "q", "parameters": {"model_name": "digits"}}, [old])
    read = read_query(unpack(raw)).tensor
    assert read is not None
    assert decode(read.array, read.parameters).tolist() == [[-64.0, 0.0, 63.5]]


@pytest.mark.parametrize(
    "other",
    [
        Tensor("z3", np.zeros((1, 4), np.float16)),
        Tensor("z2", np.zeros((1, 5), np.float16)),
        Tensor("z2", np.zeros((1, 4), np.float32)),
        Tensor("z2", np.zeros((1, 4), np.float16), {"scale": 1.0}),
    ],
)
def test_tensors_that_differ_in_kind_are_no_rows_of_one(other: Tensor) -> None:
    assert not alike(Tensor("z2", np.zeros((1, 4), np.float16)), other)


SCALES = np.ones(2, np.float32)
ZEROS = np.zeros(2, np.uint8)


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ([Tensor("z3", np.zeros((2, 4), np.uint8))], "expected one tensor"),
        ([Tensor("scale", SCALES)], "expected one tensor"),
        ([Tensor("zero_point", ZEROS), Tensor("scale", SCALES)], "expected one tensor"),
        ([Tensor("scale", SCALES[:1]), Tensor("zero_point", ZEROS)], "tensor scale: expected"),
        ([Tensor("scale", ZEROS), Tensor("zero_point", ZEROS)], "tensor scale: expected float32"),
        ([Tensor("scale", SCALES), Tensor("zero_point", SCALES)], "tensor zero_point: expected"),
        ([Tensor("scale", SCALES), Tensor("zero_point", ZEROS[:, None])], "tensor zero_point"),
        ([Tensor("sizes", np.array(8))], r"tensor sizes: expected int64 \(1,\), got int64 \(\)"),
        ([Tensor("sizes", np.array([[4], [4]]))], "tensor sizes: expected"),
        ([Tensor("sizes", np.array([4, 4], np.uint8))], "tensor sizes: expected int64"),
    ],
)
def test_tensors_beside_the_rows_that_do_not_fit_are_refused(
    beside: list[Tensor], message: str
) -> None:
    raw = pack_request({"id": "q"}, [Tensor("z2", np.zeros((2, 4), np.uint8)), *beside])
    with pytest.raises(FrameError, match=message):
        read_query(unpack(raw))


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e37])
def test_a_row_with_an_impossible_scale_is_refused(scale: float) -> None:
    parameters = {"scale": np.array([1.0, scale], np.float32), "zero_point": ZEROS}
    with pytest.raises(FrameError, match="a scale above 0"):
        decode(np.zeros((2, 4), np.uint8), parameters)
