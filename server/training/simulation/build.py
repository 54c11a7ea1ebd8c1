"""A recipe as a simulation: clients with their shares of the data, depths, and a simulated clock.

Samples are put into client order once; a client's data are two slices of that one array, so a
thousand clients take no more memory than ten with the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from edge_sdk.errors import ConfigurationError
from edge_sdk.nets.memory_format import ChosenFormat
from edge_sdk.nets.supernet import Supernet
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.data.load import Array, Dataset
from edge_sdk.training.streams import Stream
from server.training.core.spool import Spool
from server.training.recipe.held_out import held_out_parts
from server.training.recipe.partition import Parts, RhoTest, local_splits, partition
from server.training.recipe.recipe import Recipe, TrainSettings
from server.training.rounds.buffered import BufferedLoop
from server.training.rounds.clients import (
    TrainClients,
    can_train_apart,
    train_apart,
    train_clients,
)
from server.training.rounds.loop import RoundLoop
from server.training.rounds.workers import SimulatedWorkers
from server.training.run.build import (
    build_network,
    check_depth,
    lay_out,
    load_data,
    plan_of,
    server_state,
    supersfl_depths,
)
from server.training.run.run import Simulation
from server.training.simulation.shelved_client import ShelvedClient
from server.training.simulation.transport import MemoryTrimmingTransport
from server.training.simulation.workers.transport import PoolTransport, StartWorkers


def build_simulation(
    recipe: Recipe,
    device: str = "cpu",
    folder: Path | None = None,
    memory_format: ChosenFormat | None = None,
    *,
    start_workers: StartWorkers | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Simulation:
    """Build all that a recipe describes; the same recipe gives the same simulation.

    Args:
        device: `cpu` or `cuda`.
        folder: of the run, where rounds in cohorts keep contributions
            (server.training.core.spool).
        memory_format: that of a resumed run's earlier rounds; None for the recipe's.
        start_workers: starts processes that train the clients, and that `Simulation.close` ends
            (server.training.simulation.workers); None for this process. The weights are the same,
            bit for bit.
        note: called with a line about the data that were read.
    Raises: ConfigurationError, InputError or ProfileError saying what does not go together.
    """
    place = _device(device)
    method = recipe.built_method
    dataset = load_data(recipe, note)
    net = build_network(recipe, dataset)
    chosen = lay_out(net, recipe, place.type, memory_format)
    training = replace(recipe.train.training, memory_format=chosen)
    dataset, parts, tests, held_out = _split_data(recipe, dataset)
    names = client_names(len(parts))
    depths = draw_depths(recipe.train, net, len(parts), recipe.seed)
    depths = [net.L if method.client.whole else depth for depth in depths]
    plan_at = {  # one for all clients of a depth
        depth: replace(plan_of(recipe, method, dataset, depth), training=training)
        for depth in set(depths)
    }
    plans = {name: plan_at[depth] for name, depth in zip(names, depths, strict=True)}
    kind: Callable[..., TrainingClient] = TrainingClient
    if recipe.round.cohort is not None and recipe.round.cohort < len(parts):
        kind = partial(ShelvedClient, Spool(folder))
    # no secret in a simulation: the same recipe gives the same noise
    client = partial(kind, device=place, secret=0, backbone=recipe.train.backbone)
    clients = _clients(names, dataset, parts, client)
    state = server_state(recipe, method, net.to(place))
    apart = can_train_apart(method, recipe.round)
    train: TrainClients = train_apart if apart else train_clients
    transport: MemoryTrimmingTransport | PoolTransport = MemoryTrimmingTransport(clients)
    pool = None
    if start_workers is not None:
        _check_workers(recipe, place)
        pool = start_workers(recipe, chosen)
        transport = PoolTransport(clients, pool)
        train = transport.train if apart else train_clients
    loop: RoundLoop | BufferedLoop
    if recipe.round.buffer is None:
        loop = RoundLoop(method, plans, state, transport, recipe.round, train=train, folder=folder)
    else:
        seconds = round_seconds(recipe.train, [len(part) for part in parts], recipe.seed)
        loop = BufferedLoop(
            method,
            plans,
            state,
            transport,
            recipe.round,
            workers=SimulatedWorkers(dict(zip(names, seconds, strict=True))),
        )
    return Simulation(
        recipe=recipe,
        method=method,
        dataset=dataset.name,
        class_names=dataset.class_names,
        x_test=dataset.x_test,
        y_test=dataset.y_test,
        plans=plans,
        state=state,
        loop=loop,
        device=place,
        memory_format=chosen,
        clients=clients,
        tests=dict(zip(names, tests, strict=True)) if tests else {},
        x_held_out=dataset.x_held_out,
        y_held_out=dataset.y_held_out,
        held_out=dict(zip(names, held_out, strict=True)),
        failures=transport.failures,
        close=_nothing if pool is None else pool.close,
    )


def _nothing() -> None:
    pass


def _check_workers(recipe: Recipe, device: torch.device) -> None:
    """Refuse what workers cannot do.

    Raises: ConfigurationError.
    """
    if recipe.round.buffer is not None:
        raise ConfigurationError(
            "--workers: with `buffer` a simulation trains one client at a time, so there is"
            " nothing to share out; leave one of the two out"
        )
    if device.type != "cpu" or torch.get_num_threads() > 1:
        raise ConfigurationError(
            "--workers: expected --device cpu and --threads 1, with which every number of workers"
            " gives the same weights; leave out what differs"
        )


def client_names(count: int) -> list[str]:
    """`client-00`, `client-01`, ...: numbered so that names sort as they are counted."""
    digits = len(str(count - 1))
    return [f"client-{number:0{digits}}" for number in range(count)]


def draw_depths(train: TrainSettings, net: Supernet, clients: int, seed: int) -> list[int]:
    """Depths of the clients: the recipe's own, or SuperSFL's Eq. 1 for a fleet drawn at random.

    Memory and latency are uniform in the recipe's ranges; the depth is taken down to a cut.

    Raises: ConfigurationError if the recipe's depth is no cut.
    """
    fixed = train.depths or (() if train.depth is None else (train.depth,))
    if fixed:
        for depth in fixed:
            check_depth(net, depth)
        return [fixed[client % len(fixed)] for client in range(clients)]
    memory_gb, latency_ms = _draw_profiles(train, clients, seed)
    return supersfl_depths(net, memory_gb.tolist(), latency_ms.tolist())


def round_seconds(train: TrainSettings, samples: Sequence[int], seed: int) -> list[float]:
    """Length of every client's round by the simulated clock.

    A client's latency, drawn as for its depth, times the number of its batches and two more: the
    start and the end of the round.
    """
    numbers = train.training
    _, latency_ms = _draw_profiles(train, len(samples), seed)
    return [
        float(latency)
        / 1000
        * (2 + (numbers.iterations or numbers.epochs * -(-count // numbers.batch)))
        for latency, count in zip(latency_ms, samples, strict=True)
    ]


def _draw_profiles(
    train: TrainSettings, clients: int, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Memory (GB) and latency (ms) of every client of a fleet drawn at random."""
    generator = Stream.FLEET.generator(seed)
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


