"""Our simulation of FedAvg against Flower's, in seconds.

    make bench-flower ARGS="--data DIR"

or, with Flower and this project in a virtual environment of their own:

    python -m benchmarks.flower compare --flower VENV/bin/python --data DIR

Model, data, clients, batches, optimiser and first weights are the same on both sides. The weights
after the first round are the same up to the order in which floats are added: the report has the
largest difference. Nothing is evaluated between rounds. Flower has two cores, as two workers with
one torch thread each; splitedge is one process with as many threads as --threads says.

A run is a process of its own; the two sides take turns. Seconds per round are the median of a run's
rounds but the first. Start-up is from the start of the process to the end of its first round, less
one such round: imports, data, workers, and whatever is only slow once.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import orjson
import typer

from benchmarks.reports import RECIPES, RESULTS, Results, child_environment, provenance, write

if TYPE_CHECKING:
    from benchmarks.plain_loops import Done

LIMIT_S: Final = 900

SIDES: Final = ("splitedge", "flower")

app = typer.Typer(add_completion=False, help=__doc__.partition("\n")[0] if __doc__ else None)


@dataclass(frozen=True, slots=True)
class Case:
    """A recipe of examples/recipes with changes."""

    recipe: str
    rounds: int
    train_max: int | None = None

    def text(self, data: Path | None) -> str:
        """The recipe as JSON."""
        recipe = tomllib.loads((RECIPES / f"{self.recipe}.toml").read_text())
        recipe["train"]["rounds"] = self.rounds
        recipe["data"]["held_out"] = 0
        if self.train_max is not None:
            recipe["data"] |= {"train_max": self.train_max, "folder": str(data)}
        return orjson.dumps(recipe).decode()


CASES: Final = (Case("fedavg-digits", 12), Case("fedavg-fashion-mnist", 6, train_max=4000))


@dataclass(frozen=True, slots=True)
class Trial:
    """One process of one side.

    Attributes:
        start_s: from its start to the end of the first round. rounds_s: the rounds after it.
        load: of the machine before it started, over one minute.
    """

    case: str
    side: str
    start_s: float
    rounds_s: list[float]
    accuracy: float
    versions: dict[str, str]
    load: float

    @property
    def round_s(self) -> float:
        """Seconds of a round that is not the first."""
        return statistics.median(self.rounds_s)

    @property
    def startup_s(self) -> float:
        """Seconds up to the first round, and what that round took longer than others."""
        return self.start_s - self.round_s


@app.command(epilog='Example: make bench-flower ARGS="--data DIR"')
def compare(
    flower: Annotated[Path, typer.Option(help="Python of the environment that has Flower.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder of Fashion-MNIST; without it, only the digits.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Processes of each side and case.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Torch threads of splitedge's process.")] = 1,
    results: Results = RESULTS,
) -> None:
    """Run both sides in turns and write training-flower.json and .md."""
    pythons = {"splitedge": Path(sys.executable), "flower": flower}
    trials: list[Trial] = []
    gaps: dict[str, float] = {}
    folder = None if data is None else data.resolve()
    for case in CASES:
        if case.train_max is not None and folder is None:
            continue
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as scratch:
                weights = {side: Path(scratch) / f"{side}.safetensors" for side in SIDES}
                for side in SIDES:
                    what = [side, case.text(folder), str(threads), str(weights[side])]
                    trials.append(_run(case, side, pythons[side], what))
                    typer.echo(_line(trials[-1]))
                gap = _largest_difference(*weights.values())
                gaps[case.recipe] = max(gap, gaps.get(case.recipe, 0.0))
    _write(results / "training-flower", trials, gaps, threads)


@app.command(hidden=True)
def side(name: str, text: str, threads: int, weights: Path) -> None:
    """Run one side in its environment; write the first round's weights, and figures as JSON."""
    if name == "flower":
        from benchmarks import flower_app  # noqa: PLC0415 - only there is flwr

        done, versions = flower_app.run(text), flower_app.VERSIONS
    else:
        done, versions = _ours(text, threads)
    from safetensors.torch import save_file  # noqa: PLC0415 - after the clock has stopped

    save_file(done.first, weights)
    figures = {"ends": done.ends, "accuracy": _accuracy(text, done.final), "versions": versions}
    weights.with_suffix(".json").write_bytes(orjson.dumps(figures))


def _ours(text: str, threads: int) -> tuple[Done, dict[str, str]]:
    import torch  # noqa: PLC0415 - each side imports its own, on its own time

    from benchmarks.plain_loops import Done  # noqa: PLC0415
    from edge_sdk import __version__  # noqa: PLC0415
    from edge_sdk.training.protocol.weights import read_weights  # noqa: PLC0415
    from server.training.recipe.recipe import read_recipe  # noqa: PLC0415
    from server.training.simulation.build import build_simulation  # noqa: PLC0415

    torch.set_num_threads(threads)
    simulation = build_simulation(read_recipe(orjson.loads(text)))
    recipe, network = simulation.recipe, simulation.state.net.segment(0, None)
    done = Done()
    for number in range(1, recipe.train.rounds + 1):
        result = simulation.loop.run_round(number, recipe.seed)
        assert len(result.participants) == len(simulation.clients)
        done.note(read_weights(network))
    return done, {"splitedge": __version__, "torch": torch.__version__}


