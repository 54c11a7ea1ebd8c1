"""The trace of a program that asks a running agent; its predictions go on with that trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from edge_sdk.wire.traceparent import TraceContext

_CALLER: Final[ContextVar[TraceContext | None]] = ContextVar("caller", default=None)


@contextmanager
def called_in(context: TraceContext | None) -> Iterator[None]:
    """Predictions of this thread, inside the block, belong to the caller's trace.

    Args:
        context: the caller's span; None for a caller without a trace.
    """
    before = _CALLER.set(context)
    try:
        yield
    finally:
        _CALLER.reset(before)


def caller() -> TraceContext | None:
    """The span of the caller of this thread; None where there is none."""
    return _CALLER.get()
