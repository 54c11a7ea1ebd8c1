"""One side of a comparison, in a process of its own: it runs a round whenever a line comes in.

    side.py plain|ours METHOD BACKBONE CLIENTS SAMPLES PRECISION WORKERS DATA

Each line out is JSON: seconds by the clock and of processor time. The first line says that the side
is ready, and what memory format it takes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import orjson
import torch
from torch import Tensor

from benchmarks.speed.cases import LOOPS, Case
from edge_sdk.training.protocol.weights import tensors_of
from server.training.simulation.build import build_simulation
from server.training.simulation.worker import start_workers


def main(side: str, *words: str) -> None:
    """Run rounds until standard input ends."""
    torch.set_num_threads(1)
    method, backbone, clients, samples, precision, workers, data = words
    half = precision == "bf16"
    case = Case(
        method, backbone, int(clients), int(samples), 1.0, "bf16" if half else "fp32", int(workers)
    )
    recipe = case.recipe(Path(data))
    simulation = build_simulation(recipe, start_workers=start_workers(case.workers))
    run: Callable[[int], object]
    if side == "plain":
        plain = LOOPS[method](simulation)
        weights = partial(tensors_of, plain.network)
        run = plain.run_round
    else:
        weights = partial(tensors_of, simulation.state.net.segment(0, None))
        run = partial(_round, simulation.loop.run_round, recipe.seed)
    _say({"format": simulation.memory_format})
    for number, _ in enumerate(sys.stdin, start=1):
        clock, processor = time.perf_counter(), time.process_time()
        run(number)
        found = {
            "clock": time.perf_counter() - clock,
            "processor": time.process_time() - processor,
            "mean": _mean(weights()),
        }
        _say(found)
    simulation.close()


def _round(run: Callable[[int, int], object], seed: int, number: int) -> object:
    return run(number, seed)


def _mean(weights: Mapping[str, Tensor]) -> float:
    """Mean size of a weight, to see that both sides learn the same."""
    total = sum(float(t.double().abs().sum()) for t in weights.values())
    return total / sum(t.numel() for t in weights.values())


def _say(value: Mapping[str, object]) -> None:
    sys.stdout.write(orjson.dumps(value).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
