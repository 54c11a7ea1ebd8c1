"""Metrics of queries and batches, by model: latency, wait, batch size, and how queries ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Histogram

from edge_sdk.session import Array
from server.backend.ladder import LadderEngine
from server.errors import BadRequestError, ExpiredError, OverloadedError, ServerError
from server.metrics.exposition import SECONDS

_MODEL: Final = ("model", "version")
_SAMPLES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_WAITS: Final = (0.0001, *SECONDS)


@dataclass(frozen=True, slots=True)
class _OfModel:
    seconds: Histogram
    waits: Histogram
    batches: Histogram
    sizes: Histogram
    outcomes: dict[str, Counter]


class QueryMetrics:
    """An observer of the engine (server.backend.observers)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._queries = Counter(
            "splitedge_queries",
            "Queries that reached a model, by outcome: answered, overloaded, expired, bad_request,"
            " failed.",
            (*_MODEL, "outcome"),
            registry=registry,
        )
        self._seconds = Histogram(
            "splitedge_query_duration_seconds",
            "Time of answered queries from decoded to answered.",
            _MODEL,
            buckets=SECONDS,
            registry=registry,
        )
        self._waits = Histogram(
            "splitedge_queue_wait_seconds",
            "Time that queries waited for the engine.",
            _MODEL,
            buckets=_WAITS,
            registry=registry,
        )
        self._batches = Histogram(
            "splitedge_batch_duration_seconds",
            "Time of the engine for a batch.",
            _MODEL,
            buckets=SECONDS,
            registry=registry,
        )
        self._sizes = Histogram(
            "splitedge_batch_samples",
            "Samples in a batch.",
            _MODEL,
            buckets=_SAMPLES,
            registry=registry,
        )
        # looking up a child by its labels takes as long as counting
        self._children: WeakKeyDictionary[LadderEngine, _OfModel] = WeakKeyDictionary()

    def ran(
        self, engine: LadderEngine, rows: int, waits_s: Sequence[float], seconds: float
    ) -> None:
        """Count a batch."""
        model = self._of(engine)
        model.batches.observe(seconds)
        model.sizes.observe(rows)
        for wait_s in waits_s:
            model.waits.observe(wait_s)

    def settled(self, engine: LadderEngine, seconds: float, outcome: Array | ServerError) -> None:
        """Count the outcome of a query."""
        model = self._of(engine)
        word = outcome_of(outcome)
        if word == "answered":
            model.seconds.observe(seconds)
        counter = model.outcomes.get(word)
        if counter is None:
            counter = model.outcomes[word] = self._queries.labels(*_labels(engine), word)
        counter.inc()

    def _of(self, engine: LadderEngine) -> _OfModel:
        found = self._children.get(engine)
        if found is None:
            labels = _labels(engine)
            found = self._children[engine] = _OfModel(
                self._seconds.labels(*labels),
                self._waits.labels(*labels),
                self._batches.labels(*labels),
                self._sizes.labels(*labels),
                {},
            )
        return found


def outcome_of(outcome: Array | ServerError) -> str:
    """The word for an outcome: one of five, so that labels are few."""
    if not isinstance(outcome, ServerError):
        return "answered"
    for kind, word in (
        (OverloadedError, "overloaded"),
        (ExpiredError, "expired"),
        (BadRequestError, "bad_request"),
    ):
        if isinstance(outcome, kind):
            return word
    return "failed"


def _labels(engine: LadderEngine) -> tuple[str, str]:
    return engine.manifest.name, engine.manifest.version
