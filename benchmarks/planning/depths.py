"""Memory of an agent against the depth of its bundle: a process of its own for each depth."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.install.footprint import measure as footprint
from benchmarks.reports import made_by, provenance, write
from edge_sdk import api
from edge_sdk.bundles.run_update import run_update
from edge_sdk.nets import build
from profiles.reference import load_reference
from server.bench.models import export_random
from server.processes import ServerProcess
from server.state import existing_registry
from server.tokens import create_token

NAME: Final = "agent-memory"
COMMAND: Final = "python -m benchmarks.planning depths"
SHAPES: Final = {"tiny": (1, 8, 8), "resnet18": (3, 64, 64)}
INPUTS: Final = 50


def measure(results: Path) -> list[str]:
    """Measure every depth of each network and write the report; its blocks."""
    rows = [row for name in SHAPES for row in _rows(name)]
    report = {"command": COMMAND, **provenance(), "inputs": INPUTS, "rows": rows}
    blocks = page(report)
    write(results / NAME, report, blocks)
    return blocks


def _rows(backbone: str) -> Iterator[dict[str, Any]]:
    """One row a depth; the bundles of all come from one server."""
    shape = SHAPES[backbone]
    depths = build(backbone, input_shape=shape, seed=0).cuts
    with tempfile.TemporaryDirectory(prefix="splitedge-depths-") as text:
        work = Path(text)
        state, inputs = work / "server", work / "inputs"
        inputs.mkdir()
        for number, x in enumerate(np.random.default_rng(5).normal(size=(INPUTS, *shape))):
            np.save(inputs / f"{number:02}.npy", x.astype(np.float32))
        folder, _ = export_random(backbone, shape, list(depths), state / "models")
        with _server(state) as server:
            for depth in depths:
                device = work / f"pi-{depth}"
                _enrol(server, state, device, depth)
                words = ["--source", f"folder:{inputs}", "--sink", f"jsonl:{work}/out", "--local"]
                command = [sys.executable, "-P", "-m", "edge_sdk.cli", "agent", "run"]
                found = footprint([*command, "--state", str(device), *words], work)
                answered = len((work / "out").read_text().splitlines())
                (work / "out").unlink()
                files = (folder / "bundles" / f"d{depth}").glob("*")
                yield {
                    "backbone": backbone,
                    "depth": depth,
                    "answered": answered,
                    "bundle_bytes": sum(path.stat().st_size for path in files),
                    **found,
                }


@contextmanager
def _server(state: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(state)
    server.start(("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0"))
    try:
        yield server
    finally:
        server.stop()


def _enrol(server: ServerProcess, state: Path, device: Path, depth: int) -> None:
    """Enrol a device that is pinned to a depth, with its bundle installed."""
    profile = load_reference("raspberry-pi-4")
    api.enroll(server.http, create_token(state), device, profile=profile, name=device.name)
    with existing_registry(state) as registry:
        registry.capabilities.pin(device.name, depth=depth)
    run_update(device)


def page(report: dict[str, Any]) -> list[str]:
    """The report's text."""
    lines = [
        "| network | depth | bundle, MB | resident, MiB | shared pages once, MiB | answered |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['backbone']} | {row['depth']} | {row['bundle_bytes'] / 1e6:.2f} |"
        f" {row['resident_bytes'] / 2**20:.1f} | {row['proportional_bytes'] / 2**20:.1f} |"
        f" {row['answered']} |"
        for row in report["rows"]
    ]
    shapes = ", ".join(f"{name} {' x '.join(map(str, each))}" for name, each in SHAPES.items())
    return [
        "# Memory of an agent against its depth",
        (
            f"`splitedge agent run` with a folder of {report['inputs']} inputs as its source, one"
            " process for each depth, some seconds after it was ready and its inputs were answered"
            f" on the device. Random weights; {shapes}."
        ),
        "\n".join(lines),
        made_by(report),
    ]
