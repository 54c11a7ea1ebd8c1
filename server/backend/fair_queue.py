"""A queue that gives each sender its share: start-time fair queueing over the engine's seconds.

Goyal, Vin and Cheng, 1996: the head of each sender's queue has a start tag, and the smallest tag is
served first. Serving a job moves its sender's tag on by the job's cost. A sender that was idle
starts at the tag in service, so it neither saves up time nor waits for what others saved.

When the queue is full, the sender that holds most of it gives way, not the one that comes last.
Pure: no clock, no lock, no thread.
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final

from edge_sdk.session import Array
from server.backend.jobs import Job
from server.backend.ladder import Entry, LadderEngine

# A batch takes no more of the time to a deadline of its jobs, by estimate. With batches as long as
# the time itself, a query that came during one would be late after the next.
BATCH_SHARE: Final = 0.25
# senders without a job that are remembered, for what they had lately
IDLE_MAX: Final = 64


@dataclass(slots=True, eq=False)
class Waiting:
    """A job in the queue, and how much of it is computed.

    Attributes:
        row_cost: seconds of the engine for a sample, by estimate.
        taken: samples that batches have taken. outputs: of those that are computed.
        over: it has its outcome, and what is left of it needs no computing.
    """

    job: Job
    row_cost: float
    taken: int = 0
    outputs: list[Array] = field(default_factory=list)
    over: bool = False

    @property
    def left(self) -> int:
        """Samples that no batch has taken."""
        return self.job.rows - self.taken

    @property
    def cost(self) -> float:
        """Seconds of the engine for what is left, by estimate."""
        return self.left * self.row_cost


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive samples of one job, in one batch."""

    waiting: Waiting
    entry: Entry


@dataclass(frozen=True, slots=True)
class Pushed:
    """Whether a job was added, and the jobs that gave way to it."""

    added: bool
    given_way: list[Waiting]


@dataclass(frozen=True, slots=True)
class Taken:
    """One batch for one engine, and the jobs whose deadline passed while they waited."""

    parts: list[Part]
    expired: list[Waiting]


@dataclass(slots=True, eq=False)
class _Flow:
    """The jobs of one sender.

    Attributes:
        start: tag of its head; of the next job, where it is empty.
        bytes, cost: of its jobs. version: of the one entry in the heap that counts.
    """

    start: float
    jobs: deque[Waiting] = field(default_factory=deque)
    bytes: int = 0
    cost: float = 0.0
    version: int = -1


