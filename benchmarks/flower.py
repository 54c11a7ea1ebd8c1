"""Our simulation of FedAvg against Flower's, in seconds.

    make bench-flower ARGS="--data DIR"

or, with Flower and this project in a virtual environment of their own:

    python -m benchmarks.flower compare --flower VENV/bin/python --data DIR

Model, data, clients, batches, optimiser and weights in the beginning are the same, and so, but for
the order in which floats are added, are the weights after the first round: the report has the
largest difference. Nothing is evaluated between rounds. Flower has two cores, as two workers with
one torch thread each; splitedge is one process with as many threads as --threads says.

A run is a process of its own; the two sides take turns. Seconds per round are the median of a run's
rounds but the first. Start-up is from the start of the process to the end of its first round, less
one such round: imports, data, workers, and whatever is only slow once.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import orjson
import typer

from edge_sdk.durable import make_folder, write_atomic

if TYPE_CHECKING:
    from benchmarks.plain_loops import Done

HERE: Final = Path(__file__).parent
RECIPES: Final = HERE.parent / "examples" / "recipes"
RESULTS: Final = HERE / "results"
LIMIT_S: Final = 900

SIDES: Final = ("splitedge", "flower")

app = typer.Typer(add_completion=False, help=__doc__.partition("\n")[0] if __doc__ else None)


@dataclass(frozen=True, slots=True)
class Case:
    """A recipe of examples/recipes, and what is changed in it."""

    recipe: str
    rounds: int
    train_max: int | None = None

    def text(self, data: Path | None) -> str:
        """The recipe as JSON."""
        recipe = tomllib.loads((RECIPES / f"{self.recipe}.toml").read_text())
        recipe["train"]["rounds"] = self.rounds
        if self.train_max is not None:
            recipe["data"] |= {"train_max": self.train_max, "folder": str(data)}
        return orjson.dumps(recipe).decode()


CASES: Final = (Case("fedavg-digits", 12), Case("fedavg-fashion-mnist", 6, train_max=4000))


@dataclass(frozen=True, slots=True)
class Run:
    """One process.

    Attributes:
        start_s: from its start to the end of the first round. rounds_s: the rounds after it.
        load: of the machine before, over one minute.
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
        """A round that is not the first."""
        return statistics.median(self.rounds_s)

    @property
    def startup_s(self) -> float:
        """Up to the first round, and what that took longer than others."""
        return self.start_s - self.round_s


@app.command(epilog='Example: make bench-flower ARGS="--data DIR"')
def compare(
    flower: Annotated[Path, typer.Option(help="Python of the environment that has Flower.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder of Fashion-MNIST; without it, digits alone.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Processes of each side and case.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Of torch, in splitedge's process.")] = 1,
    results: Path = RESULTS,
) -> None:
    """Run both sides in turns and write training-flower.json and .md."""
    pythons = {"splitedge": Path(sys.executable), "flower": flower}
    runs: list[Run] = []
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
                    runs.append(_run(case, side, pythons[side], what))
                    typer.echo(_line(runs[-1]))
                gap = _largest_difference(*weights.values())
                gaps[case.recipe] = max(gap, gaps.get(case.recipe, 0.0))
    _write(results / "training-flower", runs, gaps, threads)


@app.command(hidden=True)
def side(name: str, text: str, threads: int, weights: Path) -> None:
    """One run, in the environment of its side: the first round's weights, and figures beside."""
    if name == "flower":
        from benchmarks import flower_app  # noqa: PLC0415 - only there is flwr

        done, versions = flower_app.run(text), flower_app.VERSIONS
    else:
        done, versions = _ours(text, threads)
    from safetensors.torch import save_file  # noqa: PLC0415 - after the clock has stopped

    save_file(done.first, weights)
    said = {"ends": done.ends, "accuracy": _accuracy(text, done.final), "versions": versions}
    weights.with_suffix(".json").write_bytes(orjson.dumps(said))


def _ours(text: str, threads: int) -> tuple[Done, dict[str, str]]:
    import torch  # noqa: PLC0415 - each side imports its own, on its own time

    from benchmarks.plain_loops import Done  # noqa: PLC0415
    from edge_sdk.installation import __version__  # noqa: PLC0415
    from edge_sdk.training.protocol.weights import read_weights  # noqa: PLC0415
    from server.training.recipe.recipe import read_recipe  # noqa: PLC0415
    from server.training.simulation.build import build_simulation  # noqa: PLC0415

    torch.set_num_threads(threads)
    world = build_simulation(read_recipe(orjson.loads(text)))
    network = world.state.net.segment(0, None)
    done = Done()
    for number in range(1, world.recipe.train.rounds + 1):
        result = world.loop.run_round(number, world.recipe.seed)
        assert len(result.participants) == len(world.clients)
        done.note(read_weights(network))
    return done, {"splitedge": __version__, "torch": torch.__version__}


