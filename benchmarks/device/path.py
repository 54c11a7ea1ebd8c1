"""The device's path beside bare onnxruntime: ways to call a graph, start-up, and memory.

    python -m benchmarks.device.path

Ways to call the exit graph of three networks at depth 2, with random weights and one thread, in
turns: a run with all outputs; with their names; with values that onnxruntime holds (OrtValue); with
inputs and outputs that are bound to preallocated memory (IOBinding), into which the input is
copied; and `EdgeAgent.predict`, which checks the input and decides by the gate as well.

Start-up: seconds of the processor of a fresh process, step by step. Writes
benchmarks/results/device-path.json and .md.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime
import orjson
import typer

from benchmarks.reports import RESULTS, Results, child_environment, made_by, provenance, write
from edge_sdk import AgentSettings, EdgeAgent
from edge_sdk.session import Array
from server.bench.measure import take_turns
from server.bench.models import export_random

NAME: Final = "device-path"
NETWORKS: Final = {"tiny": (1, 8, 8), "cnn6": (1, 28, 28), "cnn8": (1, 28, 28)}
DEPTH: Final = 2
ALWAYS: Final = 1e9  # above every uncertainty: all exit
ROUNDS: Final = 15
CALLS: Final = 300
STARTS: Final = 7
OUTPUTS: Final = ("logits", "z")
#: of a fresh process, one after the other: what it imports or does
STEPS: Final[Mapping[str, str]] = {
    "numpy": "import numpy",
    "onnxruntime": "import onnxruntime",
    "paho and urllib3": "import paho.mqtt.client, urllib3",
    "edge_sdk": "from edge_sdk import AgentSettings, EdgeAgent",
    "open the bundle": (
        "agent = EdgeAgent.from_bundle(sys.argv[1], AgentSettings(threshold=1e9, offload=False))"
    ),
    "the first answer": "agent.predict(numpy.zeros((1, 28, 28), numpy.float32))",
}


@dataclass(frozen=True, slots=True)
class Calls:
    """Microseconds of one call, by the way; medians of rounds that take turns."""

    backbone: str
    ways_us: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a fresh process: what each step takes of the processor, and memory after it."""

    milliseconds: Mapping[str, float]
    mib: Mapping[str, float]


