"""What training methods take to the same accuracy, and what a simulation takes in memory.

    python -m benchmarks.training methods        SuperSFL against its baselines
    python -m benchmarks.training availability   SuperSFL with a server that is often away
    python -m benchmarks.training memory         1,000 clients against 10 with the same data
    python -m benchmarks.training throughput     simulation against plain PyTorch loops

Each writes a report (JSON) and a table (markdown) into benchmarks/results/.
"""

from __future__ import annotations

import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
import torch
import typer

from benchmarks.compare import Run, by_name, cost_table, run_all, shown
from benchmarks.plain_loops import SuperSfl, WholeNetwork
from edge_sdk.durable import make_folder, write_atomic
from edge_sdk.installation import __version__
from edge_sdk.training.protocol.weights import own_weights
from server.training.recipe.recipe import Recipe, load_recipe
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds

HERE = Path(__file__).parent
RECIPES = HERE.parent / "examples" / "recipes"
RESULTS = HERE / "results"
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

Data = Annotated[Path | None, typer.Option(help="Folder of the data set, where it has files.")]
Seeds = Annotated[int, typer.Option(min=1, help="How many; they are 0, 1, ...")]

app = typer.Typer(add_completion=False, help=__doc__.partition("\n")[0] if __doc__ else None)


@app.command(epilog="Example: python -m benchmarks.training methods --dataset digits")
def methods(  # noqa: PLR0917 - a command's options
    dataset: Annotated[
        Literal["digits", "fashion-mnist"], typer.Option(help="Whose recipes are run.")
    ] = "digits",
    seeds: Seeds = 3,
    target: Annotated[
        list[float] | None, typer.Option(help="Accuracy to reach; may be given again.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="The recipes' own if not given.")
    ] = None,
    data: Data = None,
    results: Path = RESULTS,
) -> None:
    """SuperSFL against SplitFedV1, SplitFedV2, multi-exit and FedAvg, same data and training."""
    targets = target or [0.9, 0.95]
    recipes = {name: _recipe(f"{name}-{dataset}", data) for name in METHODS}
    if rounds is not None:
        recipes = {
            name: replace(recipe, train=replace(recipe.train, rounds=rounds))
            for name, recipe in recipes.items()
        }
    runs = run_all(recipes, range(seeds), _tell)
    tables = [cost_table(runs, goal) for goal in targets]
    title = f"Rounds, bytes and seconds to the same accuracy: {dataset}"
    _write(results / f"training-{dataset}", title, tables, runs, {"targets": targets})


@app.command(epilog="Example: python -m benchmarks.training availability --seeds 1")
def availability(seeds: Seeds = 3, results: Path = RESULTS) -> None:
    """SuperSFL on the digits with the server there in 0 to 100 % of rounds (its Table III)."""
    recipe = _recipe("supersfl-digits", None)
    recipes = {
        f"{share:.0%}": replace(recipe, round=replace(recipe.round, availability=share))
        for share in AVAILABILITIES
    }
    runs = run_all(recipes, range(seeds), _tell)
    title = "SuperSFL with a server that supervises some rounds only: digits"
    _write(results / "training-availability", title, [_availability_table(runs)], runs, {})


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
    rounds: Annotated[int, typer.Option(min=1, help="Measured of each side, in turns.")] = 9,
    data: Data = None,
    results: Path = RESULTS,
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
    shown_as = "median (least to most) of pairs of neighbouring rounds"
    _write(results / "training-throughput", title, ["\n".join(lines)], [], extra, shown_as=shown_as)


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
    world = build_simulation(recipe)
    plain = loop(world)
    clock, processor, apart = [], [], 0.0
    for number in range(1, rounds + 2):
        ours = _seconds(partial(world.loop.run_round, number, recipe.seed))
        theirs = _seconds(partial(plain.run_round, number))
        if number == 1:
            weights = own_weights(plain.network)
            own = own_weights(world.state.net.segment(0, None))
            apart = max(float((own[name] - weights[name]).abs().max()) for name in own)
            continue
        clock.append(theirs[0] / ours[0])
        processor.append(theirs[1] / ours[1])
    return {"clock": clock, "processor": processor, "apart": apart}


def _seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Of the clock, and of the processor."""
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
    world = build_simulation(recipe)
    for _ in run_rounds(world, []):
        pass
    typer.echo(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)  # Linux counts in KiB


def _peak_mib(method: str, dataset: str, clients: int, data: Path | None) -> float:
    """Median of three processes: one and the same run differs by up to 80 MiB."""
    command = [sys.executable, "-P", "-m", "benchmarks.training", "peak", method, dataset]
    command += [str(clients)] + ([] if data is None else ["--data", str(data.resolve())])
    peaks = []
    for _ in range(3):
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        peaks.append(float(run.stdout))
    return statistics.median(peaks)


def _recipe(name: str, data: Path | None) -> Recipe:
    recipe = load_recipe(RECIPES / f"{name}.toml")
    if data is None:
        return recipe
    return replace(recipe, data=replace(recipe.data, folder=data))


def _availability_table(runs: Sequence[Run]) -> str:
    heads = [
        "server there",
        "rounds supervised",
        "whole network, %",
        "exits, all classes, %",
        "exits, own classes, %",
        "paper, CIFAR-10, %",
    ]
    lines = [f"| {' | '.join(heads)} |", "| --- | --- | --- | --- | --- | --- |"]
    for share, (name, group) in zip(AVAILABILITIES, by_name(runs).items(), strict=True):
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


def _tell(run: Run) -> None:
    typer.echo(f"{run.name} seed {run.seed}: {run.accuracy:.1%} in {run.seconds:.0f} s")


def _write(
    path: Path,
    title: str,
    tables: Sequence[str],
    runs: Sequence[Run],
    extra: dict[str, Any],
    *,
    shown_as: str = "mean ± half width of the 95 % interval over seeds",
) -> None:
    make_folder(path.parent)
    about = {
        "title": title,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "splitedge": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, {platform.system()}",
    }
    report = about | extra | {"runs": [run.to_dict() for run in runs]}
    raw = orjson.dumps(report, option=orjson.OPT_APPEND_NEWLINE)
    write_atomic(path.with_suffix(".json"), raw)
    facts = f"splitedge {__version__}, torch {about['torch']}, {about['when']}; {shown_as}."
    text = "\n\n".join([f"# {title}", facts, *tables])
    write_atomic(path.with_suffix(".md"), f"{text}\n".encode())
    typer.echo("\n\n".join(tables))


if __name__ == "__main__":
    torch.set_num_threads(1)
    app()
