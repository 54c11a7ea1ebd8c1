"""Workers that share out a simulation's clients; the weights are those of one process.

    clients that do not meet    a worker trains a client's whole round, the server's copy of the
                                suffix included: SplitFedV1, multi-exit, SplitGP, HARMONY, SplitLPF,
                                PFSL, FedAvg and all whose clients train the whole network
    clients that meet           workers have the clients' halves; server steps stay in the parent,
                                one after another: SuperSFL, SplitFedV2, SCALA, MergeSFL, BESplit

Every draw is keyed by client, round and step, and floats are added in client order by the parent,
so neither the number of workers nor who trains whom changes a bit.

ProcessPool (processes.py)   processes of this machine, over pipes
RayPool (ray_pool.py)        actors of a Ray cluster, over its object store
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from edge_sdk.nets.memory_format import ChosenFormat
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.messages import Reply, Request, StartRound
from server.training.core.weighted_mean import Contribution
from server.training.recipe.recipe import Recipe
from server.training.rounds.context import RoundContext
from server.training.rounds.round import RoundUnderWay
from server.training.simulation.allocator import keep_freed_memory
from server.training.simulation.workers.work import Answered, Asked, Open, Train, Trained, Work


class WorkerPool(Protocol):
    """Workers that have the recipe's data and network, and do what they are sent, in that order."""

    @property
    def count(self) -> int:
        """Workers."""

    def send(self, worker: int, asked: Work) -> None:
        """Give work to a worker.

        Raises: WorkerError if it has ended.
        """

    def next(self) -> tuple[int, Trained | Answered]:
        """Wait for the next result of any worker; and which one's it is.

        Raises: WorkerError if one has ended or failed.
        """

    def close(self) -> None:
        """End the workers."""


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
