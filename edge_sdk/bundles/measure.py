"""Measurement of a bundle where it runs: time and memory of each of its graphs.

Call it in a process of its own (see `edge_sdk.bundles.trial`): memory is what the process gains.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from edge_sdk.bundles.golden import feeds
from edge_sdk.manifest import GRAPHS, BundleManifest
from edge_sdk.providers.names import CPU
from edge_sdk.session import Array, Session
from profiles.measured import BundleMeasurement, GraphMeasurement

# a median that another process does not move, in a time that an update does not notice
ROUNDS: Final = 5
RUNS_A_ROUND: Final = 40
SECONDS_A_ROUND: Final = 0.06

_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")
_RESET_PEAK: Final = b"5"  # of resident memory: see proc(5)


class BundleMeter:
    """Loads the graphs of a bundle as an agent does, and measures them.

    Args:
        x: (1, ...) one raw input.
        provider: runs the graphs.
    Attributes:
        sessions: by graph.
    Raises: BundleError if a graph cannot be loaded, InputError if it cannot run.
    """

    def __init__(
        self, folder: Path, manifest: BundleManifest, x: Array, provider: str = CPU
    ) -> None:
        self.sessions: dict[str, Session] = {}
        self._manifest = manifest
        self._x = x
        self._memory: dict[str, int] = {}
        start = highest = resident_bytes()
        for name in sorted(manifest.graphs, key=GRAPHS.index):
            before = resident_bytes()
            reset_peak()
            self.sessions[name] = Session(folder / manifest.graphs[name].file, provider=provider)
            self._run(name)
            peak = peak_bytes()
            self._memory[name] = max(peak - before, 0)
            highest = max(highest, peak)
        self._memory_bytes = highest - start

    def run_once(self, name: str) -> float:
        """Seconds that one run of a graph takes."""
        start = time.perf_counter()
        self._run(name)
        return time.perf_counter() - start

    def measurement(
        self, seconds: Mapping[str, Sequence[float]], score_gflops: float
    ) -> BundleMeasurement:
        """The measurement with these times of each graph, and what loading them took."""
        graphs = {
            name: GraphMeasurement(1e3 * statistics.median(taken), self._memory[name], len(taken))
            for name, taken in seconds.items()
        }
        return BundleMeasurement(self._manifest.bundle, graphs, score_gflops, self._memory_bytes)

    def _run(self, name: str) -> None:
        self.sessions[name].run(None, feeds(self._manifest.graphs[name], self._x))


def measure_in_turns(meters: Sequence[BundleMeter], score_gflops: float) -> list[BundleMeasurement]:
    """Time every graph of every bundle; the bundles take turns, so that other work slows all alike.

    Args:
        score_gflops: of one core, now.
    """
    seconds: list[dict[str, list[float]]] = [{} for _ in meters]
    for _ in range(ROUNDS):
        for meter, taken in zip(meters, seconds, strict=True):
            for name in meter.sessions:
                taken.setdefault(name, []).extend(_timed(meter, name))
    return [
        meter.measurement(taken, score_gflops) for meter, taken in zip(meters, seconds, strict=True)
    ]


def _timed(meter: BundleMeter, name: str) -> list[float]:
    meter.run_once(name)  # the caches hold another graph's weights
    seconds = [meter.run_once(name)]
    end = time.perf_counter() + SECONDS_A_ROUND
    while len(seconds) < RUNS_A_ROUND and time.perf_counter() < end:
        seconds.append(meter.run_once(name))
    return seconds


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
