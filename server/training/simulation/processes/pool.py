"""Worker processes that share out a simulation's clients; the weights are those of one process.

    clients that do not meet    a worker trains a client's whole round, the server's copy of the
                                suffix included: SplitFedV1, multi-exit, SplitGP, HARMONY, SplitLPF,
                                PFSL, FedAvg and all whose clients train the whole network
    clients that meet           workers have the clients' halves; server steps stay in the parent,
                                one after another: SuperSFL, SplitFedV2, SCALA, MergeSFL, BESplit

Every draw is keyed by client, round and step, and floats are added in client order by the parent,
so neither the number of workers nor who trains whom changes a bit.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from edge_sdk.nets.memory_format import ChosenFormat
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.messages import Reply, Request, StartRound
from server.errors import WorkerError
from server.training.core.weighted_mean import Contribution
from server.training.recipe.recipe import Recipe
from server.training.rounds.context import RoundContext
from server.training.rounds.round import RoundUnderWay
from server.training.simulation.allocator import keep_freed_memory
from server.training.simulation.processes.channel import receive, send
from server.training.simulation.processes.work import (
    Answered,
    Asked,
    Failed,
    Open,
    Result,
    Train,
    Trained,
    Work,
)

END_S: Final = 5.0

# what a worker process runs, from a pipe to the parent, a recipe's tables and its memory format
Job = Callable[[Connection, Mapping[str, Any], ChosenFormat], None]


class WorkerPool:
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


StartWorkers = Callable[[Recipe, ChosenFormat], WorkerPool]


class PoolTransport:
    """Clients in worker processes, reached one message at a time.

    Attributes:
        failures: the reason of each client that last gave no reply; the report takes them.
    """

    def __init__(self, clients: Mapping[str, TrainingClient], pool: WorkerPool) -> None:
        self.clients = clients
        self.failures: dict[str, str] = {}
        self._pool = pool
        self._home: dict[str, int] = {}

    def exchange(
        self,
        requests: Mapping[str, Request],
        deadline_s: float,  # noqa: ARG002 - nothing waits for a network
    ) -> dict[str, Reply]:
        """Replies in the order of the requests."""
        keep_freed_memory()
        known = {name: request for name, request in requests.items() if name in self.clients}
        self._settle(name for name, each in known.items() if isinstance(each, StartRound))
        parts: dict[int, list[Asked]] = {}
        for name, request in known.items():
            starts = isinstance(request, StartRound)
            personal = self.clients[name].personal if starts else None
            parts.setdefault(self._home[name], []).append(Asked(name, request, personal))
        for worker, part in parts.items():
            self._pool.send(worker, tuple(part))
        found: dict[str, Reply] = {}
        for _ in known:
            _, answer = self._pool.next()
            assert isinstance(answer, Answered), "workers answer what they are asked"
            if answer.personal is not None:
                self.clients[answer.name].personal = answer.personal
            if answer.failure is not None:
                self.failures[answer.name] = answer.failure
            if answer.reply is not None:
                found[answer.name] = answer.reply
        return {name: found[name] for name in known if name in found}

    def train(
        self,
        context: RoundContext,  # noqa: ARG002 - workers have their own
        now: RoundUnderWay,
        names: Sequence[str],
    ) -> dict[str, Contribution]:
        """Train whole rounds of clients that do not meet; contributions in the order of `names`."""
        pool, view = self._pool, now.view
        first = Open(now.number, now.supervised, view.sent, view.memory)
        # the largest first, so that no worker is left alone with one at the end
        left = sorted(names, key=lambda name: self.clients[name].samples)
        free = list(range(pool.count))
        for worker in free:
            pool.send(worker, first)
        done: dict[str, Trained] = {}
        while len(done) < len(names):
            while free and left:
                name = left.pop()
                pool.send(free.pop(), Train(name, self.clients[name].personal))
            worker, trained = pool.next()
            assert isinstance(trained, Trained), "workers train what they are given"
            free.append(worker)
            done[trained.name] = self._taken(now, trained)
        found: dict[str, Contribution] = {}
        for name in names:
            now.add(done[name].then)
            found |= done[name].found
            if (failure := done[name].failure) is not None:
                self.failures[name] = failure
        return found

    def _taken(self, now: RoundUnderWay, trained: Trained) -> Trained:
        """Take over what a client keeps, and move its contribution to the disk in cohorts."""
        self.clients[trained.name].personal = trained.personal
        if now.spool is None:
            return trained
        spooled = {name: each.spool(now.spool) for name, each in trained.found.items()}
        return replace(trained, found=spooled)

    def _settle(self, starting: Iterable[str]) -> None:
        """Give each client that starts a round to the worker with the least to do."""
        loads = [0] * self._pool.count
        for name in sorted(starting, key=lambda each: -self.clients[each].samples):
            worker = loads.index(min(loads))
            self._home[name] = worker
            loads[worker] += self.clients[name].samples
