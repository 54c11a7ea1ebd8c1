"""The rounds of a simulation in plain PyTorch: no messages, no checks, no round loop.

They start from a simulation's weights, do its layers, batches, optimiser steps, clips and merges,
and end each round in its weights, up to rounding. Networks are built once and loaded each round;
losses are read where a method needs their values.

    fedavg       the whole network on each client's batches, then the mean
    splitfed-v1  the same: plain SGD through a cut is SGD, and the copies are averaged
    supersfl     the exit head's step, the server's step, both gradients back through the prefix
                 (one is clipped before they are joined, so neither can be left out), their fusion,
                 the prefix's step; Eq. 6 to 8 after the round
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edge_sdk.nets.memory_format import set_format
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.protocol.training import Training
from edge_sdk.training.protocol.weights import tensors_of
from edge_sdk.training.streams import Stream
from server.training.methods.supersfl import CLIP, SERVER_WEIGHT
from server.training.recipe.recipe import Recipe
from server.training.run.run import Simulation

EPS = 1e-8


@dataclass(slots=True)
class Done:
    """Ends of a run's rounds on the monotonic clock; weights after the first and the last."""

    ends: list[float] = field(default_factory=list)
    first: Weights = field(default_factory=dict)
    final: Weights = field(default_factory=dict)

    def note(self, weights: Weights) -> None:
        """Record the end of a round with these weights."""
        self.ends.append(time.monotonic())
        self.final = weights
        self.first = self.first or weights


def batches(recipe: Recipe, number: int, name: str, samples: int) -> list[NDArray[np.int64]]:
    """The batches of that client and round in splitedge: rows of its own samples."""
    generator = Stream.BATCHES.generator(recipe.seed, round=number, client=name)
    numbers = recipe.train.training
    batch = numbers.batch
    found: list[NDArray[np.int64]] = []
    for _ in range(numbers.epochs):
        order = generator.permutation(samples)
        ends = [at for at in range(batch, samples, batch) if samples - at > 1 or batch == 1]
        found += np.split(order, ends)
    return found


def sgd(parameters: Iterable[nn.Parameter], numbers: Training) -> torch.optim.SGD:
    """The recipe's optimiser."""
    return torch.optim.SGD(
        parameters,
        numbers.learning_rate,
        momentum=numbers.momentum,
        weight_decay=numbers.weight_decay,
    )


class WholeNetwork:
    """FedAvg and SplitFedV1."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.network = deepcopy(simulation.state.net.segment(0, None))
        set_format(self.network, "contiguous")
        self.network.precision = "fp32"
        self.network.train()

    def run_round(self, number: int) -> None:
        """Train on every client's batches from the same weights; average by samples."""
        recipe, clients = self._simulation.recipe, self._simulation.clients
        own = tensors_of(self.network)
        sent = {key: tensor.clone() for key, tensor in own.items()}
        mean = {key: torch.zeros_like(tensor) for key, tensor in own.items()}
        everything = sum(client.samples for client in clients.values())
        for name, client in clients.items():
            _load(own, sent)
            optimiser = sgd(self.network.parameters(), recipe.train.training)
            for rows in batches(recipe, number, name, client.samples):
                x, y = _batch(client, rows)
                optimiser.zero_grad()
                loss = nn.functional.cross_entropy(self.network(x), y)
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                optimiser.step()
            for key, tensor in own.items():
                mean[key] += tensor * (client.samples / everything)
        _load(own, mean)


@dataclass(slots=True)
class _Client:
    depth: int
    prefix: nn.Module
    head: nn.Module
    suffix: nn.Module
    loss: float = 0.0


class SuperSfl:
    """SuperSFL with its gradient fusion; exit heads stay with their clients."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        net = deepcopy(simulation.state.net)
        set_format(net, "contiguous")
        net.precision = "fp32"
        self.network = net.segment(0, None)
        self.network.train()
        self._stages = net.L
        self._optimiser = sgd(self.network.parameters(), simulation.recipe.train.training)
        self._clients = {
            name: _Client(
                plan.depth,
                deepcopy(net.prefix(plan.depth)),
                deepcopy(net.exit_head(plan.depth)),
                net.suffix(plan.depth),
            )
            for name, plan in simulation.plans.items()
        }

    def run_round(self, number: int) -> None:
        """Train all clients batch by batch in turns, then merge."""
        simulation = self._simulation
        numbers = simulation.recipe.train.training
        own = tensors_of(self.network)
        queue = []
        for name, mine in self._clients.items():
            _load(tensors_of(mine.prefix), own)
            mine.loss = 0.0
            steps = batches(simulation.recipe, number, name, simulation.clients[name].samples)
            optimisers = (
                sgd(mine.prefix.parameters(), numbers),
                sgd(mine.head.parameters(), numbers),
            )
            queue.append((mine, simulation.clients[name], optimisers, steps))
        for step in range(max(len(steps) for *_, steps in queue)):
            for mine, client, optimisers, steps in queue:
                if step < len(steps):
                    self._learn(mine, *_batch(client, steps[step]), *optimisers)
        for mine, client, _, _ in queue:
            mine.loss /= client.samples * numbers.epochs
        self._merge(own)

    def _learn(
        self,
        mine: _Client,
        x: Tensor,
        y: Tensor,
        of_prefix: torch.optim.SGD,
        of_head: torch.optim.SGD,
    ) -> None:
        z = mine.prefix(x)
        own_loss = nn.functional.cross_entropy(mine.head(z), y)
        heads = list(mine.head.parameters())
        own, *gradients = torch.autograd.grad(own_loss, [z, *heads])
        _step(of_head, heads, gradients)

        sent = z.detach().requires_grad_()
        loss = nn.functional.cross_entropy(mine.suffix(sent), y)
        above = list(mine.suffix.parameters())
        back, *gradients = torch.autograd.grad(loss, [sent, *above])
        _step(self._optimiser, above, gradients)

        below = list(mine.prefix.parameters())
        pulled = torch.autograd.grad(z, below, own, retain_graph=True)
        norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in pulled]))
        scale = torch.clamp(CLIP / (norm + EPS), max=1.0)
        theirs = torch.autograd.grad(z, below, back)
        lc, ls = float(own_loss.detach()), float(loss.detach())
        share = mine.depth / self._stages * (ls + EPS) / (lc + ls + 2 * EPS)
        fused = [torch.lerp(g, c * scale, share) for c, g in zip(pulled, theirs, strict=True)]
        _step(of_prefix, below, fused)
        mine.loss += (share * lc + (1 - share) * ls) * len(y)

    def _merge(self, own: dict[str, Tensor]) -> None:
        clients = self._clients.values()
        depths = sum(mine.depth for mine in clients)
        surety = sum(1 / (mine.loss + EPS) for mine in clients)
        held = [
            (mine.depth / depths / (mine.loss + EPS) / surety, tensors_of(mine.prefix))
            for mine in clients
        ]
        for key, tensor in own.items():
            holders = [(weight, prefix[key]) for weight, prefix in held if key in prefix]
            if holders:
                tensor.mul_(SERVER_WEIGHT)
                for weight, mine in holders:
                    tensor.add_(mine, alpha=weight)
                tensor.div_(SERVER_WEIGHT + sum(weight for weight, _ in holders))


def _batch(client: TrainingClient, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(client.x[rows]), torch.from_numpy(client.y[rows])


def _load(own: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for key, tensor in own.items():
        tensor.copy_(values[key])


def _step(
    optimiser: torch.optim.SGD, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]
) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimiser.step()
    optimiser.zero_grad()
