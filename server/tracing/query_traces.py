"""Traces of queries on the server: `query` with `wait`, `compute` and `reply`; and `batch`.

A query continues the trace that its sender began. A batch serves queries of many traces, so it is a
trace of its own, and is linked with each `compute` that is part of it, in both directions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from edge_sdk.session import Array
from edge_sdk.settings import Traces
from edge_sdk.tracing.predictions import open_queue
from edge_sdk.tracing.span_queue import SpanQueue
from edge_sdk.tracing.spans import TEXT_MAX, Attribute, Sampler, Span, WallClock
from edge_sdk.wire.codecs import rows_of
from edge_sdk.wire.messages import Query
from edge_sdk.wire.traceparent import TraceContext
from server.errors import ServerError

SERVICE: Final = "splitedge-server"
# of a batch; the specification of opentelemetry bounds them so, too
LINKS_MAX: Final = 128


class QueryTraces:
    """Makes the traces of queries. Any thread may call any method.

    Args:
        share: of the queries without a trace of their sender that are traced.
    """

    def __init__(self, share: float, spans: SpanQueue) -> None:
        self._sampler = Sampler(share)
        self._spans = spans

    @classmethod
    def open(cls, settings: Traces) -> QueryTraces:
        """Traces for the collector of the settings.

        Raises: ConfigurationError if opentelemetry is not installed, or the collector is not named.
        """
        return cls(settings.share, open_queue(settings, {"service.name": SERVICE}))

    def begin(self, query: Query, sender: str) -> QueryTrace | None:
        """The trace of a query that has come; None if it is not to be recorded.

        The sender's word counts: what it records is recorded here too, what it does not is not.
        """
        parent = query.trace
        if not (self._sampler.chooses() if parent is None else parent.sampled):
            return None
        return QueryTrace(self._sampler, self._spans, query, sender)

    def report(self) -> Mapping[str, int]:
        """Spans that were sent and dropped."""
        return self._spans.report()

    def close(self) -> None:
        """Send what waits, for a short time, and end."""
        self._spans.close()


class QueryTrace:
    """One query on its way. Its methods are called by one thread after the other.

    Times are by time.monotonic, in seconds.
    """

    def __init__(self, sampler: Sampler, spans: SpanQueue, query: Query, sender: str) -> None:
        self.sampler = sampler
        self.spans = spans
        self._parent = query.trace
        self._context = sampler.root() if query.trace is None else sampler.child(query.trace)
        self._begun_s = self._free_s = time.monotonic()
        self._clock = WallClock(self._begun_s)
        self._attributes: dict[str, Attribute] = {"splitedge.sender": sender}
        if query.tensor is not None:
            tensor = query.tensor
            self._attributes["splitedge.input"] = tensor.name
            self._attributes["splitedge.rows"] = rows_of(tensor.array, tensor.parameters)
        self._ended = False

    def asks(self, model: str, version: str) -> None:
        """Note the model that answers."""
        self._attributes |= {"splitedge.model": model, "splitedge.version": version}

    def computed(self, begin_s: float, end_s: float, batch: TraceContext) -> TraceContext:
        """Record that a batch has computed it, or a part of it.

        Returns: the place of its span `compute`, which the batch is linked with.
        """
        compute = self.sampler.child(self._context)
        self._add("wait", self.sampler.child(self._context), self._free_s, begin_s)
        self._add("compute", compute, begin_s, end_s, links=(batch,))
        self._free_s = end_s
        return compute

    def end(self, outcome: Array | ServerError, reply_s: float | None) -> None:
        """Record the end of the query; a second call does nothing.

        Args:
            reply_s: when its reply began to be made; None if there is no reply.
        """
        if self._ended:
            return
        self._ended = True
        now_s = time.monotonic()
        if reply_s is not None:
            self._add("reply", self.sampler.child(self._context), reply_s, now_s)
        error = str(outcome)[:TEXT_MAX] if isinstance(outcome, ServerError) else ""
        self.spans.add(
            Span(
                "query",
                "server",
                self._context,
                self._parent,
                self._clock.ns(self._begun_s),
                self._clock.ns(now_s),
                self._attributes,
                error=error,
            )
        )

    def _add(
        self,
        name: str,
        context: TraceContext,
        begin_s: float,
        end_s: float,
        *,
        links: tuple[TraceContext, ...] = (),
    ) -> None:
        begin_ns, end_ns = self._clock.ns(begin_s), self._clock.ns(end_s)
        span = Span(name, "internal", context, self._context, begin_ns, end_ns, links=links)
        self.spans.add(span)


def trace_batch(
    traces: Sequence[QueryTrace], begin_s: float, end_s: float, attributes: Mapping[str, Attribute]
) -> None:
    """Record a batch.

    Args:
        traces: of the queries in it that are traced; at least one.
        begin_s, end_s: of the engine's work, by time.monotonic.
    """
    sampler, spans = traces[0].sampler, traces[0].spans
    batch = sampler.root()
    links = tuple(trace.computed(begin_s, end_s, batch) for trace in traces)
    clock = WallClock(time.monotonic())
    begin_ns, end_ns = clock.ns(begin_s), clock.ns(end_s)
    span = Span("batch", "internal", batch, None, begin_ns, end_ns, attributes, links[:LINKS_MAX])
    spans.add(span)
