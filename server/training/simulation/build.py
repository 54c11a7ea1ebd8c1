"""From a recipe to all that a simulation runs on: data, clients, plans, the server, the round loop.

Samples are put into client order once; a client's data are two slices of that one array, so a
thousand clients take no more memory than ten with the same data.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from edge_sdk.errors import ConfigurationError
from edge_sdk.nets import build
from edge_sdk.nets.supernet import Supernet
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.data.load import Array, Dataset, load_dataset
from edge_sdk.training.protocol.messages import EndRound, Reply, Request
from edge_sdk.training.protocol.plan import Plan
from profiles.allocation import fit_to_cut, supersfl_depth
from server.training.core.server_state import ServerState, ServerTraining
from server.training.methods.method import Method
from server.training.recipe.partition import RhoTest, local_splits, partition
from server.training.recipe.privacy import check_network
from server.training.recipe.recipe import Recipe, TrainSettings
from server.training.rounds.buffered import BufferedEngine
from server.training.rounds.loop import RoundLoop
from server.training.rounds.transport import LocalTransport

# apart from every stream of training and of partitioning
# from one giving back to the next: it costs 5 % of a round of 20 clients on `cnn6`
VISITS: Final = 100
_PROFILES: Final = 0x70726F66


@dataclass(frozen=True, slots=True)
class World:
    """A simulation, ready to run its first round.

    Attributes:
        x_test, y_test: the global test set, raw.
        plans, clients: by client, in one order.
        device: where networks and batches are.
        tests: of each client, what it is tested on, where that is dealt out with its data; else
            empty, and the test set is everyone's.
        failures: why clients gave no reply since this was last cleared; only simulated ones say.
    """

    recipe: Recipe
    method: Method
    dataset: str
    x_test: Array
    y_test: NDArray[np.int64]
    plans: dict[str, Plan]
    clients: dict[str, TrainingClient]
    state: ServerState
    loop: RoundLoop
    device: torch.device
    tests: Mapping[str, RhoTest] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def build_world(recipe: Recipe, device: str = "cpu", folder: Path | None = None) -> World:
    """Everything a recipe describes; the same recipe gives the same world.

    Args:
        device: `cpu` or `cuda`.
        folder: of the run, for what rounds in cohorts keep on the disk
            (server.training.core.spool).
    Raises: ConfigurationError, InputError or ProfileError saying what does not go together.
    """
    place = _device(device)
    method = recipe.build_method()
    dataset = load_data(recipe)
    net = build_network(recipe, dataset)
    dataset, parts, tests = _dealt(recipe, dataset)
    names = client_names(len(parts))
    depths = draw_depths(recipe.train, net, len(parts), recipe.seed)
    plans = {
        name: plan_of(recipe, method, dataset, net.L if method.client.whole else depth)
        for name, depth in zip(names, depths, strict=True)
    }
    clients = _clients(names, dataset, parts, place)
    state = server_state(recipe, method, net.to(place))
    transport = VisitingTransport(clients)
    loop: RoundLoop
    if recipe.round.buffer is None:
        loop = RoundLoop(method, plans, state, transport, recipe.round, folder=folder)
    else:
        seconds = round_seconds(recipe.train, [len(part) for part in parts], recipe.seed)
        loop = BufferedEngine(
            method,
            plans,
            state,
            transport,
            recipe.round,
            seconds=dict(zip(names, seconds, strict=True)),
        )
    return World(
        recipe,
        method,
        dataset.name,
        dataset.x_test,
        dataset.y_test,
        plans,
        clients,
        state,
        loop,
        place,
        dict(zip(names, tests, strict=True)) if tests else {},
        transport.failures,
    )


class VisitingTransport(LocalTransport):
    """Clients whose networks are gone when their round has ended, from the process's memory too.

    Updates are kept until the round is merged. They are small and lie between the large blocks
    that a visit needs, so the C library returns none of these by itself: 1,000 clients on `cnn6`
    took 892 MiB, and 488 MiB with this (10 clients: 467).
    """

    def __init__(self, clients: Mapping[str, TrainingClient]) -> None:
        super().__init__(clients)
        self._ended = 0

    def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
        """As LocalTransport does; memory is given back after every hundredth client's round."""
        replies = super().exchange(requests, deadline_s)
        self._ended += sum(isinstance(request, EndRound) for request in requests.values())
        if self._ended >= VISITS:
            self._ended = 0
            _give_back_memory()
        return replies


