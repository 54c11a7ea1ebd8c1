"""The queue of spans on a machine that can start no thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from edge_sdk.tracing.span_queue import SpanQueue
from edge_sdk.tracing.spans import Span
from edge_sdk.wire.traceparent import TraceContext
from tests.waiting import wait_until

SPAN = Span("predict", "internal", TraceContext(1, 1), None, 0, 1)
TOO_LARGE = 2**50  # bytes of a stack, more than any process can address


class Kept:
    """An exporter that takes all spans."""

    def send(self, spans: Sequence[Span]) -> str:
        return ""

    def stop(self) -> None:
        """Do nothing."""


def add(queue: SpanQueue, *spans: Span, threads: bool) -> None:
    before = threading.stack_size()
    if not threads:
        threading.stack_size(TOO_LARGE)
    try:
        queue.add(*spans)
    finally:
        threading.stack_size(before)


def test_a_thread_that_cannot_start_breaks_nothing_and_is_tried_again() -> None:
    queue = SpanQueue(Kept())
    add(queue, SPAN, threads=False)
    assert queue.report() == {"sent": 0, "dropped": 0}
    add(queue, SPAN, threads=True)
    wait_until(lambda: queue.sent == 2, "both spans")
    queue.close()


def test_a_queue_that_never_had_a_thread_is_closed() -> None:
    queue = SpanQueue(Kept())
    add(queue, SPAN, threads=False)
    queue.close()
