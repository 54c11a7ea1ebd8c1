"""Our server beside what a user would pick instead, with the same graph and the same request.

    make bench-peers

or, with an environment that has LitServe, Ray Serve, FastAPI and `uvicorn[standard]`:

    python -m benchmarks.peers --peers VENV/bin/python

All servers run at the same time and take turns under the load: one request in flight, then 16; then
an open loop, whose load grows until a server does not serve it (`benchmarks/peers/offered.py`). A
figure is the median of the rounds. A machine that does other work slows all of them alike, yet not
in every moment. So the processor time of a request stands beside the time by the clock: that of all
processes of a server, without what they take while nobody asks. The request is one digit in JSON.
Our answer has logits, probabilities and label, those of the others have the logits alone. In a
closed loop our server is also asked with a key, as beyond loopback; the others know no logins.
Writes
benchmarks/results/peers.json, .md and .png.
"""

from __future__ import annotations

import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import onnx
import onnxruntime
import orjson
import typer

from benchmarks.peers import offered, servers
from benchmarks.peers.load import Order
from benchmarks.peers.servers import Running
from benchmarks.reports import RESULTS, Results, child_environment, made_by, provenance, write
from edge_sdk.cli.main import stop_on_sigterm
from edge_sdk.durable import write_atomic
from server.bench.models import export_random
from server.processes import ChildProcess

SHAPE: Final = (1, 8, 8)
CUTS: Final = (1, 2, 3, 4)  # all that this network has, as `splitedge export` publishes it
IN_FLIGHT: Final = (1, 16)
SECONDS: Final = 2.0
QUICK_S: Final = 0.3
TOLERANCE: Final = 1e-4
OURS: Final = "splitedge"
# our rate over theirs, at least
GOALS: Final = {"FastAPI": 1.0, "LitServe": 2.0}
OPEN: Final = (
    "Requests of a Poisson process, whether the ones before are answered or not. The knee is the"
    f" highest load that is served wholly with a p99 of at most {offered.KNEE:.0f} times that at"
    " the lowest load; medians of the rounds."
)
PICTURE: Final = "![p99 against offered load](peers.png)"


@dataclass(frozen=True, slots=True)
class Figure:
    """One server under one load in one round.

    Attributes:
        rate: answers a second. p50_us, p99_us: of their latencies.
        processor_us: processor time of the server's processes for an answer, without what they take
            while nobody asks.
    """

    server: str
    in_flight: int
    rate: float
    p50_us: float
    p99_us: float
    processor_us: float