def client_names(count: int) -> list[str]:
    """`client-00`, `client-01`, ...: numbered so that names sort as they are counted."""
    digits = len(str(count - 1))
    return [f"client-{number:0{digits}}" for number in range(count)]


def draw_depths(train: TrainSettings, net: Supernet, clients: int, seed: int) -> list[int]:
    """Every client's depth: the recipe's own, or SuperSFL's Eq. 1 for a fleet drawn at random.

    Memory and latency are uniform in the recipe's ranges; the depth is taken down to a cut.

    Raises: ConfigurationError if the recipe's depth is no cut.
    """
    fixed = train.depths or (() if train.depth is None else (train.depth,))
    if fixed:
        wrong = next((depth for depth in fixed if depth not in net.cuts), None)
        if wrong is not None:
            cuts = ", ".join(map(str, net.cuts))
            raise ConfigurationError(
                f"train: depth: expected one of {net.name}'s cuts, {cuts}; got {wrong}"
            )
        return [fixed[client % len(fixed)] for client in range(clients)]
    memory_gb, latency_ms = _draw_profiles(train, clients, seed)
    low, high = float(latency_ms.min()), float(latency_ms.max())
    return [
        fit_to_cut(supersfl_depth(float(memory), float(latency), low, high, net.L), net.cuts)
        for memory, latency in zip(memory_gb, latency_ms, strict=True)
    ]


