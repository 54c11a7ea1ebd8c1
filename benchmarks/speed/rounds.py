"""Time of a round and peak memory of a simulation against its clients, who are all in the round.

    python -m benchmarks.speed rounds --data DIR

Every client has two samples of Fashion-MNIST, so that the work grows with the clients alone. Each
number of clients is a process of its own. Writes training-rounds.json and .md into
benchmarks/results/.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
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

NAME: Final = "training-rounds"
COMMAND: Final = "python -m benchmarks.speed rounds --data DIR"
SAMPLES: Final = 2  # of a client
ROUNDS: Final = 2  # the first one warms up
WARM_MOST: Final = 1_000  # clients; a round of more is long beside its warm-up


def rounds(
    data: Data,
    method: Annotated[
        list[str] | None, typer.Option(help="Method, may be repeated.", show_default="three")
    ] = None,
    results: Results = RESULTS,
) -> None:
    """Measure rounds of 10 to 10,000 clients."""
    rows = []
    for name in method or CURVE_METHODS:
        for clients in CURVE_CLIENTS:
            rows.append({"method": name, "clients": clients} | _measured(name, clients, data))
            typer.echo(rows[-1])
    report = {
        "command": f"{COMMAND}{''.join(f' --method {name}' for name in method or ())}",
        **provenance(),
        "load": os.getloadavg()[0],
        "rows": rows,
    }
    write(results / NAME, report, page(report))


def all_in_round(method: str, clients: int, data: Path) -> None:
    """Be one simulation: print the last round's seconds, and the peak memory, as JSON."""
    torch.set_num_threads(1)
    recipe = load_recipe(RECIPES / f"{method}-fashion-mnist.toml")
    recipe = replace(
        recipe,
        data=replace(
            recipe.data,
            clients=clients,
            partition="iid",
            numbers={},
            folder=data,
            held_out=0,
            train_max=SAMPLES * clients,
            test_max=100,
        ),
        train=replace(recipe.train, training=replace(recipe.train.training, epochs=1)),
        round=replace(recipe.round, cohort=None),
    )
    simulation = build_simulation(recipe)
    for number in range(1, ROUNDS + 1 if clients <= WARM_MOST else 2):
        began = time.process_time(), time.perf_counter()
        simulation.loop.run_round(number, recipe.seed)
        took = time.process_time() - began[0], time.perf_counter() - began[1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB
    figures = {"processor_s": took[0], "seconds": took[1], "peak_mib": peak}
    typer.echo(orjson.dumps(figures).decode())


def _measured(method: str, clients: int, data: Path) -> dict[str, float]:
    words = ["all-in-round", method, str(clients), str(data.resolve())]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "benchmarks.speed", *words],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
    )
    found: dict[str, float] = orjson.loads(done.stdout)
    return found


def page(report: dict[str, Any]) -> list[str]:
    """The report's text."""
    lines = ["| method | clients | processor, s a round | by the clock, s | peak memory, MiB |"]
    lines += ["|---" * 5 + "|"]
    lines += [
        f"| {row['method']} | {row['clients']:,} | {row['processor_s']:.3f} |"
        f" {row['seconds']:.3f} | {row['peak_mib']:.0f} |"
        for row in report["rows"]
    ]
    return [
        "# A round against its clients",
        (
            f"Fashion-MNIST, cnn6, {SAMPLES} samples of each client, all clients in the round, one"
            f" process with one thread; the second round, of more than {WARM_MOST:,} clients the"
            " first. Other programs may run on the machine"
            f" (load {report['load']:.1f} at the end): they move the clock, not the processor."
        ),
        "\n".join(lines),
        made_by(report),
    ]
