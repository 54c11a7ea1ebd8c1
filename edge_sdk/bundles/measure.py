"""Measurement of a bundle where it runs: time and memory of each of its graphs.

Call it in a process of its own (see `edge_sdk.bundles.trial`): memory is what the process gains.
"""

from __future__ import annotations

import resource
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from edge_sdk.bundles.golden import feeds
from edge_sdk.manifest import GRAPHS, BundleManifest
from edge_sdk.session import Array, Session
from profiles.measured import BundleMeasurement, GraphMeasurement

# a median that another process does not move, in a time that an update does not notice
RUNS_LEAST: Final = 5
RUNS_MOST: Final = 200
SECONDS_A_GRAPH: Final = 0.3

_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")
_RESET_PEAK: Final = b"5"  # of resident memory: see proc(5)


class BundleMeter:
    """Loads the graphs of a bundle as an agent does, and measures them.

    Args:
        x: (1, ...) one raw input.
    Attributes:
        sessions: by graph.
    Raises: BundleError if a graph cannot be loaded, InputError if it cannot run.
    """

    def __init__(self, folder: Path, manifest: BundleManifest, x: Array) -> None:
        self.sessions: dict[str, Session] = {}
        self._manifest = manifest
        self._x = x
        self._memory: dict[str, int] = {}
        start = highest = resident_bytes()
        for name in sorted(manifest.graphs, key=GRAPHS.index):
            before = resident_bytes()
            reset_peak()
            self.sessions[name] = Session(folder / manifest.graphs[name].file)
            self._run(name)
            peak = peak_bytes()
            self._memory[name] = max(peak - before, 0)
            highest = max(highest, peak)
        self._memory_bytes = highest - start

    def measure(self, score_gflops: float) -> BundleMeasurement:
        """Time every graph, and say what loading them took.

        Args:
            score_gflops: of one core, now.
        """
        graphs = {}
        for name in self.sessions:
            seconds = self._time(name)
            latency_ms = 1e3 * statistics.median(seconds)
            graphs[name] = GraphMeasurement(latency_ms, self._memory[name], len(seconds))
        return BundleMeasurement(self._manifest.bundle, graphs, score_gflops, self._memory_bytes)

    def _time(self, name: str) -> list[float]:
        seconds: list[float] = []
        end = time.perf_counter() + SECONDS_A_GRAPH
        while len(seconds) < RUNS_LEAST or (len(seconds) < RUNS_MOST and time.perf_counter() < end):
            start = time.perf_counter()
            self._run(name)
            seconds.append(time.perf_counter() - start)
        return seconds

    def _run(self, name: str) -> None:
        self.sessions[name].run(None, feeds(self._manifest.graphs[name], self._x))


def resident_bytes() -> int:
    """Resident memory of this process now; outside of Linux its peak."""
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """The largest resident memory of this process since `reset_peak`."""
    return _status_bytes("VmHWM")


def reset_peak() -> None:
    """Start a new peak at the present resident memory, where the system can."""
    with suppress(OSError):
        _CLEAR.write_bytes(_RESET_PEAK)


def _status_bytes(field: str) -> int:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