def main(
    peers: Annotated[
        Path | None,
        typer.Option(
            help="Python with LitServe, Ray Serve and uvicorn[standard]; without it, only FastAPI."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each server under each load.")] = 5,
    open_rounds: Annotated[
        int, typer.Option(min=1, help="Turns of each server in an open loop.")
    ] = 3,
    quick: Annotated[
        bool, typer.Option("--quick", help="One short round, to see that all of it runs.")
    ] = False,
    results: Results = RESULTS,
) -> None:
    """Compare requests a second and processor time for a request."""
    stop_on_sigterm()  # the servers end with it
    with tempfile.TemporaryDirectory(prefix="splitedge-peers-") as work, ExitStack() as stack:
        model, graph = _export(Path(work))
        sides = _start(stack, Path(work) / "server", model, graph, peers)
        load = ChildProcess(
            "the load",
            [sys.executable, "-P", "-m", "benchmarks.peers.load"],
            environment=child_environment(),
        )
        stack.callback(load.close)
        x = np.random.default_rng(0).integers(0, 17, (1, *SHAPE)).astype(np.float32)
        expected = onnxruntime.InferenceSession(graph).run(["logits"], {"x": x})[0]
        figures: list[Figure] = []
        seconds = QUICK_S if quick else SECONDS
        for number in range(1 if quick else rounds + 1):
            idle = _idle(sides, seconds)
            for in_flight in IN_FLIGHT:
                for side in sides:
                    tally, took = _apply(load, side, x, in_flight, seconds)
                    _check(side, tally, expected)
                    if number or quick:  # the first round warms up
                        took -= idle[side.name] * tally["seconds"]
                        figures.append(_figure(side.name, in_flight, tally, took))
        points = [
            point
            for _ in range(1 if quick else open_rounds)
            for side in sides
            if side.key is None
            for point in offered.points_of(side, partial(_offer, load, x), quick=quick)
        ]
    about = provenance() | {
        "command": shlex.join(["python", "-m", "benchmarks.peers", *sys.argv[1:]]),
        "title": "Serving over HTTP: splitedge, plain FastAPI, LitServe, Ray Serve",
        "versions": _versions(peers),
        "load": os.getloadavg()[0],
    }
    report = about | {
        "figures": [asdict(figure) for figure in figures],
        "open": [asdict(point) for point in points],
    }
    table, ratios = _table(figures), _ratios(figures)
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    facts = f"{versions}; load of the machine at the end {about['load']:.1f}."
    lines = offered.lines_of(points)
    knees = offered.table(lines)
    blocks = [f"# {about['title']}", made_by(about), facts, table, ratios, OPEN, knees, PICTURE]
    write(results / "peers", report, blocks, indent=False)
    write_atomic(results / "peers.png", offered.picture(lines))
    typer.echo(f"{table}\n\n{ratios}\n\n{knees}")


def _export(work: Path) -> tuple[str, Path]:
    """Name of the model in a server's state folder, and the whole network as one graph."""
    folder, manifest = export_random("tiny", SHAPE, CUTS, work / "server" / "models")
    whole: Any = None
    for segment in manifest.segments:
        part = onnx.load(folder / "segments" / segment.file)
        part = onnx.compose.add_prefix(part, f"{segment.entry}/")
        if whole is None:
            whole = part
            continue
        joint = [(whole.graph.output[0].name, part.graph.input[0].name)]
        whole = onnx.compose.merge_models(whole, part, joint)
    _rename(whole, whole.graph.input[0].name, "x")
    _rename(whole, whole.graph.output[0].name, "logits")
    graph = work / "whole.onnx"
    onnx.save(whole, graph)
    return manifest.name, graph


def _rename(model: Any, old: str, new: str) -> None:
    """Give a tensor of a graph another name."""
    graph = model.graph
    for value in [*graph.input, *graph.output]:
        if value.name == old:
            value.name = new
    for node in graph.node:
        for names in (node.input, node.output):
            for at, name in enumerate(names):
                if name == old:
                    names[at] = new


def _start(
    stack: ExitStack, state: Path, model: str, graph: Path, peers: Path | None
) -> list[Running]:
    """Start all servers that there is an environment for."""
    alone = servers.this_python() if peers is None else peers
    ours = stack.enter_context(servers.splitedge(state, model))
    sides = [
        ours,
        servers.with_key(ours, state),
        stack.enter_context(servers.plain_fastapi(alone, graph, "asyncio", "h11")),
    ]
    if peers is not None:
        sides.append(
            stack.enter_context(servers.plain_fastapi(peers, graph, "uvloop", "httptools"))
        )
        sides.append(stack.enter_context(servers.litserve(peers, graph)))
        sides.append(stack.enter_context(servers.ray_serve(peers, graph)))
    return sides


def _idle(sides: Sequence[Running], seconds: float) -> dict[str, float]:
    """Processor time a second of each server while nobody asks it.

    Ours has housekeeping and a broker, which take the same time whether it is asked or not.
    """
    before = [side.processor_s for side in sides]
    time.sleep(seconds)
    return {
        side.name: (side.processor_s - then) / seconds
        for side, then in zip(sides, before, strict=True)
    }


def _apply(
    load: ChildProcess, side: Running, x: Any, in_flight: int, seconds: float
) -> tuple[dict[str, Any], float]:
    """Put a server under load once.

    Returns: the tally of the load, and seconds of processor time of the server.
    """
    before = side.processor_s
    order = Order(servers.HOST, side.port, side.path, _body(x), in_flight, seconds, key=side.key)
    tally = _ordered(load, side, order)
    return tally, side.processor_s - before


def _offer(load: ChildProcess, x: Any, side: Running, rate: int, seconds: float) -> dict[str, Any]:
    """Offer a server so many requests a second. Returns: the tally of the load."""
    connections = offered.CONNECTIONS
    order = Order(servers.HOST, side.port, side.path, _body(x), connections, seconds, rate)
    return _ordered(load, side, order)


def _ordered(load: ChildProcess, side: Running, order: Order) -> dict[str, Any]:
    """Order a load. Returns: its tally."""
    load.write_line(orjson.dumps(order).decode())
    tally: dict[str, Any] = orjson.loads(load.expect("{", f"was not answered by {side.name}"))
    return tally


def _body(x: Any) -> str:
    """The request in JSON."""
    tensor = {"name": "x", "shape": x.shape, "datatype": "FP32", "data": x.ravel().tolist()}
    return orjson.dumps({"inputs": [tensor]}).decode()


def _check(side: Running, tally: dict[str, Any], expected: Any) -> None:
    """Check the last answer.

    Raises: ValueError if it is not the network's.
    """
    outputs = {output["name"]: output for output in orjson.loads(tally["answer"])["outputs"]}
    got = np.reshape(outputs["logits"]["data"], outputs["logits"]["shape"])
    if not np.allclose(got, expected, atol=TOLERANCE):
        raise ValueError(f"{side.name}: expected the logits {expected}, got {got}")


def _figure(name: str, in_flight: int, tally: dict[str, Any], took_s: float) -> Figure:
    latencies = tally["latencies_us"]
    return Figure(
        name,
        in_flight,
        len(latencies) / tally["seconds"],
        statistics.median(latencies),
        float(np.quantile(latencies, 0.99)),
        1e6 * took_s / len(latencies),
    )


def _table(figures: Sequence[Figure]) -> str:
    """Medians over the rounds, and the least and the most."""
    lines = [
        "| server | in flight | requests/s | p50, us | p99, us | processor time a request, us |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for in_flight in IN_FLIGHT:
        for name in _names(figures):
            own = [f for f in figures if (f.server, f.in_flight) == (name, in_flight)]
            cells = [name, str(in_flight)]
            for values in (
                [f.rate for f in own],
                [f.p50_us for f in own],
                [f.p99_us for f in own],
                [f.processor_us for f in own],
            ):
                middle = statistics.median(values)
                cells.append(f"{middle:,.0f} ({min(values):,.0f} to {max(values):,.0f})")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratios(figures: Sequence[Figure]) -> str:
    """Our requests a second over a peer's, and its processor time over ours, round by round."""
    lines = [
        "| splitedge over | in flight | by the clock | by processor time | goal | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in _names(figures):
        if name == OURS:
            continue
        goal = next((goal for peer, goal in GOALS.items() if name.startswith(peer)), None)
        for in_flight in IN_FLIGHT:
            ours, theirs = (
                [f for f in figures if (f.server, f.in_flight) == (side, in_flight)]
                for side in (OURS, name)
            )
            pairs = list(zip(ours, theirs, strict=True))
            clock = [a.rate / b.rate for a, b in pairs]
            processor = [b.processor_us / a.processor_us for a, b in pairs]
            both = min(statistics.median(clock), statistics.median(processor))
            cells = [name, str(in_flight), _spread(clock), _spread(processor)]
            if goal is None:
                cells += ["none", ""]
            else:
                cells += [f"{goal:.1f}", "met" if both >= goal else "missed"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _names(figures: Sequence[Figure]) -> list[str]:
    return list(dict.fromkeys(figure.server for figure in figures))


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _versions(peers: Path | None) -> dict[str, str]:
    """Versions of what is compared, in the environment that it runs in."""
    names = ["fastapi", "uvicorn", "onnxruntime"]
    if peers is not None:
        names += ["litserve", "ray", "uvloop", "httptools"]
    text = (
        "import importlib.metadata as m, json, sys;"
        "print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    )
    python = servers.this_python() if peers is None else peers
    done = subprocess.run([python, "-c", text, *names], check=True, capture_output=True)
    found: dict[str, str] = orjson.loads(done.stdout)
    return found


if __name__ == "__main__":
    typer.run(main)
