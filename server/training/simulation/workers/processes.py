"""Workers that are processes of this machine, started by the simulation."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from edge_sdk.nets.memory_format import ChosenFormat
from server.errors import WorkerError
from server.training.recipe.recipe import Recipe
from server.training.simulation.workers.channel import receive, send
from server.training.simulation.workers.work import (
    Answered,
    Failed,
    Result,
    Trained,
    Work,
)

END_S: Final = 5.0

# what a worker process runs, from a pipe to the parent, a recipe's tables and its memory format
Job = Callable[[Connection, Mapping[str, Any], ChosenFormat], None]


class ProcessPool:
    """Worker processes, started at once; they read the data while the parent goes on.

    Args:
        job: what each process runs. count: processes.
        memory_format: the simulation's.
    """

    def __init__(self, job: Job, count: int, recipe: Recipe, memory_format: ChosenFormat) -> None:
        # spawned: a fork would copy torch's threads in whatever state they are
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=job,
                args=(theirs, recipe.to_dict(), memory_format),
                name=f"splitedge-worker-{number}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    @property
    def count(self) -> int:
        """Workers."""
        return len(self._connections)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run, in order."""
        return [p.pid for p in self._processes if p.pid is not None and p.is_alive()]

    def send(self, worker: int, asked: Work) -> None:
        """Give work to a worker that waits for some.

        Raises: WorkerError if it has ended.
        """
        try:
            send(self._connections[worker], asked)
        except OSError as err:
            raise self._ended(worker) from err

    def next(self) -> tuple[int, Trained | Answered]:
        """Wait for the next result of any worker; and which one's it is.

        Raises: WorkerError if one has ended or failed.
        """
        ready = wait(self._connections)
        worker = self._connections.index(ready[0])  # type: ignore[arg-type]  # only connections
        try:
            result: Result = receive(self._connections[worker])
        except (EOFError, OSError) as err:
            raise self._ended(worker) from err
        if isinstance(result, Failed):
            raise WorkerError(f"worker {worker}: {result.why}")
        return worker, result

    def close(self) -> None:
        """End the workers."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(END_S)
            if process.is_alive():
                process.terminate()
                process.join()

    def _ended(self, worker: int) -> WorkerError:
        process = self._processes[worker]
        process.join(END_S)
        code = process.exitcode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with status {code}"
        return WorkerError(
            f"worker {worker} of {self.count} has ended {how}, possibly for lack of memory; go on"
            " from the last round with --resume, and with fewer --workers"
        )
