"""Idle memory and start of agent and server, with and without each part that is an extra.

    python -m benchmarks.install.footprint

Each case is a command in a process of its own, as people start it, on a model of random weights.
Memory is resident, of the process and its children, some seconds after it is ready. Start is from
its beginning to its first line; seconds of the processor tell more where other work runs beside.
Writes footprint.json and .md into benchmarks/results/.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import typer

from benchmarks.reports import RESULTS, ROOT, Results, made_by, provenance, write
from edge_sdk import api
from profiles.reference import load_reference
from server.bench.models import export_random
from server.processes import ServerProcess
from server.tokens import create_token

SETTLED_S: Final = 6.0
START_S: Final = 120.0
FREE: Final = "127.0.0.1:0"
NOBODY: Final = "http://127.0.0.1:9"  # no collector listens there
IMPORTS: Final = "numpy, onnxruntime, paho.mqtt.client"


@dataclass(frozen=True)
class Case:
    """A process that is measured.

    Attributes:
        name: of the row.
        kind: agent or server.
        options: of `run`; PORT stands for a serial port, which nothing is written to.
    """

    name: str
    kind: str
    options: tuple[str, ...] = ()


PORT: Final = "PORT"
BASE: Final = (
    Case("agent", "agent"),
    Case("agent, a source: `--source folder:`", "agent", ("--source", "folder:inputs")),
)
# by extra of pyproject.toml
EXTRAS: Final[Mapping[str, Sequence[Case]]] = {
    "serve": (Case("agent, `[serve]`: `--serve`", "agent", ("--serve", FREE)),),
    "camera": (
        Case(
            "agent, `[camera]`: `--source camera:`", "agent", ("--source", "camera:inputs/none.mp4")
        ),
    ),
    "serial": (
        Case("agent, `[serial]`: `--source serial:`", "agent", ("--source", f"serial:{PORT}")),
    ),
    "train": (Case("agent, `[train]`: `--train digits`", "agent", ("--train", "digits")),),
    "server": (
        Case("server, embedded broker", "server", ("--mqtt", f"embedded:{FREE}")),
        Case("server, Mosquitto", "server", ("--mqtt", f"mosquitto:{FREE}")),
        Case(
            "server, embedded broker, `--no-dashboard`",
            "server",
            ("--mqtt", f"embedded:{FREE}", "--no-dashboard"),
        ),
    ),
    "traces": (
        Case("agent, `[traces]`: `--traces`", "agent", ("--traces", NOBODY)),
        Case(
            "server, embedded broker, `[traces]`: `--traces`",
            "server",
            ("--mqtt", f"embedded:{FREE}", "--traces", NOBODY),
        ),
    ),
    "discovery": (
        Case(
            "server, embedded broker, `[discovery]`: `--announce`",
            "server",
            ("--mqtt", f"embedded:{FREE}", "--announce"),
        ),
    ),
}
# extras whose packages no process has that runs on
WITHOUT_PROCESS: Final[Mapping[str, str]] = {
    "privacy": "a training accounts for its noise at its end",
    "ray": "a simulation on a cluster, which Ray's own processes serve",
    "s3": "an API or a backend with `--artifacts s3://...` needs a bucket to start",
    "tensorboard": "reports are exported",
    "mlflow": "reports are exported",
    "docs": "the site is built",
    "notebook": "an example",
    "dev": "tests",
}


def main(results: Results = RESULTS) -> None:
    """Measure every case, one after the other."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="splitedge-footprint-") as text:
        folder = Path(text)
        (folder / "inputs").mkdir()
        export_random("tiny", (1, 8, 8), [2], folder / "models")
        found[f"`import {IMPORTS}`"] = measure(
            [sys.executable, "-c", f"import {IMPORTS}\nprint('ready', flush=True)\ninput()"], folder
        )
        asked = cases(pyproject_extras())
        for case in (each for each in asked if each.kind == "server"):
            state = folder / f"server-{len(found)}"
            words = [*_run("server", state), "--http", FREE, *case.options]
            found[case.name] = measure(words, folder)
        server = ServerProcess(folder / "server")
        (folder / "server").mkdir()
        (folder / "models").rename(folder / "server" / "models")
        server.start(("--http", FREE, "--mqtt", f"embedded:{FREE}"))
        try:
            profile = load_reference("raspberry-pi-4")
            token = create_token(folder / "server")
            api.enroll(server.http, token, folder / "pi", profile=profile, name="pi")
            for case in (each for each in asked if each.kind == "agent"):
                with serial_port() as port:
                    options = [word.replace(PORT, port) for word in case.options]
                    found[case.name] = measure([*_run("agent", folder / "pi"), *options], folder)
        finally:
            server.stop()
    command = "python -m benchmarks.install.footprint"
    report = {"command": command, **provenance(), "settled_s": SETTLED_S, "cases": found}
    blocks = page(report)
    write(results / "footprint", report, blocks)
    typer.echo("\n\n".join(blocks))


