"""Offloads a second of `predict_many`: sent together, and each alone.

    python -m benchmarks.load.offloads

An agent asks the server about every input of a stream. Each agent is a process of its own; the
server is the real one, with its embedded broker. The reference is the same agent, which sends every
query alone. Both sides take turns. Writes benchmarks/results/offloads.json and .md.
"""

from __future__ import annotations

import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import orjson
import typer

from benchmarks.load.fairness import Site
from benchmarks.reports import Results, child_environment, made_by, provenance, write
from edge_sdk import AgentSettings, EdgeAgent
from edge_sdk.bundles.run_update import run_update
from edge_sdk.manifest import FEATURE_CODECS
from edge_sdk.offload import packs
from server.processes import ChildProcess

NEVER: Final = -1.0  # below every uncertainty: nothing exits
SECONDS: Final = 3.0
DEADLINE_S: Final = 10.0
INPUTS: Final = 64
WAYS: Final[Mapping[str, int]] = {"alone": 1, "together": packs.ROWS_MOST}


@dataclass(frozen=True, slots=True)
class Case:
    """One codec and number of devices; answers a second of all devices, one number a repetition.

    Attributes:
        alone, together: by the way in which queries are sent.
        bytes_alone, bytes_together: of a query on the way up, with its share of headers.
    """

    codec: str
    devices: int
    alone: Sequence[float]
    together: Sequence[float]
    bytes_alone: float
    bytes_together: float

    @property
    def ratio(self) -> float:
        """Together over alone, by medians."""
        return statistics.median(self.together) / statistics.median(self.alone)


def main(
    results: Results = Path("benchmarks/results"),
    backbone: Annotated[str, typer.Option(help="Network of random weights.")] = "tiny",
    size: Annotated[int, typer.Option(help="Height and width of a sample.")] = 8,
    repeat: Annotated[int, typer.Option(min=1, help="Turns; medians are shown.")] = 3,
    name: Annotated[str, typer.Option(help="Name of the report.")] = "offloads",
) -> None:
    """Measure the offloads of one device and of three."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="splitedge-offloads-") as work:
        site = Site(Path(work), backbone, size, 3)
        try:
            states = [Path(work) / f"device-{number}" for number in range(3)]
            for state in states:
                run_update(state)
            cases = [
                _case(states[:devices], site.shape, codec, repeat)
                for codec in FEATURE_CODECS
                for devices in (1, 3)
            ]
        finally:
            site.server.stop()
    about = provenance() | {
        "command": shlex.join(["python", "-m", "benchmarks.load.offloads", *sys.argv[1:]]),
        "title": f"Offloads a second of predict_many: {backbone}, {size} x {size}",
        "load_before": load,
    }
    lines = _lines(cases)
    busy = f"Load of the machine before it began: {load:.2f}."
    blocks = [f"# {about['title']}", made_by(about), busy, lines]
    write(results / name, about | {"cases": cases}, blocks)
    typer.echo(lines)


def _case(states: Sequence[Path], shape: tuple[int, ...], codec: str, repeat: int) -> Case:
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    sizes: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repeat):
        for way, rows_most in WAYS.items():
            turns = [_start(state, shape, codec, rows_most) for state in states]
            found = [orjson.loads(turn.expect("{", "ended early")) for turn in turns]
            for turn in turns:
                turn.close()
            rates[way].append(sum(each["rate"] for each in found))
            sizes[way].append(statistics.fmean(each["bytes"] for each in found))
    up = {way: statistics.median(each) for way, each in sizes.items()}
    return Case(codec, len(states), rates["alone"], rates["together"], up["alone"], up["together"])


def _start(state: Path, shape: tuple[int, ...], codec: str, rows_most: int) -> ChildProcess:
    task = {"state": str(state), "shape": shape, "codec": codec}
    text = orjson.dumps(task | {"rows_most": rows_most}).decode()
    command = [sys.executable, "-P", "-m", "benchmarks.load.offloads", "--agent", text]
    return ChildProcess(state.name, command, environment=child_environment())


def ask(task: str) -> None:
    """Be one agent: print its answers a second, and the bytes of a query, as JSON."""
    wanted = orjson.loads(task)
    packs.ROWS_MOST = wanted["rows_most"]  # type: ignore[misc]  # the reference sends each alone
    shape = tuple(wanted["shape"])
    inputs = np.random.default_rng(1).normal(size=(INPUTS, *shape)).astype(np.float32)
    settings = AgentSettings(threshold=NEVER, deadline_s=DEADLINE_S, codec=wanted["codec"])
    with EdgeAgent.open(wanted["state"], settings) as agent:
        list(agent.predict_many(inputs))
        up, answers = agent.status().bytes_up, 0
        begin = time.monotonic()
        while time.monotonic() - begin < SECONDS:
            for answer in agent.predict_many(inputs[at % INPUTS] for at in range(2_000)):
                if answer.source != "server":
                    raise RuntimeError(f"offloads: {answer.reason}")
                answers += 1
        took = time.monotonic() - begin
        size = (agent.status().bytes_up - up) / answers
    sys.stdout.write(orjson.dumps({"rate": answers / took, "bytes": size}).decode() + "\n")


def _lines(cases: Sequence[Case]) -> str:
    head = "| codec | devices | each alone | together | ratio | bytes up, alone | together |"
    rows = [
        f"| {case.codec} | {case.devices} | {_spread(case.alone)} | {_spread(case.together)}"
        f" | {case.ratio:.1f} | {case.bytes_alone:,.0f} | {case.bytes_together:,.0f} |"
        for case in cases
    ]
    return "\n".join([head, "|" + " --- |" * 7, *rows])


def _spread(rates: Sequence[float]) -> str:
    low, high = min(rates), max(rates)
    return f"{statistics.median(rates):,.0f} ({low:,.0f} to {high:,.0f})"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--agent"]:
        ask(sys.argv[2])
    else:
        typer.run(main)
