"""Idle memory and start of agent and server on arm64, emulated, with and without each extra.

    make arm64 ARGS=--extras

The same commands as in footprint.py, in the system that `make arm64` builds. Memory has the
emulator's own in it, some 70 MiB a process, and times are some ten times a real machine's: only the
differences between rows say something. Writes footprint-arm64.json and .md.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.install.footprint import (
    EXTRAS,
    FREE,
    IMPORTS,
    PORT,
    SETTLED_S,
    Case,
    cases,
    measure,
    serial_port,
    table,
)
from benchmarks.reports import ROOT, made_by, provenance, write
from server.bench.models import export_random
from server.processes import ServerProcess
from server.tokens import create_token

SCRIPT: Final = ROOT / ".ci" / "arm64-root.sh"
PROGRAM: Final = "/opt/splitedge/bin"
START_S: Final = 900.0
NEEDS: Final = "mosquitto"  # which the emulated system does not have


def install_extras(root: Path, wheel: str) -> None:
    """Install every measured extra into the emulated system, which takes minutes the first time."""
    done = root / "opt" / "extras"
    wanted = ",".join(sorted(EXTRAS))
    if done.exists() and done.read_text() == wanted:
        return
    pip = (f"{PROGRAM}/pip", "install", "--quiet", "--constraint", "/opt/dist/constraints.txt")
    command = ["bash", str(SCRIPT), "run", str(root), *pip, f"{wheel}[{wanted}]"]
    subprocess.run(command, check=True)
    done.write_text(wanted)


def report_extras(root: Path, results: Path) -> list[str]:
    """Measure every case in the emulated system; gives the report's text, which is written too."""
    with tempfile.TemporaryDirectory(prefix="splitedge-arm64-") as text, _devices(root):
        there = Path(tempfile.mkdtemp(prefix="run-", dir=root / "opt"))
        try:
            found = _measured(root, Path(text), there)
        finally:
            shutil.rmtree(there)
    report = {
        "command": "make arm64 ARGS=--extras",
        **provenance(),
        "settled_s": SETTLED_S,
        "cases": found,
    }
    blocks = _page(report)
    write(results / "footprint-arm64", report, blocks)
    return blocks


def _measured(root: Path, folder: Path, there: Path) -> dict[str, dict[str, float]]:
    """Figures by the names of the cases.

    Args:
        folder: of this machine. there: of the emulated system, seen from here.
    """
    inside = f"/opt/{there.name}"
    run = ["bash", str(SCRIPT), "run", str(root)]
    script = f"import {IMPORTS}\nprint('ready', flush=True)\ninput()"
    found = {f"`import {IMPORTS}`": _figures([*run, f"{PROGRAM}/python", "-c", script], folder)}
    asked = [case for case in cases(list(EXTRAS)) if NEEDS not in " ".join(case.options)]
    export_random("tiny", (1, 8, 8), [2], folder / "server" / "models")
    (there / "inputs").mkdir()
    for number, case in enumerate(case for case in asked if case.kind == "server"):
        state = f"server-{number}"
        shutil.copytree(folder / "server" / "models", there / state / "models")
        words = ["server", "run", "--state", f"{inside}/{state}", "--http", FREE, *case.options]
        found[case.name] = _figures([*run, f"{PROGRAM}/splitedge", *words], folder)
    server = ServerProcess(folder / "server")
    server.start(("--http", FREE, "--mqtt", f"embedded:{FREE}"))
    try:
        state = f"{inside}/pi"
        enroll = ("agent", "enroll", "--server", server.http, "--state", state, "--name", "pi")
        token = create_token(folder / "server")
        words = [f"{PROGRAM}/splitedge", *enroll, "--token", token]
        subprocess.run([*run, *words], check=True, stdout=subprocess.DEVNULL)
        for case in (case for case in asked if case.kind == "agent"):
            with serial_port() as port:
                words = ["agent", "run", "--state", state, *_options(case, inside, port)]
                found[case.name] = _figures([*run, f"{PROGRAM}/splitedge", *words], folder)
    finally:
        server.stop()
    return found


def _figures(command: list[str], folder: Path) -> dict[str, float]:
    figures = measure(command, folder, START_S)
    print(json.dumps(figures), file=sys.stderr, flush=True)
    return figures


def _options(case: Case, inside: str, port: str) -> list[str]:
    """Options of a case, with its files by their places in the emulated system."""
    return [
        word.replace(PORT, port).replace(":inputs", f":{inside}/inputs") for word in case.options
    ]


@contextlib.contextmanager
def _devices(root: Path) -> Iterator[None]:
    """Serial ports of this machine, in the emulated system."""
    place = root / "dev" / "pts"
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "--bind", "/dev/pts", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def _page(report: Mapping[str, Any]) -> list[str]:
    """The report's text."""
    return [
        "# Memory and start on arm64, emulated",
        (
            "Each row is a command in a process of its own, idle, with a small network of random"
            f" weights, {report['settled_s']:.0f} s after it was ready, in a Debian bookworm of"
            " arm64 that qemu emulates. Every process has the emulator's own memory in it, which"
            " the first row shows beside [that of x86-64](footprint.md), and emulation is some ten"
            " times slower than a Pi: read the rows beside each other. Other work ran on the"
            " machine's two cores. The managed Mosquitto is left out: Debian's own is not installed"
            " there."
        ),
        table(report["cases"]),
        made_by(report),
    ]