def pyproject_extras() -> list[str]:
    """Names of the extras in pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return list(tomllib.load(file)["project"]["optional-dependencies"])


def cases(extras: Sequence[str]) -> list[Case]:
    """The processes that show what these extras cost, and those without any.

    Raises: ValueError naming an extra that nothing is known of.
    """
    strange = sorted({*extras} - {*EXTRAS} - {*WITHOUT_PROCESS})
    if strange:
        raise ValueError(
            f"extras without a process that shows their memory: {', '.join(strange)}; add them to"
            " EXTRAS or WITHOUT_PROCESS in benchmarks/install/footprint.py"
        )
    return [*BASE, *(case for extra in extras for case in EXTRAS.get(extra, ()))]


@contextlib.contextmanager
def serial_port() -> Iterator[str]:
    """A serial port, to which nothing is ever written."""
    ours, theirs = os.openpty()
    try:
        yield os.ttyname(theirs)
    finally:
        os.close(ours)
        os.close(theirs)


def _run(kind: str, state: Path) -> list[str]:
    return [sys.executable, "-P", "-m", "edge_sdk.cli", kind, "run", "--state", str(state)]


def measure(command: Sequence[str], folder: Path, within_s: float = START_S) -> dict[str, float]:
    """Figures of one command: `start_s`, `cpu_s`, `resident_bytes` and `processes`.

    Args:
        within_s: longest time until it says that it is ready.
    Raises: RuntimeError with the end of its log if it does not start.
    """
    log = folder / "log"
    begin = time.perf_counter()
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
    try:
        _wait_for_line(process, log, within_s)
        start_s = time.perf_counter() - begin
        cpu_s = _cpu_s(process.pid)
        time.sleep(SETTLED_S)  # what the first heartbeat and the first turns take
        family = _family(process.pid)
        resident = sum(_bytes(each, "status", "VmRSS") for each in family)
        proportional = sum(_bytes(each, "smaps_rollup", "Pss") for each in family)
    finally:
        process.terminate()
        process.communicate(timeout=30)
    return {
        "start_s": start_s,
        "cpu_s": cpu_s,
        "resident_bytes": resident,
        "proportional_bytes": proportional,
        "processes": len(family),
    }


def _wait_for_line(process: subprocess.Popen[bytes], log: Path, within_s: float) -> None:
    """Wait for the line that says that it is ready, on either stream."""
    assert process.stdout is not None
    deadline = time.monotonic() + within_s
    words = (b"splitedge agent:", b"splitedge server:", b"ready")
    # with a source the line goes to stderr, because the answers have the other stream
    os.set_blocking(process.stdout.fileno(), False)
    said = b""
    while not any(word in said + log.read_bytes() for word in words):
        said += process.stdout.read() or b""
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"it did not start: {log.read_text()[-1000:]}")
        time.sleep(0.01)


def _family(pid: int) -> list[Path]:
    """Folders in /proc of a process and of all its children."""
    folder = Path("/proc") / str(pid)
    children = (
        int(child) for each in folder.glob("task/*/children") for child in each.read_text().split()
    )
    return [folder, *(each for child in children for each in _family(child))]


def _bytes(process: Path, file: str, field: str) -> int:
    lines = (process / file).read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def _cpu_s(pid: int) -> float:
    """Seconds of the processor, of a process and its children."""
    fields = (each.joinpath("stat").read_text().rpartition(")")[2].split() for each in _family(pid))
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def table(figures: Mapping[str, Mapping[str, float]]) -> str:
    """A row of each case."""
    rows = [
        f"| {name} | {case['start_s']:.1f} | {case['cpu_s']:.1f} |"
        f" {case['resident_bytes'] / (1 << 20):.0f} |"
        f" {case['proportional_bytes'] / (1 << 20):.0f} | {case['processes']} |"
        for name, case in figures.items()
    ]
    return "\n".join(
        (
            "| | start, s | processor, s | resident, MiB | shared pages once, MiB | processes |",
            "|---|---|---|---|---|---|",
            *rows,
        )
    )


def page(report: Mapping[str, Any]) -> list[str]:
    """The report's text."""
    return [
        "# Memory and start",
        (
            "Each row is a command in a process of its own, idle, with a small network of random"
            f" weights, {report['settled_s']:.0f} s after it was ready; a server's broker is a"
            " child process and counts. Other work ran on the machine's two cores beside it, so"
            " the time of the processor tells more than the start."
        ),
        table(report["cases"]),
        "The same on arm64, emulated: [footprint-arm64](footprint-arm64.md).",
        made_by(report),
    ]


if __name__ == "__main__":
    typer.run(main)