def round_seconds(train: TrainSettings, samples: Sequence[int], seed: int) -> list[float]:
    """What every client's round takes by the simulated clock: as many times its latency, drawn as
    for its depth, as it has batches, and twice that for the start and the end.
    """
    _, latency_ms = _draw_profiles(train, len(samples), seed)
    return [
        float(latency) / 1000 * (2 + (train.iterations or train.epochs * -(-count // train.batch)))
        for latency, count in zip(latency_ms, samples, strict=True)
    ]


def load_data(recipe: Recipe) -> Dataset:
    """The recipe's data set, as much of it as the recipe takes."""
    data = recipe.data
    dataset = load_dataset(data.name, data.folder)
    if data.malignant and max(data.malignant) >= dataset.classes:
        raise ConfigurationError(
            f"data: malignant: expected classes from 0 to {dataset.classes - 1},"
            f" got {max(data.malignant)}"
        )
    if data.train_max is None and data.test_max is None:
        return dataset
    train = data.train_max or len(dataset.y_train)
    return dataset.head(train, data.test_max or len(dataset.y_test))


def build_network(recipe: Recipe, dataset: Dataset) -> Supernet:
    """The recipe's network for these data, with the weights of its seed.

    Raises: ConfigurationError if the method narrows a cut and the recipe does not say which.
    """
    more: dict[str, Any] = {} if recipe.train.norm is None else {"norm": recipe.train.norm}
    channels, depth = recipe.build_method().client.bottleneck, recipe.train.depth
    if channels is not None:
        if depth is None:
            raise ConfigurationError(
                "train: depth: expected the depth at which all clients are cut, since"
                f" {recipe.method} has a bottleneck there"
            )
        more["bottleneck"] = (depth, channels)
    return build(
        recipe.train.backbone,
        classes=dataset.classes,
        input_shape=dataset.x_train.shape[1:],
        mean=dataset.mean,
        std=dataset.std,
        seed=recipe.seed,
        **more,
    )


def plan_of(recipe: Recipe, method: Method, dataset: Dataset, depth: int) -> Plan:
    """What a client of that depth is told.

    Raises: ConfigurationError for a number that no client can train by.
    """
    train = recipe.train
    return Plan(
        backbone=train.backbone,
        input_shape=tuple(dataset.x_train.shape[1:]),
        classes=dataset.classes,
        mean=dataset.mean,
        std=dataset.std,
        depth=depth,
        learning_rate=train.learning_rate,
        batch=train.batch,
        part=method.client,
        epochs=train.epochs,
        iterations=train.iterations,
        norm=train.norm,
        momentum=train.momentum,
        weight_decay=train.weight_decay,
        codec=train.codec,
        update=train.update_coding(),
        send_labels=method.labels == "sent",
        seed=recipe.seed,
    )


def server_state(recipe: Recipe, method: Method, net: Supernet) -> ServerState:
    """The server's side of the recipe over `net`.

    Raises: ConfigurationError where the method's noise does not cover this network.
    """
    check_network(method, net)
    train = recipe.train
    return ServerState(
        net,
        ServerTraining(
            train.server_learning_rate or train.learning_rate,
            momentum=train.momentum,
            weight_decay=train.weight_decay,
            clip=train.server_clip,
            decay=train.decay,
        ),
        method.trunk,
    )


def _give_back_memory() -> None:
    """Return free pages to the system, where the C library can (glibc's malloc_trim)."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _draw_profiles(
    train: TrainSettings, clients: int, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Memory (GB) and latency (ms) of every client of a fleet drawn at random."""
    generator = np.random.default_rng((seed, _PROFILES))
    memory_gb = generator.uniform(*train.memory_gb, clients)
    return memory_gb, generator.uniform(*train.latency_ms, clients)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            "--device cuda: expected a GPU that this torch can use, found none; use --device cpu,"
            " or install a CUDA build of torch"
        )
    if name not in {"cpu", "cuda"}:
        raise ConfigurationError(f"--device: expected cpu or cuda, got {name!r}")
    return torch.device(name)


def _dealt(
    recipe: Recipe, dataset: Dataset
) -> tuple[Dataset, list[NDArray[np.int64]], list[RhoTest]]:
    """What each client trains on and, where that is its own, is tested on.

    HARMONY, Table 5, for `local`: the test set is then all clients' tests, one after another, and
    what a client meets of the others' is its drift.
    """
    local = recipe.data.split == "local"
    x, y, groups = (
        dataset.merged() if local else (dataset.x_train, dataset.y_train, dataset.group_train)
    )
    parts = partition(
        recipe.data.partition,
        y,
        recipe.data.clients,
        recipe.seed,
        groups=groups,
        **recipe.data.numbers,
    )
    if not local:
        return dataset, parts, []
    splits = local_splits(parts, recipe.seed)
    tested = np.concatenate([split.test for split in splits])
    place = np.zeros(len(y), np.int64)  # of each test sample among all of them
    place[tested] = np.arange(len(tested))
    dealt = replace(dataset, x_train=x, y_train=y, x_test=x[tested], y_test=y[tested])
    tests = [RhoTest(place[split.test], place[split.drift]) for split in splits]
    return dealt, [split.train for split in splits], tests


def _clients(
    names: Sequence[str],
    dataset: Dataset,
    parts: Sequence[NDArray[np.int64]],
    device: torch.device,
) -> dict[str, TrainingClient]:
    order = np.concatenate(parts)
    x, y = dataset.x_train[order], dataset.y_train[order]
    bounds = pairwise(accumulate(map(len, parts), initial=0))
    return {
        # no secret in a simulation: the same recipe gives the same noise
        name: TrainingClient(name, x[start:stop], y[start:stop], device, secret=0)
        for name, (start, stop) in zip(names, bounds, strict=True)
    }
