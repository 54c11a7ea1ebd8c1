"""The text `traceparent`: as W3C Trace Context writes it, and read strictly."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.wire.frames import pack_request, unpack
from edge_sdk.wire.messages import Query, pack_query, read_query
from edge_sdk.wire.traceparent import CHARACTERS_MAX, TraceContext, read_traceparent

# the example of the specification
TEXT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
CONTEXT = TraceContext(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7)


def test_the_example_of_the_specification_is_read_and_written() -> None:
    assert read_traceparent(TEXT) == CONTEXT
    assert CONTEXT.traceparent == TEXT


@given(
    st.builds(
        TraceContext,
        st.integers(1, 2**128 - 1),
        st.integers(1, 2**64 - 1),
        st.booleans(),
    )
)
def test_what_is_written_is_read(context: TraceContext) -> None:
    assert read_traceparent(context.traceparent) == context


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert read_traceparent(f"cc{TEXT[2:]}") == CONTEXT
    assert read_traceparent(f"cc{TEXT[2:]}-what-the-future-brings") == CONTEXT
    assert read_traceparent(f"00{TEXT[2:-2]}fe") == TraceContext(
        CONTEXT.trace_id, CONTEXT.span_id, sampled=False
    )


MALFORMED: list[Any] = [
    None,
    7,
    True,
    b"00",
    "",
    "00",
    TEXT.upper(),
    f" {TEXT}",
    f"{TEXT}\n",
    f"{TEXT}-more",  # version 00 has nothing more
    f"cc{TEXT[2:]}more",
    f"ff{TEXT[2:]}",
    f"00-{'0' * 32}-00f067aa0ba902b7-01",
    f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01",
    TEXT.replace("-", "_"),
    TEXT.replace("4bf9", "4bg9"),
    TEXT.replace("4bf9", "４bf9"),  # a digit to Python, and none to the specification
    f"cc{TEXT[2:]}-{'a' * CHARACTERS_MAX}",
    "0" * 1_000_000,
]
# the last one is longer than a frame's JSON may be
IN_JSON = [each for each in MALFORMED[:-1] if not isinstance(each, bytes)]


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_what_is_malformed_counts_as_absent(text: Any) -> None:
    assert read_traceparent(text) is None


@given(st.text())
def test_no_text_is_a_fault(text: str) -> None:
    read_traceparent(text)


def test_a_query_carries_its_trace() -> None:
    query = Query("q", "digits", "1", None, 20.0, CONTEXT)
    assert read_query(unpack(pack_query(query))) == query
    assert b"traceparent" not in pack_query(Query("q", "digits", "1", None, 20.0))


@pytest.mark.parametrize("text", IN_JSON, ids=range(len(IN_JSON)))
def test_a_query_with_a_malformed_trace_is_a_query(text: Any) -> None:
    frame = pack_request({"id": "q", "parameters": {"traceparent": text}}, ())
    assert read_query(unpack(frame)) == Query("q", None, None, None)
