"""Enrolments of 200 devices from one machine, and the time that they take.

    python -m benchmarks.install.enrolments

Writes benchmarks/results/enrolments.json and .md: the seconds of `token create`, of one Python
process with threads (docs/devices.md), and of `splitedge agent enroll`, a process a device. The
server runs on the same machine, and its seconds of the processor count beside those of the script.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks.reports import RESULTS, Results, made_by, provenance, write
from edge_sdk import api
from profiles.reference import load_reference
from server.processes import ServerProcess

FREE: Final = "127.0.0.1:0"
PROFILE: Final = "raspberry-pi-4"
THREADS: Final = 8
COMMAND: Final = (sys.executable, "-P", "-m", "edge_sdk.cli")


def main(
    results: Results = RESULTS,
    count: Annotated[int, typer.Option(min=1, help="Devices of each way.")] = 200,
    processes: Annotated[int, typer.Option(min=1, help="Commands at one time.")] = 2,
) -> None:
    """Enrol the devices in both ways, at one server."""
    with tempfile.TemporaryDirectory(prefix="splitedge-enrolments-") as text:
        folder = Path(text)
        (folder / "server").mkdir()
        load = os.getloadavg()[0]
        ways: dict[str, dict[str, float]] = {}
        server = ServerProcess(folder / "server")
        server.start(("--http", FREE, "--mqtt", f"auto:{FREE}"))
        try:
            create = ("server", "token", "create", "--count", str(2 * count), "--expires", "1d")
            places = ("--state", str(folder / "server"), "--out", str(folder / "tokens"))
            ways[f"`token create --count {2 * count}`"] = _timed(lambda: _run((*create, *places)))
            tokens = (folder / "tokens").read_text().split()
            ways[f"`enroll` of `edge_sdk`, one process, {THREADS} threads"] = _timed(
                lambda: _in_one_process(server.http, tokens[:count], folder)
            )
            ways[f"`splitedge agent enroll`, {processes} processes at a time"] = _timed(
                lambda: _by_command(server.http, tokens[count:], folder, processes)
            )
        finally:
            server.stop()
    report = {
        "command": "python -m benchmarks.install.enrolments",
        **provenance(),
        "devices": count,
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "ways": ways,
    }
    blocks = page(report)
    write(results / "enrolments", report, blocks)
    typer.echo("\n\n".join(blocks))


def page(report: Mapping[str, Any]) -> list[str]:
    """The report's text."""
    rows = [
        f"| {name} | {taken['seconds']:.1f} | {taken['cpu_s']:.1f} |"
        for name, taken in report["ways"].items()
    ]
    about = (
        f"{report['devices']} devices at one server on the same machine, with the profile of a"
        f" {PROFILE} and without a bundle. The processor's seconds are those of the script and its"
        f" processes, all cores together. Load of the machine before: {report['load_before']:.1f},"
        f" after: {report['load_after']:.1f}; the work itself is a part of the latter."
    )
    table = "\n".join(["| | seconds | processor, s |", "|---|---|---|", *rows])
    return ["# Enrolling many devices", about, table, made_by(report)]


def _timed(work: Callable[[], None]) -> dict[str, float]:
    begin, before = time.perf_counter(), _cpu_s()
    work()
    return {"seconds": time.perf_counter() - begin, "cpu_s": _cpu_s() - before}


def _cpu_s() -> float:
    """Seconds of the processor: of this process, and of its children that ended."""
    found = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in found)


def _run(words: tuple[str, ...], said: str = "") -> None:
    subprocess.run([*COMMAND, *words], input=said, text=True, check=True, capture_output=True)


def _in_one_process(url: str, tokens: list[str], folder: Path) -> None:
    profile = load_reference(PROFILE)

    def enrol(number: int) -> None:
        state = folder / f"thread-{number}"
        api.enroll(url, tokens[number], state, name=f"thread-{number}", profile=profile)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(enrol, range(len(tokens))))


def _by_command(url: str, tokens: list[str], folder: Path, processes: int) -> None:
    def enrol(number: int) -> None:
        name = f"command-{number}"
        words = ("agent", "enroll", "--server", url, "--token-file", "-", "--profile", PROFILE)
        more = ("--no-bundle", "--name", name, "--state", str(folder / name))
        _run((*words, *more), tokens[number])

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(enrol, range(len(tokens))))


if __name__ == "__main__":
    typer.run(main)
