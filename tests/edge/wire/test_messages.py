"""Queries and replies: what goes in comes out, and what a peer may not say is named."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.errors import FrameError
from edge_sdk.wire.frames import Frame, Tensor, pack_request, unpack
from edge_sdk.wire.messages import (
    Problem,
    Query,
    Reply,
    entry_depth,
    new_id,
    pack_query,
    pack_reply,
    read_query,
    read_reply,
)

IDS = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=64)
NAMES = st.none() | st.text(st.characters(categories=["L", "N"]), max_size=100)
DEADLINES = st.none() | st.floats(0, 600_000, exclude_min=True)


@given(IDS, NAMES, NAMES, DEADLINES, st.integers(0, 999))
def test_a_query_comes_out_as_it_went_in(
    identifier: str, model: str | None, version: str | None, deadline: float | None, depth: int
) -> None:
    z = np.arange(6, dtype=np.uint8).reshape(1, 2, 3)
    name = f"z{depth}" if depth else "x"
    query = Query(identifier, model, version, Tensor(name, z, {"scale": 0.5}), deadline)

    read = read_query(unpack(pack_query(query)))

    assert (read.id, read.model, read.version, read.deadline_ms) == (
        identifier,
        model,
        version,
        deadline,
    )
    assert read.depth == depth
    assert read.tensor is not None
    assert read.tensor.parameters == {"scale": 0.5}
    assert read.tensor.array.tolist() == [[[0, 1, 2], [3, 4, 5]]]


def test_a_probe_is_a_query_without_a_tensor() -> None:
    probe = read_query(unpack(pack_query(Query("p", None, None, None))))
    assert probe == Query("p", None, None, None)
    assert probe.depth == 0


def test_a_reply_comes_out_as_it_went_in() -> None:
    logits = np.array([[1.5, -2]], np.float32)
    read = read_reply(unpack(pack_reply(Reply("r", {"logits": logits}), "digits", "3")))
    assert (read.id, read.problem, read.detail) == ("r", None, "")
    assert read.tensors["logits"].tolist() == [[1.5, -2.0]]


@pytest.mark.parametrize("problem", Problem)
def test_a_problem_keeps_its_word_on_the_way(problem: Problem) -> None:
    reply = Reply("r", problem=problem, detail="no room", retry_after_s=0.25)
    assert read_reply(unpack(pack_reply(reply, "", ""))) == reply


def test_a_reply_names_who_answered() -> None:
    raw = pack_reply(Reply("r", {"logits": np.zeros((1, 2), np.float32)}), "digits", "3")
    header = unpack(raw).header
    assert (header["model_name"], header["model_version"]) == ("digits", "3")


@pytest.mark.parametrize(("name", "depth"), [("x", 0), ("z1", 1), ("z12", 12), ("z999", 999)])
def test_a_tensor_says_where_it_enters(name: str, depth: int) -> None:
    assert entry_depth(name) == depth


@pytest.mark.parametrize(
    "name",
    ["", "z", "z0", "z01", "z1000", "z-1", "z1.0", "z 1", "Z1", "X", "x1", "z²", "z१", "z1\n"],
)
def test_any_other_name_is_refused(name: str) -> None:
    with pytest.raises(FrameError, match="expected x, z1, z2"):
        entry_depth(name)


@pytest.mark.parametrize("deadline", [0, -1, 600_001, True, "5", "inf", 1e300])
def test_a_deadline_outside_ten_minutes_is_refused(deadline: object) -> None:
    frame = unpack(pack_request({"parameters": {"deadline_ms": deadline}}, ()))
    with pytest.raises(FrameError, match="deadline_ms: expected 0 to 600000"):
        read_query(frame)


def test_a_query_of_two_tensors_is_refused() -> None:
    x = Tensor("x", np.zeros((1, 2), np.float32))
    with pytest.raises(FrameError, match="one tensor, got 2"):
        read_query(unpack(pack_request({}, (x, x))))


@pytest.mark.parametrize(
    ("header", "field"),
    [
        ({"id": "i" * 65}, "id"),
        ({"parameters": {"model_name": 7}}, "model_name"),
        ({"parameters": {"model_name": "m" * 101}}, "model_name"),
        ({"parameters": {"model_version": True}}, "model_version"),
    ],
)
def test_what_is_too_long_or_no_text_is_named(header: dict[str, Any], field: str) -> None:
    with pytest.raises(FrameError, match=f"^{field}: expected at most"):
        read_query(unpack(pack_request(header, ())))


def test_null_is_as_good_as_nothing() -> None:
    header = {"id": None, "parameters": {"model_name": None, "deadline_ms": None}}
    assert read_query(unpack(pack_request(header, ()))) == Query("", None, None, None)
    assert read_reply(Frame({"id": None, "error": None})) == Reply("")


@pytest.mark.parametrize(
    ("parameters", "problem", "retry_after_s"),
    [
        ({"problem": "overloaded", "retry_after_s": 1e9}, Problem.OVERLOADED, 60.0),
        ({"problem": "overloaded", "retry_after_s": -5}, Problem.OVERLOADED, 0.0),
        ({"problem": "overloaded", "retry_after_s": "soon"}, Problem.OVERLOADED, 0.0),
        ({"problem": "a word of a later version"}, Problem.FAILED, 0.0),
        ({"problem": 4}, Problem.FAILED, 0.0),
        ({}, Problem.FAILED, 0.0),
    ],
)
def test_a_server_cannot_send_a_device_away_for_long(
    parameters: dict[str, Any], problem: Problem, retry_after_s: float
) -> None:
    reply = read_reply(Frame({"id": "r", "error": "e" * 9999, "parameters": parameters}))
    assert (reply.problem, reply.retry_after_s, len(reply.detail)) == (problem, retry_after_s, 500)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["id", "error", "parameters", "model_name"])
PARAMETERS = st.sampled_from(["deadline_ms", "model_name", "problem", "retry_after_s"])


@given(
    st.dictionaries(FIELDS, JSON | st.dictionaries(PARAMETERS, JSON)),
    st.lists(st.dictionaries(st.sampled_from(["name", "shape", "datatype", "data"]), JSON)),
)
def test_whatever_is_sent_is_read_or_refused(
    header: dict[str, Any], tensors: list[dict[str, Any]]
) -> None:
    text = orjson.dumps({**header, "inputs": tensors})
    raw = len(text).to_bytes(4, "big") + text
    for read in (read_query, read_reply):
        try:
            message = read(unpack(raw))
        except FrameError:
            continue
        assert len(message.id) <= 64
        if isinstance(message, Reply):
            assert 0 <= message.retry_after_s <= 60
        else:
            assert message.deadline_ms is None or math.isfinite(message.deadline_ms)


def test_ids_are_128_random_bits() -> None:
    ids = {new_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(bytes.fromhex(one)) == 16 for one in ids)
