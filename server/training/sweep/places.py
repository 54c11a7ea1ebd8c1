"""Places in which a sweep's runs are done: processes of this machine, or tasks of a Ray cluster."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol

from server.training.cluster.ray_cluster import LostWorkerError, Promise, RayCluster
from server.training.comparison.held_out import Measure
from server.training.sweep.grid import Task
from server.training.sweep.run import run_task


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that has ended in its place.

    Attributes:
        error: message of an error that is the recipe's. lost: how its process ended before the run
            did. Both are empty for a run that is over.
    """

    task: Task
    error: str = ""
    lost: str = ""


class Places(Protocol):
    """Places for so many runs at a time."""

    @property
    def count(self) -> int:
        """Runs at a time."""

    def start(self, task: Task) -> None:
        """Start a run in a free place."""

    def next(self, timeout_s: float) -> Ended | None:
        """Wait for a run to end; None when the time is over."""

    def close(self) -> None:
        """End the runs that are under way; they have their rounds on the disk."""


class ProcessPlaces:
    """Processes of this machine, one for each run; they end with this one, however it ends."""

    def __init__(self, count: int, measure: Measure) -> None:
        self._count, self._measure = count, measure
        self._under_way: dict[Connection, tuple[Task, SpawnProcess]] = {}

    @property
    def count(self) -> int:
        return self._count

    def start(self, task: Task) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_child, args=(theirs, *_words(task, self._measure)))
        process.daemon = True
        process.start()
        theirs.close()
        self._under_way[ours] = task, process

    def next(self, timeout_s: float) -> Ended | None:
        ready = wait(self._under_way, timeout_s)
        for connection, (task, process) in self._under_way.items():
            if connection not in ready:
                continue
            del self._under_way[connection]
            try:
                error: str | None = connection.recv()
            except (EOFError, OSError):
                process.join()
                return Ended(task, lost=f"its process has ended with status {process.exitcode}")
            finally:
                connection.close()
            process.join()
            return Ended(task, error or "")
        return None

    def close(self) -> None:
        for connection, (_, process) in self._under_way.items():
            process.terminate()
            process.join()
            connection.close()
        self._under_way.clear()


class RayPlaces:
    """Tasks of a Ray cluster, whose nodes share the folder of the runs."""

    def __init__(self, cluster: RayCluster, count: int, measure: Measure) -> None:
        self._cluster, self._count, self._measure = cluster, count, measure
        self._under_way: dict[Promise, Task] = {}

    @property
    def count(self) -> int:
        return self._count

    def start(self, task: Task) -> None:
        self._under_way[self._cluster.task(run_task, *_words(task, self._measure))] = task

    def next(self, timeout_s: float) -> Ended | None:
        promise = self._cluster.first(list(self._under_way), timeout_s)
        if promise is None:
            return None
        task = self._under_way.pop(promise)
        try:
            return Ended(task, self._cluster.result(promise) or "")
        except LostWorkerError as err:
            return Ended(task, lost=f"its process was lost ({err})")

    def close(self) -> None:
        for promise in self._under_way:
            self._cluster.cancel(promise)
        self._under_way.clear()


def _words(task: Task, measure: Measure) -> tuple[Mapping[str, Any], str, Measure, str]:
    """The arguments of `run_task`."""
    return task.recipe.to_dict(), str(task.folder.absolute()), measure, str(Path.cwd())


def _child(connection: Connection, *words: Any) -> None:
    """Do one run, and say how it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the sweep, which ends this process
    logging.disable(
        logging.WARNING
    )  # a run's own report has them; here nothing says whose they are
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    connection.send(run_task(*words))


def _end_with_parent(connection: Connection) -> None:
    """End this process once its parent has: a run without one would hold its folder's lock."""
    try:
        connection.recv()
    except (EOFError, OSError):
        os._exit(1)
