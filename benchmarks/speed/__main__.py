"""Speed and memory of simulations.

    python -m benchmarks.speed throughput --data DIR    against plain PyTorch loops, and by workers
    python -m benchmarks.speed memory --data DIR        10 to 10,000 clients with the same data
    python -m benchmarks.speed precision --data DIR     accuracy of bf16 beside fp32
    python -m benchmarks.speed engines --data DIR       one process, two workers, two actors of Ray
    python -m benchmarks.speed clients --data DIR       a round of ten of 10 to 10,000 clients
    python -m benchmarks.speed rounds --data DIR        a round of all of 10 to 10,000 clients

Each writes a report (JSON), a table (markdown) and, for memory, a plot into benchmarks/results/.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import orjson
import torch
import typer
from matplotlib.figure import Figure

from benchmarks.reports import (
    RECIPES,
    RESULTS,
    Results,
    Seeds,
    child_environment,
    made_by,
    provenance,
    write,
)
from benchmarks.speed import clients, engines, rounds
from benchmarks.speed.cases import CASES, SHARED, SHARED_LEAST, Case, Data
from edge_sdk.nets.precision import PRECISIONS, Precision
from server.training.recipe.recipe import load_recipe
from server.training.report.evaluate import Evaluator
from server.training.simulation.build import build_simulation

MEMORY_METHODS: Final = ("supersfl", "splitfed-v1", "splitfed-v2", "multi-exit", "fedavg")
MEMORY_CLIENTS: Final = (10, 100, 1_000, 10_000)
MEMORY_MOST: Final = 1.2
COHORT: Final = 10
PRECISION_RECIPES: Final = (
    "splitfed-v1-digits",
    "supersfl-digits",
    "besplit-digits",
    "splitfed-v1-fashion-mnist",
    "supersfl-fashion-mnist",
    "splitlpf-fashion-mnist",
)

app = typer.Typer(add_completion=False, help=__doc__.partition("\n")[0] if __doc__ else None)
app.command(epilog="Example: python -m benchmarks.speed engines --data DIR")(engines.engines)
app.command(epilog="Example: python -m benchmarks.speed clients --data DIR")(clients.clients)
app.command(epilog="Example: python -m benchmarks.speed rounds --data DIR")(rounds.rounds)
# what these run in processes of their own
app.command(hidden=True)(engines.engine)
app.command(hidden=True)(clients.round_of)
app.command(hidden=True)(rounds.all_in_round)


@app.command(epilog="Example: python -m benchmarks.speed throughput --data DIR")
def throughput(
    data: Data,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds of each side.")] = 5,
    only: Annotated[str, typer.Option(help="Cases with this text in their name alone.")] = "",
    results: Results = RESULTS,
) -> None:
    """Samples/s of a simulation over those of a plain fp32 loop, and of two workers over one.

    The two sides are processes of their own that take turns, round by round, each on one thread.
    """
    lines = [
        "| case | memory format | by the clock | by processor time | goal | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    figures: list[dict[str, Any]] = []
    for case in CASES:
        if only not in case.name:
            continue
        figure = _compared(("plain", replace(case, precision="fp32")), ("ours", case), data, rounds)
        ratio = statistics.median(figure["processor"])
        cells = [case.name, figure["format"], _middle(figure["clock"])]
        cells += [_middle(figure["processor"]), f"{case.least}", _mark(ratio, case.least)]
        figures.append({"case": case.name, "goal": case.least} | figure)
        lines.append(f"| {' | '.join(cells)} |")
        typer.echo(lines[-1])
    for method, backbone, samples in SHARED:
        one = Case(method, backbone, 8, samples, SHARED_LEAST, workers=1)
        two = replace(one, workers=2)
        if only not in two.name:
            continue
        figure = _compared(("ours", one), ("ours", two), data, rounds)
        ratio = statistics.median(figure["clock"])
        name = f"{two.name} over one"
        cells = [name, figure["format"], _middle(figure["clock"]), "-"]
        cells += [f"{SHARED_LEAST}", _mark(ratio, SHARED_LEAST)]
        figures.append({"case": name, "goal": SHARED_LEAST} | figure)
        lines.append(f"| {' | '.join(cells)} |")
        typer.echo(lines[-1])
    about = _about("throughput", {"figures": figures, "load": os.getloadavg()[0]})
    text = ["# Throughput of a simulation over plain PyTorch", made_by(about)]
    text.append("Median (least to most) of pairs of neighbouring rounds; load: see the JSON file.")
    write(results / "training-throughput", about, [*text, "\n".join(lines)], indent=False)


@app.command(epilog="Example: python -m benchmarks.speed memory --data DIR")
def memory(
    data: Data,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each simulation.")] = 2,
    method: Annotated[
        list[str] | None, typer.Option(help="Method, may be repeated.", show_default="five")
    ] = None,
    results: Results = RESULTS,
) -> None:
    """Peak memory of 10 to 10,000 clients with the same data, each in a fresh process."""
    head = " | ".join(f"{count:,}" for count in MEMORY_CLIENTS)
    lines = [
        f"| clients, MiB | {head} | 10,000 over 100 | goal {MEMORY_MOST} |",
        f"| --- |{' --- |' * (len(MEMORY_CLIENTS) + 2)}",
    ]
    figures: dict[str, list[float]] = {}
    names = method or MEMORY_METHODS
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        each = [
            [pool.submit(_peak_mib, name, count, rounds, data) for count in MEMORY_CLIENTS]
            for name in names
        ]
    for name, found in zip(names, each, strict=True):
        peaks = figures[name] = [one.result() for one in found]
        ratio = peaks[-1] / peaks[1]
        mark = "met" if ratio <= MEMORY_MOST else "missed"
        cells = [name, *(f"{peak:.0f}" for peak in peaks), f"{ratio:.2f}", mark]
        lines.append(f"| {' | '.join(cells)} |")
        typer.echo(lines[-1])
    about = _about("memory", {"clients": MEMORY_CLIENTS, "rounds": rounds, "mib": figures})
    text = ["# Peak memory of a simulation", made_by(about)]
    text.append(
        f"Fashion-MNIST, cnn6, 20,000 samples in all, {rounds} rounds in cohorts of {COHORT}."
    )
    picture = "![memory by clients](training-memory.png)"
    write(results / "training-memory", about, [*text, "\n".join(lines), picture], indent=False)
    _plot(figures, results / "training-memory.png")


@app.command(epilog="Example: python -m benchmarks.speed precision --data DIR")
def precision(
    data: Data,
    seeds: Seeds = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each training.")] = 10,
    results: Results = RESULTS,
) -> None:
    """Accuracy on the test part after some rounds in fp32 and in bf16, seed by seed."""
    lines = [
        "| recipe | fp32, % | bf16, % | bf16 less fp32, points, by seed |",
        "| --- | --- | --- | --- |",
    ]
    figures: dict[str, dict[str, list[float]]] = {}
    for name in PRECISION_RECIPES:
        found = figures[name] = {
            each: [_accuracy(name, each, seed, rounds, data) for seed in range(seeds)]
            for each in PRECISIONS
        }
        apart = [half - plain for plain, half in zip(found["fp32"], found["bf16"], strict=True)]
        cells = [f"{statistics.fmean(found[each]):.1f}" for each in PRECISIONS]
        each_seed = ", ".join(f"{points:+.1f}" for points in apart)
        lines.append(f"| {name} | {' | '.join(cells)} | {each_seed} |")
        typer.echo(lines[-1])
    about = _about("precision", {"seeds": seeds, "rounds": rounds, "accuracy": figures})
    text = ["# Accuracy in bf16 beside fp32", made_by(about)]
    text.append(f"Accuracy on the test part, mean of {seeds} seeds, {rounds} rounds.")
    write(results / "training-precision", about, [*text, "\n".join(lines)], indent=False)


@app.command(hidden=True)
def peak(method: str, clients: int, rounds: int, data: Path) -> None:
    """Run some rounds and print this process's peak memory in MiB."""
    torch.set_num_threads(1)
    recipe = load_recipe(RECIPES / f"{method}-fashion-mnist.toml")
    recipe = replace(
        recipe,
        data=replace(
            recipe.data, clients=clients, partition="iid", numbers={}, folder=data, held_out=0
        ),
        train=replace(recipe.train, training=replace(recipe.train.training, epochs=1)),
        round=replace(recipe.round, cohort=COHORT),
    )
    simulation = build_simulation(recipe)
    for number in range(1, rounds + 1):
        simulation.loop.run_round(number, recipe.seed)
    typer.echo(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)  # Linux counts in KiB