def main(results: Results = RESULTS) -> None:
    """Measure the calls and the start."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="splitedge-path-") as text:
        bundles = {name: _bundle(Path(text) / name, name) for name in NETWORKS}
        calls = [_calls(name, bundles[name]) for name in NETWORKS]
        compiled = Path(text) / "compiled"
        starts = [_start(bundles["cnn6"], compiled) for _ in range(1 + STARTS)][1:]
    report = {
        "command": "python -m benchmarks.device.path",
        **provenance(),
        "load_before": load,
        "calls": [asdict(each) for each in calls],
        "starts": [asdict(each) for each in starts],
    }
    blocks = _blocks(report, calls, starts)
    write(results / NAME, report, blocks)
    typer.echo("\n\n".join(blocks))


def _bundle(work: Path, backbone: str) -> Path:
    folder, _ = export_random(backbone, NETWORKS[backbone], (DEPTH,), work)
    return folder / "bundles" / f"d{DEPTH}"


def _calls(backbone: str, bundle: Path) -> Calls:
    x = np.random.default_rng(1).normal(size=NETWORKS[backbone]).astype(np.float32)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        str(bundle / "exit.onnx"), options, providers=["CPUExecutionProvider"]
    )
    settings = AgentSettings(threshold=ALWAYS, offload=False)
    with EdgeAgent.from_bundle(bundle, settings) as agent:
        ways: dict[str, Callable[[], object]] = {
            "run, all outputs": lambda: session.run(None, {"x": x[None]}),
            "run, named outputs": lambda: session.run(OUTPUTS, {"x": x[None]}),
            "OrtValue": _ort_values(session, x),
            "IOBinding": _bound(session, x),
            "predict": lambda: agent.predict(x),
        }
        taken = take_turns(list(ways.values()), rounds=ROUNDS, calls=CALLS)
    return Calls(backbone, dict(zip(ways, (1e6 * each for each in taken), strict=True)))


def _ort_values(session: Any, x: Array) -> Callable[[], object]:
    """A call with a new OrtValue of the input, and outputs as arrays."""

    def call() -> object:
        given = onnxruntime.OrtValue.ortvalue_from_numpy(x[None])
        return [each.numpy() for each in session.run_with_ort_values(OUTPUTS, {"x": given})]

    return call


def _bound(session: Any, x: Array) -> Callable[[], object]:
    """A call with memory that is bound once; the answer is copied, for the caller keeps it."""
    binding = session.io_binding()
    given = np.empty((1, *x.shape), np.float32)
    binding.bind_ortvalue_input("x", onnxruntime.OrtValue.ortvalue_from_numpy(given))
    first = session.run(OUTPUTS, {"x": x[None]})
    held = [onnxruntime.OrtValue.ortvalue_from_numpy(each) for each in first]
    for name, value in zip(OUTPUTS, held, strict=True):
        binding.bind_ortvalue_output(name, value)
    views = [value.numpy() for value in held]

    def call() -> object:
        given[0] = x
        session.run_with_iobinding(binding)
        return [view.copy() for view in views]

    call()
    if not np.array_equal(views[0], first[0]):
        raise RuntimeError("device path: the bound memory has another answer")
    return call


def _start(bundle: Path, compiled: Path) -> Start:
    """A fresh process, which says after each step what it took.

    Args:
        compiled: folder in which Python keeps compiled modules, as it does where it is installed.
    """
    environment = child_environment() | {"PYTHONPYCACHEPREFIX": str(compiled)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    lines = ["import sys, time", "found = []"]
    for step in STEPS.values():
        lines += ["began = time.process_time()", step]
        lines += ["used = time.process_time() - began"]
        lines += ["found.append((used, int(open('/proc/self/statm').read().split()[1])))"]
    lines.append("print([list(each) for each in found])")
    command = [sys.executable, "-P", "-c", "\n".join(lines), str(bundle)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found = orjson.loads(done.stdout)
    page = os.sysconf("SC_PAGE_SIZE") / 2**20
    return Start(
        {step: 1e3 * seconds for step, (seconds, _) in zip(STEPS, found, strict=True)},
        {step: pages * page for step, (_, pages) in zip(STEPS, found, strict=True)},
    )


def _blocks(
    report: Mapping[str, Any], calls: Sequence[Calls], starts: Sequence[Start]
) -> list[str]:
    """The report's text."""
    ways = list(calls[0].ways_us)
    lines = [f"| network | {' | '.join(ways)} |", "|" + " --- |" * (1 + len(ways))]
    for each in calls:
        bare = each.ways_us[ways[0]]
        cells = [f"{us:.1f} us ({us / bare:.2f})" for us in each.ways_us.values()]
        lines.append(f"| {each.backbone} | {' | '.join(cells)} |")
    steps = ["| step | processor, ms | resident after it, MiB |", "|" + " --- |" * 3]
    for step in STEPS:
        taken = statistics.median(start.milliseconds[step] for start in starts)
        memory = statistics.median(start.mib[step] for start in starts)
        steps.append(f"| {step} | {taken:.1f} | {memory:.1f} |")
    total = statistics.median(sum(start.milliseconds.values()) for start in starts)
    steps.append(f"| all | {total:.1f} | |")
    return [
        "# The device's path beside onnxruntime",
        made_by(report),
        (
            f"Exit graphs at depth {DEPTH}, one thread, in turns, {ROUNDS} rounds of {CALLS} calls,"
            " medians; in brackets the ratio to the first column. Load of the machine before it"
            f" began: {report['load_before']:.2f}."
        ),
        "\n".join(lines),
        "## Start of an agent",
        (
            f"Medians of {STARTS} fresh processes with cnn6, after the interpreter's own start, all"
            " modules compiled before; each step counts what the steps before it have not loaded."
        ),
        "\n".join(steps),
    ]


if __name__ == "__main__":
    typer.run(main)
