"""A training in progress: the parts that simulations and real devices share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edge_sdk.errors import FrameError
from edge_sdk.nets.memory_format import ChosenFormat
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.data.load import Array
from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.protocol.plan import Plan
from server.training.core.server_state import ServerState
from server.training.methods.method import Method
from server.training.recipe.partition import RhoTest
from server.training.recipe.recipe import Recipe
from server.training.rounds.buffered import BufferedLoop
from server.training.rounds.loop import RoundLoop

# One round, as the report and the log have it (server.training.report.rows).
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training by a recipe, ready for its next round.

    Attributes:
        method: the recipe's, with its numbers.
        dataset: name of the data set. class_names: in label order.
        x_test, y_test: the global test set, raw.
        plans: by client, in the order in which floats are added; grows as devices join.
        state: the server's network, optimisers and memory.
        loop: runs the rounds.
        device: holds networks and batches.
        memory_format: of the server's network, and of clients that are simulated.
    """

    recipe: Recipe
    method: Method
    dataset: str
    class_names: tuple[str, ...]
    x_test: Array
    y_test: NDArray[np.int64]
    plans: dict[str, Plan]
    state: ServerState
    loop: RoundLoop | BufferedLoop
    device: torch.device
    memory_format: ChosenFormat = "contiguous"

    def measures(self, number: int) -> bool:
        """Whether accuracy is measured after round `number`: every so often, and after the last."""
        recipe = self.recipe
        return number % recipe.evaluate.every == 0 or number == recipe.train.rounds

    def last_plan(self, name: str) -> Plan:
        """A client's plan in the recipe's last round: it personalises at the rates of that one."""
        return self.state.decayed_plan(self.plans[name], self.recipe.train.rounds)

    def personal(self) -> dict[str, Weights]:
        """Weights that clients keep to themselves, by client: none here, devices hold theirs."""
        return {}

    def set_personal(self, name: str, weights: Weights) -> None:  # noqa: ARG002 - for simulations
        """Give a client the weights that it kept to itself before this run was stopped.

        Raises: FrameError for a client that this run does not have.
        """
        raise FrameError(f"checkpoint: client {name}: the recipe has no such client")


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation(Run):
    """A run with clients in this process.

    Attributes:
        clients: by name, in the order of `plans`.
        tests: test samples by client, where the recipe splits each client's data; else empty, and
            all clients are tested on samples of the global test set.
        x_held_out, y_held_out: samples that nobody trains on, raw.
        held_out: rows of them by client, of its own classes in its own shares: they choose its
            threshold. Empty where the recipe holds none out.
        failures: why a client sent no reply, by client, since this was last cleared.
        close: ends the processes that train the clients, if there are any.
    """

    clients: dict[str, TrainingClient]
    tests: Mapping[str, RhoTest] = field(default_factory=dict)
    x_held_out: Array
    y_held_out: NDArray[np.int64]
    held_out: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None

    def personal(self) -> dict[str, Weights]:
        """Weights that clients keep to themselves, by client."""
        return {name: client.personal for name, client in self.clients.items()}

    def set_personal(self, name: str, weights: Weights) -> None:
        if name not in self.clients:
            Run.set_personal(self, name, weights)  # super() does not work in a class with slots
        self.clients[name].personal = weights
