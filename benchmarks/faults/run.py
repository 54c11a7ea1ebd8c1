"""Makes one figure: its tests in their full form, in a process of their own."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import orjson

from benchmarks.faults.figures import FIGURES
from benchmarks.faults.report import MET, MISSED, not_run
from benchmarks.reports import ROOT, child_environment, provenance

# a machine that others use takes longer than FIGURES say
PATIENCE: Final = 6.0
MINUTES_MIN: Final = 10.0


def make_figure(name: str, *, soak_minutes: float) -> dict[str, Any]:
    """Outcome of a figure, as the report has it.

    Args:
        soak_minutes: how long a soak lasts.
    """
    figure = FIGURES[name]
    missing = missing_rights() if figure.loop_devices else ""
    if missing:
        return not_run(figure, missing)
    limit_s = 60 * max(MINUTES_MIN, PATIENCE * figure.minutes, 2 * soak_minutes)
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "reached.jsonl")
        began = time.monotonic()
        # a signal from the terminal reaches the tests too, which end what they started
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "--tb=short", f"--timeout={limit_s:g}"),
                *(f"--fault-figures={said}", f"--soak-minutes={soak_minutes:g}", *figure.tests),
            ],
            cwd=ROOT,
            env=child_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - began
        lines = said.read_bytes().splitlines() if said.exists() else []
    reached = [line for line in map(orjson.loads, lines) if line["figure"] == name]
    about = provenance()
    return {
        "rows": figure.rows,
        "wanted": figure.wanted,
        "result": MET if done.returncode == 0 and reached else MISSED,
        "reached": _told(reached, done.returncode, done.stdout),
        "numbers": reached[-1]["numbers"] if reached else {},
        "command": f"make faults ARGS={name}",
        "seconds": round(seconds, 1),
        "machine": f"{about['machine']}, kernel {_kernel()}",
        "commit": about["commit"],
        "when": about["when"],
    }


def missing_rights() -> str:
    """Why this process cannot mount a file system of its own; empty where it can."""
    if os.geteuid() != 0:
        return "needs root, to mount a file system of its own"
    asked = subprocess.run(["losetup", "--find"], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        return f"needs a loop device: {asked.stderr.strip()}"
    return ""


def _told(reached: list[dict[str, Any]], status: int, output: str) -> str:
    """The line of the report: what was reached, and how the tests failed where they did."""
    # one line for each test of the figure
    told = "; ".join(dict.fromkeys(str(line["reached"]) for line in reached))
    if status == 0:
        return told or "the tests passed and reported nothing"
    failed = [line[2:].strip() for line in output.splitlines() if line.startswith("E  ")]
    if failed:
        last = failed[0]
    elif status < 0:
        last = f"the tests were ended by {signal.Signals(-status).name}"
    else:
        last = f"the tests ended with status {status}: {output.strip().splitlines()[-1]}"
    return f"{told}; {last}" if told else last


def _kernel() -> str:
    """Version of the kernel, without what its builder appended."""
    return ".".join(platform.release().split(".")[:2])
