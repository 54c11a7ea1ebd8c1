"""Batches without waiting: queries that arrive while the engine is busy are the next batch.

An idle engine starts at once on a single query. Senders share the engine by fair_queue.py; one that
is alone has all of it. The queue is bounded in queries and in bytes. A query is refused at once if
the queue is full, or if its deadline would pass while it waits; it is not computed if its deadline
has passed, and what is computed too late is not answered.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np

from edge_sdk.session import Array
from edge_sdk.tracing.spans import Attribute
from server.backend.answering import AnsweringThread
from server.backend.fair_queue import FairQueue, Part, Pushed, Waiting
from server.backend.jobs import Job
from server.backend.ladder import LadderEngine
from server.backend.observers import Observers
from server.errors import BadRequestError, ExpiredError, OverloadedError, ServerError
from server.tracing.query_traces import trace_batch

logger = logging.getLogger(__name__)

# measured on two cores: a condition takes 50 to 100 us to wake a thread, and the way back as long
HANDOVER_S: Final = 5e-4
# Batches take no longer than this while several senders are active, because a query waits for the
# batch that runs when it comes. Small batches cost throughput (ResNet-18, one thread: 3.4 ms a
# sample alone, 2.5 by eight, 1.8 by 24), so eight samples may take longer.
SHARED_BATCH_S: Final = 0.02
EIGHT_ROWS_S: Final = 0.1
# after two queries of different senders, so long
SHARED_FOR_S: Final = 10.0
# A query is taken if its estimated wait is within this share of the time to its deadline: its own
# batch and the way back take time too, and an estimate is a mean.
WAIT_SHARE: Final = 0.5
# a sample of an engine that was not timed yet counts so much, so that shares are by samples
UNKNOWN_ROW_S: Final = 1e-3
# weight of the past in the mean of an engine's pace
_PAST: Final = 0.8
# by how much a median that is followed moves at a batch
_STEP: Final = 1.1
# by how much the least time of a batch grows at the next one
_FORGETS: Final = 1.02


@dataclass(slots=True)
class Load:
    """Counts of the batcher since it started."""

    batches: int = 0
    queries: int = 0
    refused: int = 0
    expired: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Ran:
    """Time of the engine for a batch, without the answering.

    Attributes:
        seconds: by the clock. processor_s: of the processor, in the thread that ran it.
    """

    seconds: float = 0.0
    processor_s: float = 0.0


@dataclass(slots=True)
class _Pace:
    """Pace of an engine: seconds and samples of its batches, the latest weighing most.

    Attributes:
        typical_s, typical_row_s: medians, followed step by step, of the engine's processor time in
            the thread that ran it, for a batch and for a sample. Other programs do not move them,
            nor threads that hold Python's lock, for which the engine's own thread waits whenever
            requests keep the event loop at work.
        least_s: what the engine takes by the clock where little holds it up: one that waits takes
            no processor time.
    """

    seconds: float = 0.0
    rows: float = 0.0
    typical_s: float = 0.0
    typical_row_s: float = 0.0
    least_s: float = 0.0

    @property
    def row_s(self) -> float:
        return self.seconds / self.rows if self.rows else 0.0

    def note(self, seconds: float, ran: _Ran, rows: int) -> None:
        self.seconds = _PAST * self.seconds + seconds
        self.rows = _PAST * self.rows + rows
        self.typical_s = _towards(ran.processor_s, self.typical_s)
        self.typical_row_s = _towards(ran.processor_s / rows, self.typical_row_s)
        self.least_s = min(ran.seconds, _FORGETS * self.least_s) if self.least_s else ran.seconds

    def is_quick(self, rows: int) -> bool:
        """Whether a batch of so many samples takes less than HANDOVER_S, as far as is known."""
        typical_s = max(self.typical_s, rows * self.typical_row_s, self.least_s)
        return 0.0 < typical_s < HANDOVER_S


class Batcher:
    """The queue, the one thread that empties it, and one that answers.

    Args:
        batch_max: most samples in a batch; a longer query is computed in several.
        queue_max: most queries waiting.
        queue_bytes: most bytes of their tensors, because 256 queries may be 4 GB. The query that
            reaches the limit is the last one taken.
    """

    def __init__(
        self, *, batch_max: int = 32, queue_max: int = 256, queue_bytes: int = 64_000_000
    ) -> None:
        self.load = Load()
        self.observers = Observers()
        self._batch_max = batch_max
        self._queue = FairQueue(queue_max, queue_bytes)
        self._filled = threading.Condition()
        self._stopping = False
        self._busy = False
        self._busy_until = 0.0  # by estimate
        self._busy_since: float | None = None  # of the batch that runs
        self._batch_s: float | None = None
        self._paces: WeakKeyDictionary[LadderEngine, _Pace] = WeakKeyDictionary()
        self._last_sender: str | None = None
        self._shared_until = 0.0
        self._counting = threading.Lock()  # the answers of two threads
        self._answering = AnsweringThread()
        self._thread = threading.Thread(target=self._work, name="splitedge-engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Queries in the queue."""
        return len(self._queue)

    @property
    def idle(self) -> bool:
        """Whether no query waits, no batch runs, and all that are computed have their answers."""
        with self._filled:
            return not self._queue and not self._busy and self._answering.free

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the tensors of these queries."""
        return self._queue.bytes

    @property
    def full(self) -> bool:
        """Whether the next query would be refused, or take another sender's place."""
        return self._queue.full

    def hangs(self, limit_s: float) -> str:
        """Why no query is computed; empty while batches end, or none waits.

        Args:
            limit_s: time that a batch may take.
        """
        since = self._busy_since
        if since is not None and time.monotonic() - since > limit_s:
            return f"a batch has not ended for {time.monotonic() - since:.0f} s"
        return "" if self._thread.is_alive() or self._stopping else "the engine's thread has ended"

    def submit(self, job: Job, *, may_run_here: bool = False) -> None:
        """Take a job, or refuse it at once.

        Args:
            may_run_here: the caller's own thread may compute. It does so when the engine is idle
                and batches take less than HANDOVER_S, the time to wake the engine's thread.
        Raises: OverloadedError saying when to try again.
        """
        with self._filled:
            if self._stopping:
                raise self._overloaded("the server is stopping")
            now = time.monotonic()
            self._note_sender(job.sender, now)
            pace = self._pace(job.engine)
            row_s = pace.row_s
            idle = not self._queue and not self._busy
            here = idle and may_run_here and pace.is_quick(job.rows)
            if here:
                self._busy = True
                pushed = Pushed(True, [])
            else:
                if not idle:  # an idle engine takes any job: else a bad estimate would stay
                    self._check_wait(job, row_s, now)
                pushed = self._queue.push(job, row_s or UNKNOWN_ROW_S)
                self._filled.notify()
            gives_way = [self._overloaded("others sent fewer") for _ in pushed.given_way]
        for waiting, error in zip(pushed.given_way, gives_way, strict=True):
            _settle(waiting, error)
        if not pushed.added:
            raise self._overloaded("the queue is full")
        if here:
            self._process([Part(Waiting(job, row_s), job.entry)])

    def computes_here(self, job: Job) -> bool:
        """Whether the caller's own thread would compute a job that it submits now."""
        pace = self._paces.get(job.engine)
        return not self._queue and not self._busy and pace is not None and pace.is_quick(job.rows)

    def submit_together(self, jobs: Sequence[Job]) -> list[tuple[Job, OverloadedError]]:
        """Take jobs, of which this thread may compute those that make a quick batch together.

        Returns: those that are refused.
        """
        refused = []
        left = list(jobs)
        while left:
            some = self._batch_of(left)
            left = left[len(some) :]
            if len(some) > 1 and self._computed_here(some):
                continue
            for job in some:
                try:
                    self.submit(job, may_run_here=True)
                except OverloadedError as err:
                    refused.append((job, err))
        return refused

    def _batch_of(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """The first jobs that make a quick batch of one engine together; one at least."""
        engine = jobs[0].engine
        pace, most = self._pace(engine), self._rows_max(engine)
        rows = 0
        for number, job in enumerate(jobs):
            rows += job.rows
            if number and (job.engine is not engine or rows > most or not pace.is_quick(rows)):
                return jobs[:number]
        return jobs

    def _computed_here(self, jobs: Sequence[Job]) -> bool:
        """Compute jobs as one batch in this thread, if the engine is idle."""
        with self._filled:
            if self._stopping or self._queue or self._busy:
                return False
            self._busy = True
            now = time.monotonic()
            for job in jobs:
                self._note_sender(job.sender, now)
            row_s = self._pace(jobs[0].engine).row_s
        self._process([Part(Waiting(job, row_s), job.entry) for job in jobs])
        return True

    def stop(self) -> None:
        """Refuse the waiting queries and end the thread."""
        with self._filled:
            self._stopping = True
            left = self._queue.clear()
            self._filled.notify()
        for waiting in left:
            _settle(waiting, OverloadedError("the server is stopping; answer locally"))
        self._thread.join()
        self._answering.stop()

    def _check_wait(self, job: Job, row_s: float, now: float) -> None:
        """Refuse a job whose deadline would pass in the queue.

        Raises: OverloadedError.
        """
        if job.deadline is None or job.deadline <= now or not row_s:
            return
        running_s = max(0.0, self._busy_until - now)
        wait_s = running_s + self._queue.wait_s(job.sender, job.rows * row_s)
        if wait_s > WAIT_SHARE * (job.deadline - now):
            raise self._overloaded(f"it would wait {wait_s:.3f} s, beyond its deadline")

    def _overloaded(self, why: str) -> OverloadedError:
        self.load.refused += 1
        return OverloadedError(
            f"{why}: {self.waiting} queries of {self._queue.bytes} bytes are waiting; answer"
            " locally",
            retry_after_s=self._drain_s(),
        )

    def _note_sender(self, sender: str, now: float) -> None:
        if self._last_sender not in (None, sender):
            self._shared_until = now + SHARED_FOR_S
        self._last_sender = sender

    def _pace(self, engine: LadderEngine) -> _Pace:
        pace = self._paces.get(engine)
        if pace is None:
            pace = self._paces[engine] = _Pace()
        return pace

    def _drain_s(self) -> float:
        batches = max(1, len(self._queue) // self._batch_max)
        seconds = max(batches * (self._batch_s or 0.0), self._queue.cost)
        return round(min(max(seconds, 0.05), 10.0), 3)

    def _rows_max(self, engine: LadderEngine) -> int:
        """Samples of the next batch of an engine."""
        row_s = self._pace(engine).row_s
        if not row_s or time.monotonic() >= self._shared_until:
            return self._batch_max
        rows = max(int(SHARED_BATCH_S / row_s), min(8, int(EIGHT_ROWS_S / row_s)), 1)
        return min(self._batch_max, rows)

    def _work(self) -> None:
        while True:
            with self._filled:
                while (self._busy or not self._queue) and not self._stopping:
                    self._filled.wait()
                if self._stopping:
                    return
                taken = self._queue.take(time.monotonic(), self._rows_max)
                self._busy = True
            for waiting in taken.expired:
                self._expire(waiting)
            self._process(taken.parts)

    def _process(self, batch: Sequence[Part]) -> None:
        """Run a batch; this thread has set `_busy`."""
        start = self._busy_since = time.monotonic()
        rows, ran = 0, _Ran()
        try:
            if batch:
                self._busy_until = start + sum(
                    len(part.entry.array) * part.waiting.row_cost for part in batch
                )
                self._run(batch, ran)
                took = time.monotonic() - start
                self._batch_s = (
                    took if self._batch_s is None else _PAST * self._batch_s + 0.2 * took
                )
                rows = sum(len(part.entry.array) for part in batch)
        finally:  # whatever happened: no query is answered while it is set
            with self._filled:
                if rows:
                    engine = batch[0].waiting.job.engine
                    self._pace(engine).note(took, ran, rows)
                self._busy = False
                self._busy_since = None
                if self._queue:  # else the engine's thread would wake up for nothing
                    self._filled.notify()
            if rows:
                waits_s = [start - part.waiting.job.at for part in batch]
                self.observers.ran(engine, rows, waits_s, ran.seconds)

    def _run(self, batch: Sequence[Part], ran: _Ran) -> None:
        """Compute a batch, note what the engine took, and answer it or have it answered."""
        start, begun = time.monotonic(), time.thread_time()
        try:
            outputs = batch[0].waiting.job.engine.run([part.entry for part in batch])
        except Exception as err:  # any fault of a graph: the thread lives on
            if len(batch) > 1:  # one bad query fails alone
                for part in batch:
                    self._run([part], ran)
                return
            logger.exception("query failed")
            failed = ServerError(f"the model failed on this query ({type(err).__name__})")
            self._fail(batch[0].waiting, failed)
            ran.seconds += time.monotonic() - start
            ran.processor_s += time.thread_time() - begun
            return
        end = time.monotonic()
        ran.seconds += end - start
        ran.processor_s += time.thread_time() - begun
        self.load.batches += 1
        _trace(batch, start, end)
        if not (self._goes_on(batch, end - start) and self._hand_over(batch, outputs)):
            self._answer(batch, outputs)

    def _goes_on(self, batch: Sequence[Part], took_s: float) -> bool:
        """Whether the engine would gain time if another thread gave the answers of a batch.

        What a caller computes in its own thread is answered there, as it expects. The parts of a
        split job are answered here, where one comes after the other.
        """
        if threading.current_thread() is not self._thread:
            return False
        whole = all(len(part.entry.array) == part.waiting.job.rows for part in batch)
        return whole and took_s > HANDOVER_S and bool(self._queue)

    def _hand_over(self, batch: Sequence[Part], outputs: Sequence[Array]) -> bool:
        return self._answering.take(partial(self._answer, batch, outputs))

    def _answer(self, batch: Sequence[Part], outputs: Sequence[Array]) -> None:
        """Give each part of a batch its outputs."""
        for part, output in zip(batch, outputs, strict=True):
            try:
                self._take(part, output)
            except Exception as err:  # no room for it, say: this query fails, the thread lives on
                logger.exception("answer failed")
                failed = ServerError(f"the answer could not be kept ({type(err).__name__})")
                self._fail(part.waiting, failed)

    def _take(self, part: Part, output: Array) -> None:
        if np.isfinite(output).all():
            self._add(part.waiting, output)
            return
        # finite weights and a finite input: its values are beyond what the model can add up
        error = BadRequestError("the model gives NaN or infinity for this input")
        self._fail(part.waiting, error)

    def _add(self, waiting: Waiting, output: Array) -> None:
        """Add the outputs of a part; the job has its outcome when it has those of all parts."""
        job = waiting.job
        if len(output) < job.rows:
            waiting.outputs.append(output)
            if sum(map(len, waiting.outputs)) < job.rows:
                return
            output = np.concatenate(waiting.outputs)
        if job.deadline is not None and job.deadline <= time.monotonic():
            self._expire(waiting)
            return
        with self._counting:
            self.load.queries += 1
        _settle(waiting, output)

    def _fail(self, waiting: Waiting, error: ServerError) -> None:
        with self._counting:
            self.load.failed += 1
        _settle(waiting, error)

    def _expire(self, waiting: Waiting) -> None:
        with self._counting:
            self.load.expired += 1
        _settle(waiting, ExpiredError("the deadline passed before the query was computed"))


def _towards(value: float, median: float) -> float:
    """A median that is followed one step nearer to a new value; the value itself for the first."""
    if not median:
        return value
    return min(value, median * _STEP) if value > median else max(value, median / _STEP)


def _settle(waiting: Waiting, outcome: Array | ServerError) -> None:
    waiting.over = True  # of a job that failed, no other part is computed
    try:
        waiting.job.done(outcome)
    except Exception:  # the caller may be gone, its event loop closed: the thread lives on
        logger.exception("an answer could not be handed over")


def _trace(batch: Sequence[Part], begin_s: float, end_s: float) -> None:
    """Record a batch with a query that is traced."""
    jobs = [part.waiting.job for part in batch]
    traces = [job.trace for job in jobs if job.trace is not None]
    if not traces:
        return
    model = jobs[0].engine.manifest
    attributes: dict[str, Attribute] = {
        "splitedge.model": model.name,
        "splitedge.version": model.version,
        "splitedge.queries": len(batch),
        "splitedge.rows": sum(len(part.entry.array) for part in batch),
    }
    trace_batch(traces, begin_s, end_s, attributes)