def _accuracy(text: str, weights: dict[str, Any]) -> float:
    """Accuracy of the final network on the whole test set, computed the same for both sides."""
    import torch  # noqa: PLC0415 - as above

    from edge_sdk.training.protocol.weights import load_weights  # noqa: PLC0415
    from server.training.recipe.recipe import read_recipe  # noqa: PLC0415
    from server.training.report.evaluate import predicted_labels  # noqa: PLC0415
    from server.training.run.build import build_network, load_data  # noqa: PLC0415

    recipe = read_recipe(orjson.loads(text))
    data = load_data(recipe)
    network = build_network(recipe, data).segment(0, None)
    load_weights(network, weights)
    labels = predicted_labels(network, data.x_test, torch.device("cpu"))
    return float((labels == data.y_test).mean())


def _run(case: Case, name: str, python: Path, what: Sequence[str]) -> Trial:
    command = [str(python), "-P", "-m", "benchmarks.flower", "side", *what]
    weights = Path(what[-1])
    # no usage reports to the makers of Flower and ray
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    load = os.getloadavg()[0]
    start = time.monotonic()
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env=child_environment() | quiet,
        timeout=LIMIT_S,
    )
    if done.returncode:
        typer.echo(done.stderr[-4000:], err=True)
        raise typer.Exit(1)
    figures = orjson.loads(weights.with_suffix(".json").read_bytes())
    ends = figures["ends"]
    rounds = [later - earlier for earlier, later in pairwise(ends)]
    return Trial(
        case.recipe, name, ends[0] - start, rounds, figures["accuracy"], figures["versions"], load
    )


def _largest_difference(ours: Path, theirs: Path) -> float:
    """Largest difference of two files of weights, over every tensor."""
    from safetensors.torch import load_file  # noqa: PLC0415 - as above

    mine, other = load_file(ours), load_file(theirs)
    assert mine.keys() == other.keys()
    return max(float((mine[name] - other[name]).abs().max()) for name in mine)


def _line(trial: Trial) -> str:
    return (
        f"{trial.case} {trial.side}: start-up {trial.startup_s:.2f} s,"
        f" round {trial.round_s:.3f} s, accuracy {trial.accuracy:.1%}, load {trial.load:.1f}"
    )


def _write(path: Path, trials: Sequence[Trial], gaps: dict[str, float], threads: int) -> None:
    cases = list(dict.fromkeys(trial.case for trial in trials))
    versions: dict[str, str] = {}
    for trial in trials:
        versions |= trial.versions
    about = provenance() | {
        "title": "FedAvg in simulation: splitedge against Flower",
        "versions": versions,
        "cases": [asdict(case) for case in CASES if case.recipe in cases],
        "threads": threads,
        "largest_difference_after_round_1": gaps,
        "runs": [
            asdict(trial) | {"round_s": trial.round_s, "startup_s": trial.startup_s}
            for trial in trials
        ],
    }
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    loads = [trial.load for trial in trials]
    facts = (
        f"{packages}; {about['machine']}, load {min(loads):.1f} to {max(loads):.1f} before a run;"
        f" {about['when']}. splitedge: one process, {threads} torch thread(s); Flower: two"
        " workers. Medians (least to most) over processes; the ratio is the median of those of"
        " neighbouring runs."
    )
    tables = [_table(case, [t for t in trials if t.case == case], gaps[case]) for case in cases]
    write(path, about, [f"# {about['title']}", facts, *tables], indent=False)
    typer.echo("\n\n".join(tables))


def _table(case: str, trials: Sequence[Trial], gap: float) -> str:
    ours, theirs = ([trial for trial in trials if trial.side == side] for side in SIDES)
    rows: dict[str, tuple[Callable[[Trial], float], int]] = {
        "seconds per round": (lambda trial: trial.round_s, 3),
        "start-up, s": (lambda trial: trial.startup_s, 1),
        "accuracy, %": (lambda trial: 100 * trial.accuracy, 2),
    }
    lines = [f"| {case} | splitedge | flower | ratio |", "| --- | --- | --- | --- |"]
    for name, (value, digits) in rows.items():
        mine, other = [value(trial) for trial in ours], [value(trial) for trial in theirs]
        ratio = statistics.median(a / b for a, b in zip(mine, other, strict=True))
        cells = [_shown(mine, digits), _shown(other, digits), f"{ratio:.2f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"Largest difference of weights after the first round: {gap:.0e}."]
    return "\n".join(lines)


def _shown(values: Sequence[float], digits: int) -> str:
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    app()