def _accuracy(name: str, precision: Precision, seed: int, rounds: int, data: Path) -> float:
    recipe = load_recipe(RECIPES / f"{name}.toml")
    settings = recipe.data
    if settings.name != "digits":
        settings = replace(settings, folder=data, train_max=4000, test_max=2000)
    numbers = replace(recipe.train.training, precision=precision)
    train = replace(recipe.train, rounds=rounds, training=numbers)
    simulation = build_simulation(replace(recipe, data=settings, train=train, seed=seed))
    for number in range(1, rounds + 1):
        simulation.loop.run_round(number, seed)
    return 100 * Evaluator(simulation).accuracy(supervised=True)


def _peak_mib(method: str, clients: int, rounds: int, data: Path) -> float:
    command = [sys.executable, "-P", "-m", "benchmarks.speed", "peak", method]
    done = subprocess.run(
        [*command, str(clients), str(rounds), str(data.resolve())],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
    )
    return float(done.stdout)


def _compared(
    first: tuple[str, Case], second: tuple[str, Case], data: Path, rounds: int
) -> dict[str, Any]:
    """Time of the first side over that of the second, pair by pair; the first pair warms up."""
    with ExitStack() as stack:
        sides = []
        for side, case in (first, second):  # one by one: each measures its memory format
            sides.append(stack.enter_context(_side(side, case, data)))
            ready = _answer(sides[-1])
        pairs = [(_turn(sides[0]), _turn(sides[1])) for _ in range(rounds + 1)][1:]
    ratios = {
        key: [theirs[key] / ours[key] for theirs, ours in pairs] for key in ("clock", "processor")
    }
    apart = abs(pairs[-1][0]["mean"] - pairs[-1][1]["mean"]) / pairs[-1][0]["mean"]
    return ratios | {"format": ready["format"], "weights_apart": apart, "pairs": pairs}


