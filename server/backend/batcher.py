"""Batches without waiting: queries that arrive while the engine is busy are the next batch.

An idle engine starts at once on a single query. The queue is bounded in queries and in bytes. When
it is full, a query is refused at once. A query is not computed if its deadline has passed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from edge_sdk.session import Array
from server.backend.ladder import Entry, LadderEngine
from server.errors import BadRequestError, ExpiredError, OverloadedError, ServerError

logger = logging.getLogger(__name__)

# measured on two cores: a condition takes 50 to 100 us to wake a thread, and the way back as long
HANDOVER_S: Final = 5e-4

Done = Callable[[Array | ServerError], None]


@dataclass(frozen=True, slots=True)
class Job:
    """One admitted query.

    Attributes:
        deadline: on the monotonic clock, or None.
        done: called once, in the engine's thread, with the outputs or the error; must not wait.
    """

    engine: LadderEngine
    entry: Entry
    deadline: float | None
    done: Done


@dataclass(slots=True)
class Load:
    """Counts of the batcher since it started."""

    batches: int = 0
    queries: int = 0
    refused: int = 0
    expired: int = 0
    failed: int = 0


class Batcher:
    """The queue and the one thread that empties it.

    Args:
        batch_max: most samples in a batch.
        queue_max: most queries waiting.
        queue_bytes: most bytes of their tensors, because 256 queries may be 4 GB. The query that
            reaches the limit is the last one taken.
    """

    def __init__(
        self, *, batch_max: int = 32, queue_max: int = 256, queue_bytes: int = 64_000_000
    ) -> None:
        self.load = Load()
        self._batch_max = batch_max
        self._queue_max = queue_max
        self._queue_bytes = queue_bytes
        self._queue: deque[Job] = deque()
        self._bytes = 0  # of the tensors in the queue
        self._filled = threading.Condition()
        self._stopping = False
        self._busy = False
        self._batch_s: float | None = None
        self._thread = threading.Thread(target=self._work, name="splitedge-engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Queries in the queue."""
        return len(self._queue)

    @property
    def full(self) -> bool:
        """Whether the next query would be refused."""
        return len(self._queue) >= self._queue_max or self._bytes >= self._queue_bytes

    def submit(self, job: Job, *, may_run_here: bool = False) -> None:
        """Take a job, or refuse it at once.

        Args:
            may_run_here: the caller's own thread may compute. It does so when the engine is idle
                and batches take less than HANDOVER_S, the time to wake the engine's thread.
        Raises: OverloadedError saying when to try again.
        """
        with self._filled:
            if self.full or self._stopping:
                self.load.refused += 1
                raise OverloadedError(
                    f"{self.waiting} queries of {self._bytes} bytes are waiting; answer locally",
                    retry_after_s=self._drain_s(),
                )
            quick = self._batch_s is not None and self._batch_s < HANDOVER_S
            if self._queue or self._busy or not (may_run_here and quick):
                self._queue.append(job)
                self._bytes += job.entry.array.nbytes
                self._filled.notify()
                return
            self._busy = True
        self._process([job])

    def stop(self) -> None:
        """Refuse the waiting queries and end the thread."""
        with self._filled:
            self._stopping = True
            left = list(self._queue)
            self._queue.clear()
            self._bytes = 0
            self._filled.notify()
        for job in left:
            _settle(job, OverloadedError("the server is stopping; answer locally"))
        self._thread.join()

    def _drain_s(self) -> float:
        batches = max(1, len(self._queue) // self._batch_max)
        return round(min(max(batches * (self._batch_s or 0.0), 0.05), 10.0), 3)

    def _work(self) -> None:
        while True:
            with self._filled:
                while (self._busy or not self._queue) and not self._stopping:
                    self._filled.wait()
                if self._stopping:
                    return
                batch = self._take()
                self._busy = True
            self._process(batch)

    def _process(self, batch: Sequence[Job]) -> None:
        """Run a batch; this thread has set `_busy`."""
        start = time.monotonic()
        alive = self._drop_expired(batch, start)
        if alive:
            self._run(alive)
            took = time.monotonic() - start
            self._batch_s = took if self._batch_s is None else 0.8 * self._batch_s + 0.2 * took
        with self._filled:
            self._busy = False
            self._filled.notify()

    def _take(self) -> list[Job]:
        """The longest run of waiting jobs for one engine, up to the batch size."""
        first = self._pop()
        batch, rows = [first], len(first.entry.array)
        while self._queue and self._queue[0].engine is first.engine:
            rows += len(self._queue[0].entry.array)
            if rows > self._batch_max:
                break
            batch.append(self._pop())
        return batch

    def _pop(self) -> Job:
        job = self._queue.popleft()
        self._bytes -= job.entry.array.nbytes
        return job

    def _drop_expired(self, batch: Sequence[Job], now: float) -> list[Job]:
        alive = []
        for job in batch:
            if job.deadline is not None and job.deadline <= now:
                self.load.expired += 1
                _settle(job, ExpiredError("the deadline passed while the query waited"))
            else:
                alive.append(job)
        return alive

    def _run(self, batch: Sequence[Job]) -> None:
        try:
            outputs = batch[0].engine.run([job.entry for job in batch])
        except Exception as err:  # any fault of a graph: the thread lives on
            if len(batch) > 1:  # one bad query fails alone
                for job in batch:
                    self._run([job])
                return
            logger.exception("query failed")
            self.load.failed += 1
            failed = ServerError(f"the model failed on this query ({type(err).__name__})")
            _settle(batch[0], failed)
            return
        self.load.batches += 1
        for job, output in zip(batch, outputs, strict=True):
            if np.isfinite(output).all():
                self.load.queries += 1
                _settle(job, output)
            else:
                # finite weights and a finite input: its values are beyond what the model can add up
                self.load.failed += 1
                _settle(job, BadRequestError("the model gives NaN or infinity for this input"))


def _settle(job: Job, outcome: Array | ServerError) -> None:
    try:
        job.done(outcome)
    except Exception:  # the caller may be gone, its event loop closed: the thread lives on
        logger.exception("an answer could not be handed over")
