"""The cost of training methods to the same accuracy, and of a simulation in memory and time.

    python -m benchmarks.training methods        SuperSFL against its baselines
    python -m benchmarks.training availability   SuperSFL with a server that is often away
    python -m benchmarks.training memory         1,000 clients against 10 with the same data
    python -m benchmarks.training throughput     simulation against plain PyTorch loops

Each writes a report (JSON) and a table (markdown) into benchmarks/results/.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from benchmarks.compare import Trial, by_name, cost_table, run_trials, shown, train
from benchmarks.plain_loops import SuperSfl, WholeNetwork
from benchmarks.reports import (
    RECIPES,
    RESULTS,
    Data,
    Results,
    Seeds,
    child_environment,
    provenance,
    write,
)
from edge_sdk.training.protocol.weights import tensors_of
from server.training.recipe.recipe import Recipe, load_recipe
from server.training.simulation.build import build_simulation

METHODS = ("supersfl", "splitfed-v1", "splitfed-v2", "multi-exit", "fedavg")
AVAILABILITIES = (0.0, 0.1, 0.2, 0.5, 0.7, 1.0)
# SuperSFL, Table III: CIFAR-10, accuracy in % by availability
PAPER = {0.0: 86.36, 0.1: 89.77, 0.2: 91.03, 0.5: 93.12, 0.7: 93.81, 1.0: 95.58}
MEMORY_LIMIT = 1.2
THROUGHPUT_LIMIT = 0.9
LOOPS: dict[str, type[WholeNetwork | SuperSfl]] = {
    "fedavg": WholeNetwork,
    "splitfed-v1": WholeNetwork,
    "supersfl": SuperSfl,
}


app = typer.Typer(add_completion=False, help=__doc__.partition("\n")[0] if __doc__ else None)


@app.command(epilog="Example: python -m benchmarks.training methods --dataset digits")
def methods(  # noqa: PLR0917 - a command's options
    dataset: Annotated[
        Literal["digits", "fashion-mnist"], typer.Option(help="Data set of the recipes.")
    ] = "digits",
    seeds: Seeds = 3,
    target: Annotated[
        list[float] | None, typer.Option(help="Accuracy to reach; may be repeated.")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, show_default="the recipes'", help="Rounds of training."),
    ] = None,
    data: Data = None,
    results: Results = RESULTS,
) -> None:
    """SuperSFL against SplitFedV1, SplitFedV2, multi-exit and FedAvg, same data and training."""
    targets = target or [0.9, 0.95]
    recipes = {name: _recipe(f"{name}-{dataset}", data) for name in METHODS}
    if rounds is not None:
        recipes = {
            name: replace(recipe, train=replace(recipe.train, rounds=rounds))
            for name, recipe in recipes.items()
        }
    trials = run_trials(recipes, range(seeds), _tell)
    tables = [cost_table(trials, goal) for goal in targets]
    title = f"Rounds, bytes and seconds to the same accuracy: {dataset}"
    _write(results / f"training-{dataset}", title, tables, trials, {"targets": targets})


@app.command(epilog="Example: python -m benchmarks.training availability --seeds 1")
def availability(seeds: Seeds = 3, results: Path = RESULTS) -> None:
    """SuperSFL on the digits with a server available in 0 to 100 % of rounds (its Table III)."""
    recipe = _recipe("supersfl-digits", None)
    recipes = {
        f"{share:.0%}": replace(recipe, round=replace(recipe.round, availability=share))
        for share in AVAILABILITIES
    }
    trials = run_trials(recipes, range(seeds), _tell)
    title = "SuperSFL with a server that supervises some rounds only: digits"
    _write(results / "training-availability", title, [_availability_table(trials)], trials, {})


@app.command(epilog="Example: python -m benchmarks.training memory --data DIR")
def memory(data: Data = None, results: Path = RESULTS) -> None:
    """Peak memory of 1,000 clients against 10 with the same data volume, in fresh processes."""
    dataset = "digits" if data is None else "fashion-mnist"
    lines = [
        f"| {dataset}, 3 rounds | 10 clients, MiB | 1,000 clients, MiB | ratio | {MEMORY_LIMIT} |",
        "| --- | --- | --- | --- | --- |",
    ]
    figures = []
    for method in METHODS:
        few, many = (_peak_mib(method, dataset, clients, data) for clients in (10, 1000))
        ratio = many / few
        mark = "met" if ratio <= MEMORY_LIMIT else "missed"
        lines.append(f"| {method} | {few:.0f} | {many:.0f} | {ratio:.3f} | {mark} |")
        figures.append({"method": method, "few_mib": few, "many_mib": many, "ratio": ratio})
        typer.echo(lines[-1])
    title = "Peak memory of a simulation"
    _write(results / "training-memory", title, ["\n".join(lines)], [], {"memory": figures})


@app.command(epilog="Example: python -m benchmarks.training throughput --data DIR")
def throughput(
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds of each side.")] = 9,
    data: Data = None,
    results: Results = RESULTS,
) -> None:
    """Samples/s of the simulation as a share of a plain PyTorch loop's (benchmarks.plain_loops)."""
    columns = ["| clients", "method", "by the clock", "by processor time", f"{THROUGHPUT_LIMIT}"]
    heads = [*columns, "largest difference of weights |"]
    lines = [" | ".join(heads), "| --- | --- | --- | --- | --- | --- |"]
    figures = []
    datasets = {"digits": (1, 10)} | ({} if data is None else {"fashion-mnist": (20,)})
    for dataset, counts in datasets.items():
        for clients, method in product(counts, LOOPS):
            figure = _paired(_case(method, dataset, clients, data), LOOPS[method], rounds)
            ratio, cpu = (_middle(figure[key]) for key in ("clock", "processor"))
            mark = "met" if statistics.median(figure["processor"]) >= THROUGHPUT_LIMIT else "missed"
            cells = [f"{dataset}, {clients}", method, ratio, cpu, mark, f"{figure['apart']:.0e}"]
            lines.append(f"| {' | '.join(cells)} |")
            figures.append({"dataset": dataset, "clients": clients, "method": method} | figure)
            typer.echo(lines[-1])
    title = "Throughput of a simulation, as a share of plain PyTorch"
    extra = {"figures": figures, "load": os.getloadavg()[0]}
    values = "median (least to most) of pairs of neighbouring rounds"
    _write(results / "training-throughput", title, ["\n".join(lines)], [], extra, values=values)


