"""A simulation in one process, in two worker processes, and in two actors of Ray.

    python -m benchmarks.speed engines --data DIR

Each run is a process of its own, which trains by the same recipe; the engines take turns. Compared:
seconds of a round, seconds until the first round begins, memory of all processes of the run, and a
digest of the weights at the end, which has to be the same. Writes training-engines.json and .md.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import orjson
import torch
import typer
from safetensors.torch import load_file

from benchmarks.load.processes import children
from benchmarks.reports import (
    RECIPES,
    RESULTS,
    Results,
    child_environment,
    made_by,
    provenance,
    write,
)
from benchmarks.speed.cases import Data
from exporters.run.record import WEIGHTS
from server.training.commands import cluster_of
from server.training.recipe.recipe import load_recipe
from server.training.simulation.run import simulate

NAME: Final = "training-engines"
METHOD: Final = "splitfed-v1"
CLIENTS: Final = 20
SAMPLES: Final = 4_000
ROUNDS: Final = 4  # the first one warms up
#: name of a case: what `splitedge simulate` is given
CASES: Final[Mapping[str, tuple[str, int]]] = {
    "one process": ("local", 0),
    "--workers 2": ("local", 2),
    "--engine ray --workers 2": ("ray", 2),
}
POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Run:
    """One run.

    Attributes:
        round_s: median of the rounds after the first. start_s: until the first round began.
        end_s: from the end of the last round to the end of the process.
        peak_mib: most memory of its processes together; what they share counts once.
        weights: digest of their names and values.
    """

    case: str
    round_s: float
    start_s: float
    end_s: float
    peak_mib: float
    weights: str


def engines(
    data: Data,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each; medians are shown.")] = 3,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of each run.")] = ROUNDS,
    results: Results = RESULTS,
) -> None:
    """Seconds of a round, start-up and memory of the engines of a simulation."""
    load = os.getloadavg()[0]
    runs: list[Run] = []
    for _ in range(repeat):
        for case in CASES:
            runs.append(_run(case, rounds, data))
            typer.echo(runs[-1])
    report = {
        "command": "python -m benchmarks.speed engines --data DIR",
        **provenance(),
        "load_before": load,
        "rounds": rounds,
        "runs": [asdict(run) for run in runs],
    }
    write(results / NAME, report, _page(report, runs))


def engine(case: str, rounds: int, data: Path, out: Path) -> None:
    """Be one run: print when each round began and ended, on the monotonic clock, as JSON."""
    torch.set_num_threads(1)
    recipe = load_recipe(RECIPES / f"{METHOD}-fashion-mnist.toml")
    training = replace(recipe.train.training, memory_format="contiguous")
    recipe = replace(
        recipe,
        data=replace(recipe.data, clients=CLIENTS, folder=data, train_max=SAMPLES, test_max=500),
        # `auto` takes the faster format of each run, and another format has other last bits
        train=replace(recipe.train, rounds=rounds, training=training),
    )
    name, workers = CASES[case]
    found: list[tuple[float, float]] = []

    def on_round(row: Mapping[str, Any]) -> None:
        found.append((time.monotonic(), row["seconds"]))

    with cluster_of("ray" if name == "ray" else "local", None, workers) as cluster:
        simulate(recipe, out, workers=workers, cluster=cluster, on_round=on_round)
    typer.echo(orjson.dumps(found).decode())


def _run(case: str, rounds: int, data: Path) -> Run:
    with tempfile.TemporaryDirectory(prefix="splitedge-engines-") as text:
        out = Path(text) / "run"
        words = ["engine", "--", case, str(rounds), str(data.resolve()), str(out)]
        began = time.monotonic()
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "benchmarks.speed", *words],
            stdout=subprocess.PIPE,
            env=child_environment(),
        ) as process:
            peak = 0.0
            while process.poll() is None:
                peak = max(peak, _memory_mib(process.pid))
                time.sleep(POLL_S)
            ended = time.monotonic()
            assert process.stdout is not None, "a pipe was asked for"
            raw = process.stdout.read()
        if process.returncode:
            raise typer.Exit(process.returncode)  # its error is on stderr
        found = orjson.loads(raw)
        digest = _digest(load_file(out / WEIGHTS))
    first, *others = found
    return Run(
        case,
        statistics.median(seconds for _, seconds in others),
        first[0] - first[1] - began,
        ended - found[-1][0],
        peak,
        digest,
    )


def _digest(weights: Mapping[str, torch.Tensor]) -> str:
    """A digest of weights. That of their file would not do: its own notes come in any order."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode() + weights[name].numpy().tobytes())
    return found.hexdigest()[:16]


def _memory_mib(pid: int) -> float:
    """Memory of a process and of those that it started; a page that n share counts 1/n of each."""
    total = 0
    for one in (pid, *_started_by(pid)):
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text(encoding="ascii").splitlines()
        except OSError:  # it has ended meanwhile
            continue
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def _started_by(pid: int) -> list[int]:
    try:
        return children(pid)
    except OSError:
        return []


def _page(report: Mapping[str, Any], runs: Sequence[Run]) -> list[str]:
    lines = [
        (
            "| engine | a round, s | to one process | until the first round, s |"
            " after the last, s | memory of all processes, MiB | weights |"
        ),
        "|" + " --- |" * 7,
    ]
    one_s = statistics.median(run.round_s for run in runs if run.case == next(iter(CASES)))
    for case in CASES:
        own = [run for run in runs if run.case == case]
        middle = statistics.median(run.round_s for run in own)
        digests = ", ".join(sorted({run.weights for run in own}))
        lines.append(
            f"| {case} | {_spread([run.round_s for run in own])} | {middle / one_s:.2f} |"
            f" {_spread([run.start_s for run in own])} | {_spread([run.end_s for run in own])} |"
            f" {statistics.median(run.peak_mib for run in own):.0f} | {digests} |"
        )
    same = len({run.weights for run in runs}) == 1
    return [
        "# The engines of a simulation",
        made_by(report),
        (
            f"{METHOD}, cnn6, {CLIENTS} clients, {SAMPLES:,} samples of Fashion-MNIST a round,"
            f" {report['rounds']} rounds, of which the first is not counted; one thread a process,"
            " contiguous memory."
            " Medians (least to most) of runs that take turns. Load of the machine before it"
            f" began: {report['load_before']:.2f}."
        ),
        "\n".join(lines),
        f"The weights of all runs are {'the same' if same else 'NOT the same'}, by their digests.",
    ]


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
