"""Traces of queries that share a batch, at a real collector."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from numpy.typing import NDArray

from edge_sdk.settings import Traces
from edge_sdk.wire.traceparent import TraceContext
from server.backend.batcher import Batcher
from server.backend.jobs import Job
from server.backend.ladder import Entry, LadderEngine
from server.errors import ServerError
from server.tracing.query_traces import QueryTrace, QueryTraces
from tests.collector import Collector
from tests.serving.held_engine import HeldEngine
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Exported

Array = NDArray[Any]
SENT = TraceContext(7, 8)


@pytest.fixture
def batcher() -> Iterator[Batcher]:
    batcher = Batcher(batch_max=8)
    yield batcher
    batcher.stop()


class Asked:
    """A query in the queue, traced or not, and its outcome."""

    def __init__(
        self,
        batcher: Batcher,
        engine: LadderEngine,
        array: Array,
        trace: QueryTrace | None,
        deadline: float | None = None,
    ) -> None:
        self.outcomes: list[Array | ServerError] = []
        self._trace = trace
        job = Job(engine, Entry(0, array), deadline, self._done, "pi", trace=trace)
        batcher.submit(job)

    def _done(self, outcome: Array | ServerError) -> None:
        if self._trace is not None:
            self._trace.end(outcome, time.monotonic())
        self.outcomes.append(outcome)


def test_a_batch_is_linked_with_each_traced_query_in_it(
    exported: Exported, batcher: Batcher
) -> None:
    engine = HeldEngine(exported)
    query = exported.query(0, exported.x[:2])
    with Collector() as collector:
        traces = QueryTraces.open(Traces(collector.url, 0))
        first = Asked(batcher, engine, exported.x[:1], None)
        assert engine.entered.wait(20)
        sent = [SENT, None, TraceContext(7, 9), TraceContext(70, 80)]
        waiting = [
            Asked(
                batcher,
                engine,
                exported.x[:2],
                traces.begin(exported.query(0, exported.x[:2], trace=trace), "pi"),
            )
            for trace in sent
        ]
        engine.gate.set()
        wait_until(lambda: all(one.outcomes for one in (first, *waiting)), "the answers")
        assert len(collector.wait(3 * 4 + 1)) == 3 * 4 + 1
        wait_until(lambda: traces.report() == {"sent": 3 * 4 + 1, "dropped": 0}, traces.report)
        traces.close()
        (batch,) = collector.wait(name="batch")
        computes = collector.wait(3, name="compute")
        queries = collector.wait(3, name="query")
    assert traces.begin(query, "pi") is None  # the share of untraced ones is 0
    assert batch.attributes["splitedge.queries"] == 4
    assert batch.attributes["splitedge.rows"] == 8
    assert sorted(batch.links) == sorted((one.trace, one.span) for one in computes)
    for compute in computes:
        assert list(compute.links) == [(batch.trace, batch.span)]
        assert (compute.begin_ns, compute.end_ns) != (0, 0)
    assert {(one.trace, one.parent) for one in queries} == {
        (f"{trace.trace_id:032x}", f"{trace.span_id:016x}") for trace in sent if trace is not None
    }
    assert {one.parent for one in computes} == {one.span for one in queries}


def test_a_query_computed_in_two_batches_shows_both(exported: Exported, batcher: Batcher) -> None:
    engine = LadderEngine(exported.folder, exported.manifest)
    with Collector() as collector:
        traces = QueryTraces.open(Traces(collector.url, 1))
        trace = traces.begin(exported.query(0, exported.x[:12]), "pi")
        asked = Asked(batcher, engine, exported.x[:12], trace)  # eight are a batch
        wait_until(lambda: asked.outcomes, "the answer")
        names = sorted(span.name for span in collector.wait(8))
        traces.close()
        assert names == [*["batch"] * 2, *["compute"] * 2, "query", "reply", *["wait"] * 2]
        (query,) = collector.wait(name="query")
        assert query.attributes["splitedge.rows"] == 12
        for wait, compute in zip(
            collector.wait(2, name="wait"), collector.wait(2, name="compute"), strict=True
        ):
            assert wait.end_ns == compute.begin_ns


def test_a_query_that_expires_is_not_computed(exported: Exported, batcher: Batcher) -> None:
    engine = LadderEngine(exported.folder, exported.manifest)
    with Collector() as collector:
        traces = QueryTraces.open(Traces(collector.url, 1))
        trace = traces.begin(exported.query(0, exported.x[:1]), "pi")
        asked = Asked(batcher, engine, exported.x[:1], trace, time.monotonic() - 1)
        wait_until(lambda: asked.outcomes, "the outcome")
        (query,) = collector.wait(name="query")
        traces.close()
        assert query.error == str(asked.outcomes[0])
        assert "compute" not in {span.name for span in collector.spans}
