"""Statistics of each model since the server started, counted as Triton's extension does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from edge_sdk.session import Array
from server.backend.ladder import LadderEngine
from server.errors import ServerError


@dataclass(slots=True)
class Sum:
    """A count of events, and the seconds that they took together."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Count events that took so long together."""
        self.count += count
        self.seconds += seconds


@dataclass(slots=True)
class ModelCounts:
    """Counts of one model.

    Attributes:
        success, failure: queries, from decoded to answered or refused.
        queue: the wait of queries for the engine.
        compute: batches, each counted once for each of its queries, as Triton does.
        samples: of answered queries. batches: runs of the engine.
        by_size: runs by their number of samples.
        last_at: UTC seconds of the last run; 0 before the first.
    """

    success: Sum = field(default_factory=Sum)
    failure: Sum = field(default_factory=Sum)
    queue: Sum = field(default_factory=Sum)
    compute: Sum = field(default_factory=Sum)
    samples: int = 0
    batches: int = 0
    by_size: dict[int, Sum] = field(default_factory=dict)
    last_at: float = 0.0


class Statistics:
    """An observer that counts; safe from any thread.

    Args:
        clock: UTC seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: WeakKeyDictionary[LadderEngine, ModelCounts] = WeakKeyDictionary()

    def of(self, engine: LadderEngine) -> ModelCounts:
        """A copy of the counts of the model with that engine."""
        with self._lock:
            counts = self._counts.get(engine, ModelCounts())
            return ModelCounts(
                success=_copy(counts.success),
                failure=_copy(counts.failure),
                queue=_copy(counts.queue),
                compute=_copy(counts.compute),
                samples=counts.samples,
                batches=counts.batches,
                by_size={size: _copy(counts.by_size[size]) for size in sorted(counts.by_size)},
                last_at=counts.last_at,
            )

    def ran(
        self, engine: LadderEngine, rows: int, waits_s: Sequence[float], seconds: float
    ) -> None:
        """Count a batch."""
        with self._lock:
            counts = self._of(engine)
            counts.batches += 1
            counts.last_at = self._clock()
            counts.queue.add(sum(waits_s), len(waits_s))
            counts.compute.add(seconds * len(waits_s), len(waits_s))
            counts.by_size.setdefault(rows, Sum()).add(seconds)

    def settled(self, engine: LadderEngine, seconds: float, outcome: Array | ServerError) -> None:
        """Count a query's outcome."""
        with self._lock:
            counts = self._of(engine)
            if isinstance(outcome, ServerError):
                counts.failure.add(seconds)
            else:
                counts.success.add(seconds)
                counts.samples += len(outcome)

    def _of(self, engine: LadderEngine) -> ModelCounts:
        found = self._counts.get(engine)
        if found is None:
            found = self._counts[engine] = ModelCounts()
        return found


def _copy(total: Sum) -> Sum:
    return Sum(total.count, total.seconds)