class FairQueue:
    """The waiting jobs.

    Args:
        most: jobs that it holds.
        most_bytes: of their tensors. The job that reaches it is the last one taken.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._flows: dict[str, _Flow] = {}
        # start tag, finish tag, version: of two that may start, the shorter job is first
        self._heap: list[tuple[float, float, int, _Flow]] = []
        self._versions = count()
        self._now = 0.0  # the start tag in service
        self._jobs = 0
        self._busy = 0  # senders with a job
        self.bytes = 0
        self.cost = 0.0

    def __len__(self) -> int:
        """Number of waiting jobs."""
        return self._jobs

    @property
    def senders(self) -> int:
        """Senders that are remembered: those with a job, and some that had one lately."""
        return len(self._flows)

    @property
    def full(self) -> bool:
        """Whether a job only gets in if another one gives way."""
        return self._jobs >= self._most or self.bytes >= self._most_bytes

    def wait_s(self, sender: str, cost: float) -> float:
        """Seconds until a job that came now would be computed, by estimate.

        It waits for all before it, or until the sender's share has paid for it.
        """
        flow = self._flows.get(sender)
        own = cost + (flow.cost if flow else 0.0)
        senders = self._busy + (not (flow and flow.jobs))
        return min(self.cost + cost, own * senders)

    def push(self, job: Job, row_cost: float) -> Pushed:
        """Add a job; in a full queue the sender that holds most of it gives way to others."""
        given_way: list[Waiting] = []
        while self.full:
            found = self._to_give_way(job)
            if found is None:
                return Pushed(False, given_way)
            given_way.append(found)
        self._add(Waiting(job, row_cost))
        return Pushed(True, given_way)

    def take(self, now: float, rows_max: Callable[[LadderEngine], int]) -> Taken:
        """The next batch: jobs of one engine, fair to their senders.

        A job is split only if it is longer than a whole batch. Deadlines of its jobs make a batch
        shorter (BATCH_SHARE).

        Args:
            now: jobs with a deadline up to then are expired.
            rows_max: samples of a batch for that engine.
        """
        parts: list[Part] = []
        expired: list[Waiting] = []
        passed_over = []
        engine: LadderEngine | None = None
        most = used = 0
        limit = 1
        while self._heap and used < limit:
            *_, version, flow = heapq.heappop(self._heap)
            if version != flow.version:
                continue
            head = flow.jobs[0]
            job = head.job
            if head.over or (job.deadline is not None and job.deadline <= now):
                if not head.over:
                    expired.append(head)
                self._remove(flow, head)
                self._enter(flow)
                continue
            if engine is None:
                engine, most = job.engine, rows_max(job.engine)
                limit = most
            rows = min(head.left, limit - used if head.left > most else most)
            in_time = max(_rows_in_time(head, now), rows if not used else 0)
            if job.engine is not engine or used + rows > min(limit, in_time):
                passed_over.append(flow)
                continue
            self._now = max(self._now, flow.start)
            parts.append(self._part(flow, head, rows))
            used += rows
            limit = min(limit, in_time)
            self._enter(flow)
        for flow in passed_over:
            self._enter(flow)
        self._forget_idle()
        return Taken(parts, expired)

    def clear(self) -> list[Waiting]:
        """Remove all jobs and return those that have no outcome yet."""
        left = [waiting for flow in self._flows.values() for waiting in flow.jobs]
        self._flows.clear()
        self._heap.clear()
        self._jobs = self._busy = self.bytes = 0
        self.cost = 0.0
        return [waiting for waiting in left if not waiting.over]

    def _to_give_way(self, job: Job) -> Waiting | None:
        """Remove and return the newest job of the sender with most of what there is too much of.

        Returns: None if no sender has more than this job's own would have with it.
        """
        jobs = self._jobs >= self._most
        greedy = max(self._flows.values(), key=lambda flow: len(flow.jobs) if jobs else flow.bytes)
        own = self._flows.get(job.sender) or _Flow(0.0)
        if jobs:
            more = len(greedy.jobs) > len(own.jobs) + 1
        else:
            more = greedy.bytes > own.bytes + job.entry.array.nbytes
        newest = greedy.jobs[-1]
        if not more or newest.taken:
            return None
        self._remove(greedy, newest)
        self._enter(greedy)
        return newest

    def _add(self, waiting: Waiting) -> None:
        flow = self._flows.get(waiting.job.sender)
        if flow is None:
            flow = self._flows[waiting.job.sender] = _Flow(self._now)
        flow.jobs.append(waiting)
        self._count(flow, waiting, 1)
        if len(flow.jobs) == 1:
            self._busy += 1
            flow.start = max(flow.start, self._now)
            self._enter(flow)

    def _remove(self, flow: _Flow, waiting: Waiting) -> None:
        """Remove the first or the last job of a sender."""
        if flow.jobs[0] is waiting:
            flow.jobs.popleft()
        else:
            flow.jobs.pop()
        self._count(flow, waiting, -1)
        if not flow.jobs:
            self._busy -= 1
            flow.cost = 0.0  # what rounding left
        if not self._jobs:
            self.cost = 0.0

    def _count(self, flow: _Flow, waiting: Waiting, sign: int) -> None:
        size = sign * waiting.job.entry.array.nbytes
        self._jobs += sign
        self.bytes += size
        self.cost += sign * waiting.cost
        flow.bytes += size
        flow.cost += sign * waiting.cost

    def _part(self, flow: _Flow, head: Waiting, rows: int) -> Part:
        entry = head.job.entry
        if rows < len(entry.array):
            entry = replace(entry, array=entry.array[head.taken : head.taken + rows])
        cost = rows * head.row_cost
        flow.start += cost
        if rows == head.left:
            self._remove(flow, head)
            head.taken += rows
        else:
            head.taken += rows
            flow.cost -= cost
            self.cost -= cost
        return Part(head, entry)

    def _enter(self, flow: _Flow) -> None:
        """Give the head of a flow its place in the heap."""
        flow.version = next(self._versions)
        if flow.jobs:
            finish = flow.start + flow.jobs[0].cost
            heapq.heappush(self._heap, (flow.start, finish, flow.version, flow))

    def _forget_idle(self) -> None:
        if not self._jobs:
            self._flows.clear()
            self._heap.clear()
        elif len(self._flows) > 2 * (self._busy + IDLE_MAX):
            idle = sorted((flow.start, name) for name, flow in self._flows.items() if not flow.jobs)
            for _, name in idle[:-IDLE_MAX]:  # those that owe most stay
                del self._flows[name]


def _rows_in_time(waiting: Waiting, now: float) -> int:
    """The longest batch that a job's deadline allows."""
    deadline = waiting.job.deadline
    if deadline is None or not waiting.row_cost:
        return sys.maxsize
    return int(BATCH_SHARE * (deadline - now) / waiting.row_cost)
