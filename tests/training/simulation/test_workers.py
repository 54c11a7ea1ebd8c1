"""Clients in worker processes: equal weights for every number, and an end with a reason."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import orjson
import pytest
import torch

from edge_sdk.errors import ConfigurationError
from server.errors import WorkerError
from server.training.recipe.recipe import Recipe, read_recipe
from server.training.run.checkpoint import latest_checkpoint
from server.training.simulation.build import build_simulation
from server.training.simulation.run import simulate
from server.training.simulation.worker import start_workers, work
from server.training.simulation.workers.processes import ProcessPool

# One method whose clients are trained apart, with all that a client keeps to itself, and one whose
# clients share the server's half and have heads of their own.
METHODS = {"splitgp": {"finetune_steps": 1}, "supersfl": {}}


def recipe_of(method: str, rounds: int = 3, tables: Mapping[str, object] | None = None) -> Recipe:
    return read_recipe(
        {
            "method": method,
            "method_numbers": METHODS.get(method, {}),
            "data": {"name": "digits", "clients": 5, "train_max": 300, "test_max": 100},
            "train": {
                "backbone": "tiny",
                "rounds": rounds,
                "batch": 16,
                "learning_rate": 0.1,
                "momentum": 0.5,
                "depths": [1, 2],
            },
            **(tables or {}),
        }
    )


@pytest.mark.parametrize(
    ("method", "then", "tables"),
    [
        # contributions of cohorts wait on the disk; each round takes other clients
        ("splitgp", 1, {"round": {"cohort": 2, "participation": 0.6}}),
        ("supersfl", 0, {}),
    ],
)
def test_every_number_of_workers_gives_the_same_run_and_can_continue_another(
    method: str, then: int, tables: dict[str, object], tmp_path: Path
) -> None:
    whole = recipe_of(method, tables=tables)
    alone = simulate(whole, tmp_path / "alone")
    simulate(recipe_of(method, 2, tables), tmp_path / "shared", workers=2)
    shared = simulate(whole, tmp_path / "shared", workers=then, resume=True)

    ends = [latest_checkpoint(tmp_path / name) for name in ("alone", "shared")]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0].tensors.keys() == ends[1].tensors.keys()
    for name, tensor in ends[0].tensors.items():
        assert torch.equal(tensor, ends[1].tensors[name]), name
    for mine, theirs in zip(ends[0].rows, ends[1].rows, strict=True):
        taken = {"seconds": 0, "processor_s": 0}
        assert {**mine, **taken} == {**theirs, **taken}
    for part in ("final", "each_client"):  # as JSON, in which NaN equals NaN
        assert orjson.dumps(shared[part]) == orjson.dumps(alone[part])


def test_a_worker_that_dies_ends_the_run_with_a_reason() -> None:
    pools: list[ProcessPool] = []

    def start(*args: object) -> ProcessPool:
        begin = start_workers(2)
        assert begin is not None
        pools.append(begin(*args))  # type: ignore[arg-type]  # as build_simulation gives them
        return pools[-1]

    run = build_simulation(recipe_of("supersfl"), start_workers=start)
    try:
        run.loop.run_round(1, 0)
        os.kill(pools[0].pids[1], signal.SIGKILL)

        with pytest.raises(WorkerError, match=r"worker 1 of 2 has ended by signal 9.*--resume"):
            run.loop.run_round(2, 0)
    finally:
        run.close()
    assert all(pool.pids == [] for pool in pools)


def test_a_worker_that_cannot_build_the_simulation_says_why() -> None:
    recipe = recipe_of("supersfl")
    pool = ProcessPool(work, 1, recipe_with_missing_data(recipe), "contiguous")
    try:
        with pytest.raises(WorkerError, match=r"worker 0: .*no-such-file"):
            pool.next()
    finally:
        pool.close()


def test_workers_are_refused_where_they_have_nothing_to_share_out() -> None:
    buffered = recipe_of("supersfl", tables={"round": {"buffer": 2}})

    with pytest.raises(ConfigurationError, match="--workers: with `buffer`"):
        build_simulation(buffered, start_workers=start_workers(2))

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ConfigurationError, match="--threads 1"):
            build_simulation(recipe_of("supersfl"), start_workers=start_workers(2))
    finally:
        torch.set_num_threads(threads)


def recipe_with_missing_data(recipe: Recipe) -> Recipe:
    tables = recipe.to_dict()
    tables["data"]["name"] = "no-such-file.npz"
    return read_recipe(tables)