def _accuracy(text: str, weights: dict[str, Any]) -> float:
    """Of the final network on the whole test set, computed alike for both sides."""
    import torch  # noqa: PLC0415 - as above

    from edge_sdk.training.protocol.weights import load_weights  # noqa: PLC0415
    from server.training.recipe.recipe import read_recipe  # noqa: PLC0415
    from server.training.run.build import build_network, load_data  # noqa: PLC0415

    recipe = read_recipe(orjson.loads(text))
    data = load_data(recipe)
    network = build_network(recipe, data).segment(0, None).eval()
    load_weights(network, weights)
    x_test = torch.from_numpy(data.x_test)
    with torch.no_grad():
        answers = [network(x).argmax(1) for x in torch.split(x_test, 128)]
    return float((torch.cat(answers).numpy() == data.y_test).mean())


def _run(case: Case, name: str, python: Path, what: Sequence[str]) -> Run:
    command = [str(python), "-P", "-m", "benchmarks.flower", "side", *what]
    weights = Path(what[-1])
    # no message to Flower's or ray's makers about this run
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    load = os.getloadavg()[0]
    start = time.monotonic()
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | quiet,
        timeout=LIMIT_S,
    )
    if done.returncode:
        typer.echo(done.stderr[-4000:], err=True)
        raise typer.Exit(1)
    said = orjson.loads(weights.with_suffix(".json").read_bytes())
    ends = said["ends"]
    rounds = [later - earlier for earlier, later in pairwise(ends)]
    return Run(case.recipe, name, ends[0] - start, rounds, said["accuracy"], said["versions"], load)


def _largest_difference(ours: Path, theirs: Path) -> float:
    """Between two weights, over every tensor."""
    from safetensors.torch import load_file  # noqa: PLC0415 - as above

    mine, other = load_file(ours), load_file(theirs)
    assert mine.keys() == other.keys()
    return max(float((mine[name] - other[name]).abs().max()) for name in mine)


def _line(run: Run) -> str:
    return (
        f"{run.case} {run.side}: start-up {run.startup_s:.2f} s, round {run.round_s:.3f} s,"
        f" accuracy {run.accuracy:.1%}, load {run.load:.1f}"
    )


def _write(path: Path, runs: Sequence[Run], gaps: dict[str, float], threads: int) -> None:
    make_folder(path.parent)
    cases = list(dict.fromkeys(run.case for run in runs))
    versions: dict[str, str] = {}
    for run in runs:
        versions |= run.versions
    about = {
        "title": "FedAvg in simulation: splitedge against Flower",
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "machine": f"{platform.machine()}, {platform.system()}, {os.cpu_count()} cores",
        "cases": [asdict(case) for case in CASES if case.recipe in cases],
        "threads": threads,
        "largest_difference_after_round_1": gaps,
        "runs": [
            asdict(run) | {"round_s": run.round_s, "startup_s": run.startup_s} for run in runs
        ],
    }
    raw = orjson.dumps(about, option=orjson.OPT_APPEND_NEWLINE)
    write_atomic(path.with_suffix(".json"), raw)
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    loads = [run.load for run in runs]
    facts = (
        f"{packages}; {about['machine']}, load {min(loads):.1f} to {max(loads):.1f} before a run;"
        f" {about['when']}. splitedge: one process, {threads} torch thread(s); Flower: two"
        " workers. Medians (least to most) over processes; the ratio is the median of those of"
        " neighbouring runs."
    )
    tables = [_table(case, [run for run in runs if run.case == case], gaps[case]) for case in cases]
    text = "\n\n".join([f"# {about['title']}", facts, *tables])
    write_atomic(path.with_suffix(".md"), f"{text}\n".encode())
    typer.echo("\n\n".join(tables))


def _table(case: str, runs: Sequence[Run], gap: float) -> str:
    ours, theirs = ([run for run in runs if run.side == side] for side in SIDES)
    rows: dict[str, tuple[Callable[[Run], float], int]] = {
        "seconds per round": (lambda run: run.round_s, 3),
        "start-up, s": (lambda run: run.startup_s, 1),
        "accuracy, %": (lambda run: 100 * run.accuracy, 2),
    }
    lines = [f"| {case} | splitedge | flower | ratio |", "| --- | --- | --- | --- |"]
    for name, (value, digits) in rows.items():
        mine, other = [value(run) for run in ours], [value(run) for run in theirs]
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
