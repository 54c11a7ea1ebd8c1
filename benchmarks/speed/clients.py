"""Time of a round against the clients, of whom ten are in it.

    python -m benchmarks.speed clients --data DIR

All clients share the same 20,000 samples, so a client of ten has 2,000 and one of ten thousand has
two; each client in the round takes one batch. So a round's work is the same, and what grows is what
the server does for clients that are not in it. Each number of clients is a process of its own.
Writes training-clients.json and .md.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import orjson
import torch
import typer

from benchmarks.reports import (
    RECIPES,
    RESULTS,
    Results,
    child_environment,
    made_by,
    provenance,
    write,
)
from benchmarks.speed.cases import CURVE_CLIENTS, CURVE_METHODS, Data
from server.training.recipe.recipe import load_recipe
from server.training.simulation.build import build_simulation

NAME: Final = "training-clients"
COMMAND: Final = "python -m benchmarks.speed clients --data DIR"
COHORT: Final = 10
SAMPLES: Final = 20_000
ROUNDS: Final = 9  # counted; two more warm up
BATCH: Final = 2


def clients(
    data: Data,
    method: Annotated[
        list[str] | None, typer.Option(help="Method, may be repeated.", show_default="three")
    ] = None,
    results: Results = RESULTS,
) -> None:
    """Time of a round against 10 to 10,000 clients, ten of them in it."""
    rows: list[dict[str, Any]] = []
    for name in method or CURVE_METHODS:
        for count in CURVE_CLIENTS:
            rows.append({"method": name, "clients": count} | _measured(name, count, data))
            typer.echo(rows[-1])
    report = {
        "command": f"{COMMAND}{''.join(f' --method {name}' for name in method or ())}",
        **provenance(),
        "load": os.getloadavg()[0],
        "rows": rows,
    }
    write(results / NAME, report, _page(report, rows))


def round_of(method: str, count: int, data: Path) -> None:
    """Be one simulation: print the seconds of a round, and those of building it, as JSON."""
    torch.set_num_threads(1)
    recipe = load_recipe(RECIPES / f"{method}-fashion-mnist.toml")
    training = replace(recipe.train.training, epochs=1, batch=BATCH, iterations=1)
    recipe = replace(
        recipe,
        data=replace(
            recipe.data,
            clients=count,
            partition="iid",
            numbers={},
            folder=data,
            held_out=0,
            train_max=SAMPLES,
            test_max=100,
        ),
        train=replace(recipe.train, training=training),
        round=replace(recipe.round, cohort=COHORT, participation=COHORT / count),
    )
    began = time.process_time()
    simulation = build_simulation(recipe)
    built_s = time.process_time() - began
    processor, clock = [], []
    for number in range(1, ROUNDS + 3):
        start = time.process_time(), time.perf_counter()
        simulation.loop.run_round(number, recipe.seed)
        processor.append(time.process_time() - start[0])
        clock.append(time.perf_counter() - start[1])
    figures = {"processor_s": processor[2:], "seconds": clock[2:], "build_s": built_s}
    typer.echo(orjson.dumps(figures).decode())


def _measured(method: str, count: int, data: Path) -> dict[str, Any]:
    words = ["round-of", method, str(count), str(data.resolve())]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "benchmarks.speed", *words],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
    )
    found = orjson.loads(done.stdout)
    return {
        "processor_s": statistics.median(found["processor_s"]),
        "seconds": statistics.median(found["seconds"]),
        "build_s": found["build_s"],
        "rounds": found["processor_s"],
    }


def _page(report: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        (
            "| method | clients | processor, ms a round | to the fewest | by the clock, ms |"
            " processor to build it, s |"
        ),
        "|" + " --- |" * 6,
    ]
    for row in rows:
        first = next(each for each in rows if each["method"] == row["method"])
        lines.append(
            f"| {row['method']} | {row['clients']:,} | {1e3 * row['processor_s']:.1f} |"
            f" {row['processor_s'] / first['processor_s']:.2f} | {1e3 * row['seconds']:.1f} |"
            f" {row['build_s']:.2f} |"
        )
    return [
        f"# A round of {COHORT} against the clients there are",
        made_by(report),
        (
            f"Fashion-MNIST, cnn6, {SAMPLES:,} samples of all clients together, {COHORT} clients in"
            f" a round, each of which takes one batch of {BATCH}; one process with one thread,"
            f" medians of {ROUNDS} rounds after two others. Other programs may run on the machine"
            f" (load {report['load']:.1f} at the end): they move the clock, not the processor."
        ),
        "\n".join(lines),
    ]
