"""Workers that are actors of a Ray cluster, on this machine or on several.

An actor that is lost, by a kill, for lack of memory or with its machine, is replaced by another,
which is sent again what the lost one had been sent in its round. The round goes on, and the weights
are the same, bit for bit.
"""

from __future__ import annotations

import logging
import platform
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from edge_sdk import __version__
from edge_sdk.cli.times import plural
from edge_sdk.errors import ConfigurationError
from edge_sdk.nets.memory_format import ChosenFormat
from server.errors import WorkerError
from server.training.cluster.ray_cluster import Actor, LostWorkerError, Promise, RayCluster
from server.training.recipe.recipe import Recipe
from server.training.simulation.workers.channel import decode, encode
from server.training.simulation.workers.history import History
from server.training.simulation.workers.work import Answered, Failed, Open, Result, Trained, Work

logger = logging.getLogger(__name__)

# Losses of one worker in a row, without a result between them, after which the run ends.
LOSSES_MOST: Final = 3
# A worker that waits so long for a free processor is told of.
PATIENCE_S: Final = 30.0

# an actor by a recipe's tables and its memory format
StartActor = Callable[[Mapping[str, Any], ChosenFormat], Actor]


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions that decide the last bits of weights, beside a recipe."""

    splitedge: str
    torch: str
    instructions: str
    machine: str

    @classmethod
    def here(cls) -> Versions:
        """The versions of this process."""
        instructions = torch.backends.cpu.get_cpu_capability()
        return cls(__version__, torch.__version__, instructions, platform.machine())


@dataclass(frozen=True, slots=True)
class Hello:
    """The first words of a worker.

    Attributes:
        node: name of its machine.
    """

    versions: Versions
    node: str
    pid: int


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A call that a worker has not answered.

    Attributes:
        due: whether its results are wanted.
    """

    worker: int
    due: bool


class RayPool:
    """Actors, started at once; they read the data while the parent goes on.

    Args:
        start: starts an actor: its `hello()` gives a Hello, its `results(work)` results, encoded.
        cluster: of these actors; it is left open.
        count: actors.
        memory_format: the simulation's.
    Raises: ConfigurationError if the cluster is too small.
    """

    def __init__(
        self,
        start: StartActor,
        cluster: RayCluster,
        count: int,
        recipe: Recipe,
        memory_format: ChosenFormat,
    ) -> None:
        if count > cluster.cpus:
            raise ConfigurationError(
                f"--workers {count}: expected at most {cluster.cpus}, the processors of the Ray"
                " cluster; each worker takes one"
            )
        self._cluster = cluster
        self._start_actor = partial(start, recipe.to_dict(), memory_format)
        self._histories: list[History[Promise]] = [History() for _ in range(count)]
        self._hellos: list[Hello | None] = [None] * count
        self._losses = [0] * count
        self._under_way: dict[Promise, _UnderWay] = {}
        self._results: deque[tuple[int, Trained | Answered]] = deque()
        self._opened: tuple[Open, Promise] | None = None
        self._actors: list[Actor] = []
        for worker in range(count):
            self._actors.append(self._start(worker))

    @property
    def count(self) -> int:
        """Workers."""
        return len(self._actors)

    @property
    def hellos(self) -> list[Hello | None]:
        """First words of each worker; None for one that has not begun."""
        return self._hellos

    def send(self, worker: int, asked: Work) -> None:
        """Give work to a worker."""
        kept = self._kept(asked)
        self._histories[worker].add(asked, kept)
        self._call(worker, kept, due=not isinstance(asked, Open))

    def next(self) -> tuple[int, Trained | Answered]:
        """Wait for the next result of any worker; and which one's it is.

        Raises: WorkerError if one failed, or is lost time and again; ConfigurationError if one
            would give other bits.
        """
        while not self._results:
            promise = self._cluster.first(list(self._under_way), PATIENCE_S)
            if promise is None:
                self._tell_waiting()
            else:
                self._take(promise)
        return self._results.popleft()

    def close(self) -> None:
        """End the workers."""
        for actor in self._actors:
            self._cluster.end(actor)
        self._under_way.clear()
        self._histories.clear()
        self._opened = None

    def _start(self, worker: int) -> Actor:
        actor = self._start_actor()
        self._under_way[self._cluster.call(actor, "hello")] = _UnderWay(worker, due=True)
        return actor

    def _kept(self, asked: Work) -> Promise:
        """The work in the cluster's store; a round's weights once for all workers."""
        if not isinstance(asked, Open):
            return self._cluster.share(encode(asked))
        if self._opened is None or self._opened[0] is not asked:
            self._opened = asked, self._cluster.share(encode(asked))
        return self._opened[1]

    def _call(self, worker: int, kept: Promise, *, due: bool) -> None:
        promise = self._cluster.call(self._actors[worker], "results", kept)
        self._under_way[promise] = _UnderWay(worker, due)

    def _take(self, promise: Promise) -> None:
        """Take what a worker gave, or put another in its place."""
        call = self._under_way.pop(promise)
        try:
            found: Hello | tuple[Result, ...] = decode(self._cluster.result(promise))
        except LostWorkerError as err:
            self._replace(call.worker, err)
            return
        if isinstance(found, Hello):
            self._check(call.worker, found)
            return
        for result in found:
            if isinstance(result, Failed):
                raise WorkerError(f"worker {call.worker}: {result.why}")
            if call.due:
                self._results.append((call.worker, result))
        if call.due:
            self._losses[call.worker] = 0
            self._histories[call.worker].came()

    def _replace(self, worker: int, err: LostWorkerError) -> None:
        """Start a worker in the place of a lost one, and bring it to the same state."""
        self._losses[worker] += 1
        hello = self._hellos[worker]
        who = "" if hello is None else f" (process {hello.pid} on {hello.node})"
        if self._losses[worker] == LOSSES_MOST:
            raise WorkerError(
                f"worker {worker} of {self.count}{who} was lost"
                f" {plural(LOSSES_MOST, 'time')} in a row, possibly for lack of memory: {err}; go"
                " on from the last round with --resume, and with fewer --workers"
            ) from err
        logger.warning(
            "worker %d of %d%s was lost (%s); another does its work again",
            worker, self.count, who, err,
        )  # fmt: skip
        self._under_way = {p: call for p, call in self._under_way.items() if call.worker != worker}
        self._hellos[worker] = None
        self._actors[worker] = self._start(worker)
        for sent in self._histories[worker].again():
            self._call(worker, sent.kept, due=sent.due)

    def _check(self, worker: int, hello: Hello) -> None:
        self._hellos[worker] = hello
        ours = Versions.here()
        if hello.versions != ours:
            raise ConfigurationError(
                f"worker {worker} on {hello.node}: expected {ours}, as here, got {hello.versions};"
                " weights would depend on who trains whom: install the same on all nodes, and where"
                " processors differ set ATEN_CPU_CAPABILITY to what all of them have, such as avx2"
            )

    def _tell_waiting(self) -> None:
        missing = [str(worker) for worker, hello in enumerate(self._hellos) if hello is None]
        if missing:
            logger.warning(
                "worker %s waits for a free processor of the Ray cluster, or still reads the data",
                ", ".join(missing),
            )
