"""A worker process of a simulation: it trains clients and keeps nothing from round to round.

It builds the simulation's data, network and plans from the recipe. Each round's weights, and what a
client keeps to itself, come with the work and go back with the result, so any worker can take any
client, and the parent alone has what is saved.
"""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from edge_sdk.errors import SplitedgeError
from edge_sdk.nets.memory_format import ChosenFormat
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.messages import EndRound, Weights
from server.training.cluster.ray_cluster import RayCluster
from server.training.recipe.recipe import read_recipe
from server.training.rounds.clients import train_clients
from server.training.rounds.context import RoundContext
from server.training.rounds.round import RoundUnderWay
from server.training.run.run import Simulation
from server.training.simulation.build import build_simulation
from server.training.simulation.transport import MemoryTrimmingTransport
from server.training.simulation.workers.channel import decode, encode, receive, send
from server.training.simulation.workers.processes import ProcessPool
from server.training.simulation.workers.ray_pool import Hello, RayPool, Versions
from server.training.simulation.workers.transport import StartWorkers
from server.training.simulation.workers.work import (
    Answered,
    Asked,
    Failed,
    Open,
    Result,
    Train,
    Trained,
    Work,
)


def start_workers(count: int) -> StartWorkers | None:
    """Starter of so many workers, for a simulation that is built; None for 0."""
    return partial(ProcessPool, work, count) if count else None


def start_ray_workers(count: int, cluster: RayCluster) -> StartWorkers:
    """Starter of so many actors of a Ray cluster, for a simulation that is built."""
    return partial(RayPool, partial(cluster.start, RayWorker, str(Path.cwd())), cluster, count)


def work(connection: Connection, recipe: Mapping[str, Any], memory_format: ChosenFormat) -> None:
    """Do what the parent asks until it closes the pipe.

    Args:
        recipe: from `Recipe.to_dict`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends this process
    torch.set_num_threads(1)
    try:
        worker = Worker(build_simulation(read_recipe(recipe), memory_format=memory_format))
        while True:
            for result in worker.results(receive(connection)):
                send(connection, result)
    except (EOFError, OSError):
        pass  # the parent has ended, or is done
    except SplitedgeError as err:
        send(connection, Failed(str(err)))


class Worker:
    """Clients of a simulation, trained as its parent asks."""

    def __init__(self, simulation: Simulation) -> None:
        self._clients = simulation.clients
        self._transport = MemoryTrimmingTransport(simulation.clients)
        self._context = RoundContext(simulation.method, simulation.state, simulation.recipe.round)
        self._context.set_clients(simulation.plans, self._transport)
        self._open: Open | None = None
        self._sent: Weights = {}

    def results(self, asked: Work) -> Iterator[Result]:
        """Results of some work; each is there as soon as it is computed."""
        match asked:
            case Open():
                self._begin(asked)
            case Train():
                yield self._train(asked)
            case _:
                for each in asked:
                    yield self._answer(each)

    def _begin(self, asked: Open) -> None:
        state = self._context.state
        state.write(asked.weights)
        state.begin(asked.round)
        self._open, self._sent = asked, asked.weights

    def _train(self, asked: Train) -> Trained:
        """A client's whole round, the server's half in a copy of its own included."""
        context, now = self._context, self._open
        assert now is not None, "a round is opened before clients are trained"
        client = self._clients[asked.name]
        client.personal = asked.personal
        then = RoundUnderWay.begin(now.round, context.plans, self._sent, now.memory, now.supervised)
        found = train_clients(context, then, [asked.name])
        context.state.copies.clear()  # the copy of a client that gave no update
        failure = self._transport.failures.pop(asked.name, None)
        # the parent has the weights and the plans of the round
        seen = replace(then, view=replace(then.view, plans={}, sent={}, memory={}))
        return Trained(asked.name, seen, found, _taken_personal(client), failure)

    def _answer(self, asked: Asked) -> Answered:
        client = self._clients[asked.name]
        if asked.personal is not None:
            client.personal = asked.personal
        reply = self._transport.exchange({asked.name: asked.request}, 0.0).get(asked.name)
        failure = self._transport.failures.pop(asked.name, None)
        ended = isinstance(asked.request, EndRound)
        return Answered(asked.name, reply, _taken_personal(client) if ended else None, failure)


def _taken_personal(client: TrainingClient) -> Weights:
    """Personal weights of a client; the parent alone has them from then on."""
    personal, client.personal = client.personal, {}
    return personal


class RayWorker:
    """A worker as an actor of a Ray cluster; what it gives is encoded.

    Args:
        folder: current folder of the parent, from which the recipe names files.
        recipe: from `Recipe.to_dict`.
    """

    def __init__(self, folder: str, recipe: Mapping[str, Any], memory_format: ChosenFormat) -> None:
        self._folder, self._recipe, self._format = Path(folder), recipe, memory_format
        self._worker: Worker | None = None

    def hello(self) -> bytes:
        """Build the simulation; the encoded Hello of this worker, or why it cannot work."""
        torch.set_num_threads(1)
        if self._folder.is_dir():
            os.chdir(self._folder)
        try:
            recipe = read_recipe(self._recipe)
            self._worker = Worker(build_simulation(recipe, memory_format=self._format))
        except SplitedgeError as err:
            return encode((Failed(str(err)),))
        return encode(Hello(Versions.here(), platform.node(), os.getpid()))

    def results(self, asked: bytes) -> bytes:
        """Results of some work; called after `hello`."""
        assert self._worker is not None, "hello comes first"
        try:
            return encode(tuple(self._worker.results(decode(asked))))
        except SplitedgeError as err:
            return encode((Failed(str(err)),))