def _case(method: str, dataset: str, clients: int, data: Path | None) -> Recipe:
    recipe = _recipe(f"{method}-{dataset}", data if dataset == "fashion-mnist" else None)
    settings = replace(recipe.data, clients=clients)
    if clients == 1:
        settings = replace(settings, partition="iid", numbers={})
    if dataset == "fashion-mnist":
        settings = replace(settings, train_max=4000)
    return replace(recipe, data=settings)


def _paired(recipe: Recipe, loop: type[WholeNetwork | SuperSfl], rounds: int) -> dict[str, Any]:
    """Rounds of both sides in turns: the plain loop's time over ours, pair by pair.

    The first pair is not counted: it warms both up, and the weights after it show that both did
    the same work. Later, rounding has grown.
    """
    simulation = build_simulation(recipe)
    plain = loop(simulation)
    clock, processor, apart = [], [], 0.0
    for number in range(1, rounds + 2):
        ours = _seconds(partial(simulation.loop.run_round, number, recipe.seed))
        theirs = _seconds(partial(plain.run_round, number))
        if number == 1:
            weights = tensors_of(plain.network)
            own = tensors_of(simulation.state.net.segment(0, None))
            apart = max(float((own[name] - weights[name]).abs().max()) for name in own)
            continue
        clock.append(theirs[0] / ours[0])
        processor.append(theirs[1] / ours[1])
    return {"clock": clock, "processor": processor, "apart": apart}


def _seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of processor time."""
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - processor


def _middle(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


@app.command(hidden=True)
def peak(method: str, dataset: str, clients: int, data: Data = None) -> None:
    """Run three rounds and print this process's peak memory in MiB."""
    torch.set_num_threads(1)
    recipe = _recipe(f"{method}-{dataset}", data)
    recipe = replace(
        recipe,
        data=replace(recipe.data, clients=clients, partition="iid", numbers={}),
        train=replace(recipe.train, rounds=3, training=replace(recipe.train.training, epochs=1)),
        round=replace(recipe.round, cohort=10),
    )
    train(recipe)
    typer.echo(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)  # Linux counts in KiB


def _peak_mib(method: str, dataset: str, clients: int, data: Path | None) -> float:
    """Median of three processes, because the same run differs by up to 80 MiB."""
    command = [sys.executable, "-P", "-m", "benchmarks.training", "peak", method, dataset]
    command += [str(clients)] + ([] if data is None else ["--data", str(data.resolve())])
    peaks = []
    for _ in range(3):
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, env=child_environment()
        )
        peaks.append(float(done.stdout))
    return statistics.median(peaks)


def _recipe(name: str, data: Path | None) -> Recipe:
    recipe = load_recipe(RECIPES / f"{name}.toml")
    folder = recipe.data.folder if data is None else data
    return replace(recipe, data=replace(recipe.data, folder=folder, held_out=0))


def _availability_table(trials: Sequence[Trial]) -> str:
    heads = [
        "server available",
        "rounds supervised",
        "whole network, %",
        "exits, all classes, %",
        "exits, own classes, %",
        "paper, CIFAR-10, %",
    ]
    lines = [f"| {' | '.join(heads)} |", "| --- | --- | --- | --- | --- | --- |"]
    for share, (name, group) in zip(AVAILABILITIES, by_name(trials).items(), strict=True):
        supervised = [float(sum(row["supervised"] for row in run.rows)) for run in group]
        whole = [100 * run.accuracy for run in group if run.final["path"] == "full"]
        cells = [
            shown(supervised),
            shown(whole),
            shown([100 * run.exits_global for run in group if run.exits_global is not None]),
            shown([100 * run.exits_own for run in group if run.exits_own is not None]),
            f"{PAPER[share]}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _tell(run: Trial) -> None:
    typer.echo(f"{run.name} seed {run.seed}: {run.accuracy:.1%} in {run.seconds:.0f} s")


def _write(
    path: Path,
    title: str,
    tables: Sequence[str],
    trials: Sequence[Trial],
    extra: dict[str, Any],
    *,
    values: str = "mean ± half width of the 95 % interval over seeds",
) -> None:
    about = {"title": title} | provenance()
    facts = f"splitedge {about['splitedge']}, torch {about['torch']}, {about['when']}; {values}."
    report = about | extra | {"runs": [trial.to_dict() for trial in trials]}
    write(path, report, [f"# {title}", facts, *tables], indent=False)
    typer.echo("\n\n".join(tables))


if __name__ == "__main__":
    torch.set_num_threads(1)
    app()
