"""Buffered rounds in which a test says in which order clients end, by either kind of workers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.messages import EndRound, Reply, Request, StartRound, Update
from server.training.recipe.recipe import read_recipe
from server.training.rounds.buffered import BufferedLoop
from server.training.rounds.round import RoundResult
from server.training.rounds.transport import LocalTransport
from server.training.rounds.workers import Ended, SimulatedWorkers, ThreadedWorkers
from server.training.run.run import Simulation
from server.training.simulation.build import build_simulation

NAMES = tuple(f"client-{number}" for number in range(4))
EQUAL = dict.fromkeys(NAMES, 1.0)
ONE_SLOW = EQUAL | {"client-3": 3.5}


def recipe_of(method: str = "splitfed-v1", rounds: int = 4, **round_numbers: Any) -> dict[str, Any]:
    return {
        "method": method,
        "data": {"name": "digits", "clients": 4, "train_max": 48, "test_max": 20},
        "train": {
            "backbone": "tiny",
            "rounds": rounds,
            "learning_rate": 0.05,
            "momentum": 0.9,
            "batch": 8,
            "memory_gb": [1, 4],
        },
        "round": round_numbers,
    }


def simulation_of(method: str = "splitfed-v1", **round_numbers: Any) -> Simulation:
    return build_simulation(read_recipe(recipe_of(method, **round_numbers)))


class Turns:
    """Lets threads go on one at a time, in the order that a test says."""

    def __init__(self) -> None:
        self._turn = {name: threading.Semaphore(0) for name in NAMES}

    def give(self, name: str, count: int = 1) -> None:
        """Let that client's round end, or so many of them."""
        self._turn[name].release(count)

    def take(self, name: str) -> None:
        """Wait for the client's turn."""
        assert self._turn[name].acquire(timeout=60), f"{name} got no turn"


class InOrder(SimulatedWorkers):
    """By the clock, which has to give the order that the test says."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        super().__init__(seconds)
        self.order: deque[str] = deque()

    def next(self) -> Ended:
        ended = super().next()
        assert ended.name == self.order.popleft()
        return ended


class ThreadsInOrder(ThreadedWorkers):
    """In threads, of which each ends when it is its client's turn."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns
        self.order: deque[str] = deque()

    def next(self) -> Ended:
        self._turns.give(self.order[0])
        ended = super().next()
        assert ended.name == self.order.popleft()
        return ended


class Watcher:
    """Clients in this process; remembers what they start from and what they make of it.

    Args:
        turns: holds the end of each round until it is the client's turn; None holds none.
    """

    def __init__(self, clients: Mapping[str, TrainingClient], turns: Turns | None) -> None:
        self._inner = LocalTransport(clients)
        self._turns = turns
        self.started: list[tuple[str, StartRound]] = []
        self.updates: dict[tuple[str, int], Update] = {}

    def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
        for name, request in requests.items():
            if isinstance(request, StartRound):
                self.started.append((name, request))
            # a client that never replies is asked for no more than its start
            last = isinstance(request, EndRound) or name not in self._inner.clients
            if last and self._turns is not None:
                self._turns.take(name)
        replies = self._inner.exchange(requests, deadline_s)
        for name, reply in replies.items():
            if isinstance(reply, Update):
                self.updates[name, reply.round] = reply
        return replies


class Pace:
    """A buffered loop over clients in this process."""

    def __init__(
        self,
        kind: str,
        here: Simulation,
        seconds: Mapping[str, float],
        clients: Mapping[str, TrainingClient] | None = None,
    ) -> None:
        self.here = here
        self._turns = Turns() if kind == "threads" else None
        self.watcher = Watcher(here.clients if clients is None else clients, self._turns)
        self._workers: InOrder | ThreadsInOrder = (
            InOrder(seconds) if self._turns is None else ThreadsInOrder(self._turns)
        )
        self.loop = BufferedLoop(
            here.method,
            here.plans,
            here.state,
            self.watcher,
            here.recipe.round,
            workers=self._workers,
        )

    def run(self, number: int, *ends: str) -> RoundResult:
        """A round in which these clients end, in this order, and no others."""
        self._workers.order.extend(ends)
        result = self.loop.run_round(number, 0)
        assert not self._workers.order
        return result

    def began(self, name: str) -> list[int]:
        """The rounds in which that client began."""
        return [start.round for client, start in self.watcher.started if client == name]

    def close(self) -> None:
        if self._turns is not None:
            for name in NAMES:
                self._turns.give(name, 9)
        self.loop.close()