def _split_data(recipe: Recipe, dataset: Dataset) -> tuple[Dataset, Parts, list[RhoTest], Parts]:
    """Split the data among the clients.

    With `split = "local"` (HARMONY, Table 5) the test set is all clients' own tests, one after
    another, the held-out part all clients' own validation samples, and samples of the other clients
    are a client's drift.

    Returns: the data set; the rows that each client trains on; the rows that each is tested on,
        empty where all clients share one test set; the rows of the held-out part of each.
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
        return dataset, parts, [], held_out_parts(y, parts, dataset.y_held_out, recipe.seed)
    splits = local_splits(parts, recipe.seed)
    tested = np.concatenate([split.test for split in splits])
    chosen = np.concatenate([split.validation for split in splits])
    row_of = np.zeros(len(y), np.int64)  # in the new test or held-out part, by row of the data
    row_of[tested] = np.arange(len(tested))
    row_of[chosen] = np.arange(len(chosen))
    dataset = replace(
        dataset,
        x_train=x,
        y_train=y,
        x_held_out=x[chosen],
        y_held_out=y[chosen],
        x_test=x[tested],
        y_test=y[tested],
    )
    tests = [RhoTest(row_of[split.test], row_of[split.drift]) for split in splits]
    return (
        dataset,
        [split.train for split in splits],
        tests,
        [row_of[split.validation] for split in splits],
    )


def _clients(
    names: Sequence[str],
    dataset: Dataset,
    parts: Sequence[NDArray[np.int64]],
    client: Callable[[str, Array, NDArray[np.int64]], TrainingClient],
) -> dict[str, TrainingClient]:
    order = np.concatenate(parts)
    x, y = dataset.x_train[order], dataset.y_train[order]
    bounds = pairwise(accumulate(map(len, parts), initial=0))
    return {
        name: client(name, x[start:stop], y[start:stop])
        for name, (start, stop) in zip(names, bounds, strict=True)
    }