@contextmanager
def _side(side: str, case: Case, data: Path) -> Iterator[subprocess.Popen[str]]:
    words = [case.method, case.backbone, case.clients, case.samples, case.precision, case.workers]
    command = [sys.executable, "-P", "-m", "benchmarks.speed.side", side, *map(str, words)]
    process = subprocess.Popen(
        [*command, str(data.resolve())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
    )
    try:
        yield process
    finally:
        process.communicate()


def _turn(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdin is not None, "the side reads lines"
    process.stdin.write("\n")
    process.stdin.flush()
    return _answer(process)


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None, "the side writes lines"
    line = process.stdout.readline()
    if not line:
        raise typer.Exit(process.wait() or 1)  # its error is on stderr
    found: dict[str, Any] = orjson.loads(line)
    return found


def _plot(figures: dict[str, list[float]], path: Path) -> None:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, peaks in figures.items():
        axes.plot(MEMORY_CLIENTS, peaks, marker=".", label=name)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("clients")
    axes.set_ylabel("peak memory, MiB")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _about(command: str, figures: dict[str, Any]) -> dict[str, Any]:
    return {"command": f"python -m benchmarks.speed {command} --data DIR"} | provenance() | figures


def _middle(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _mark(ratio: float, least: float) -> str:
    return "met" if ratio >= least else "missed"


if __name__ == "__main__":
    torch.set_num_threads(1)
    app()
