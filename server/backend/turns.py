"""Queries that arrive in one turn of an event loop, computed together at its end.

Many connections may have a request in one turn. A quick model is computed on the event loop; one
after the other, each query would be a batch of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from server.backend.batcher import Batcher
from server.backend.jobs import Job

# they wait for each other until the end of the turn, and no longer than so many need to be read
JOBS_MOST: Final = 32


class Turn:
    """The jobs of the turn that runs; for the thread of one event loop.

    Jobs whose model is not quick, or that find the engine at work, do not wait here.

    Args:
        alone: whether no other job can come in this turn; then the first one does not wait.
    """

    def __init__(self, batcher: Batcher, alone: Callable[[], bool] = lambda: False) -> None:
        self._batcher = batcher
        self._alone = alone
        self._jobs: list[Job] = []

    def submit(self, job: Job) -> None:
        """Take a job; its outcome may come within this call, or at the end of the turn.

        Raises: OverloadedError if it is refused at once.
        """
        if not self._batcher.computes_here(job) or (not self._jobs and self._alone()):
            self._batcher.submit(job, may_run_here=True)
            return
        self._jobs.append(job)
        if len(self._jobs) == 1:
            asyncio.get_running_loop().call_soon(self._end)
        elif len(self._jobs) >= JOBS_MOST:
            self._end()

    def _end(self) -> None:
        jobs, self._jobs = self._jobs, []
        for refused, error in self._batcher.submit_together(jobs):
            refused.done(error)
