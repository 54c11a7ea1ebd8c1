"""Points of the plots, out of the committed reports."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

Points = Sequence[tuple[float, float]]
Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve of a plot: its points, by ascending x, and the report that they are from."""

    name: str
    report: str
    points: Points


@dataclass(frozen=True, slots=True)
class Source:
    """A report that has curves of a plot, or would have them.

    Attributes:
        read: the curves by name, from the report's JSON.
        command: makes the report.
    """

    report: str
    command: str
    read: Callable[[Report], Mapping[str, Points]]


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot.

    Attributes:
        name: of its picture. x, y: what the axes show, with units.
        fit_from: least x that a slope is fitted through, for y that is constant before it.
    """

    name: str
    title: str
    x: str
    y: str
    sources: tuple[Source, ...]
    fit_from: float = 0.0


def curves_of(plot: Plot, results: Path) -> tuple[list[Curve], list[Source]]:
    """The curves of the reports that are there, and the sources that are missing."""
    found: list[Curve] = []
    missing: list[Source] = []
    for source in plot.sources:
        path = results / f"{source.report}.json"
        if not path.exists():
            missing.append(source)
            continue
        curves = source.read(orjson.loads(path.read_bytes()))
        found += [
            Curve(name, source.report, sorted(points)) for name, points in curves.items() if points
        ]
    return found, missing


def _brokers(field: str) -> Callable[[Report], Mapping[str, Points]]:
    """Latencies at each rate of the row with the most devices, by broker."""

    def read(report: Report) -> Mapping[str, Points]:
        most = max(row["devices"] for row in report["rows"])
        return {
            f"{row['broker']}, {most:,} devices": [
                (load["rate"], load[field]) for load in row["loads"]
            ]
            for row in report["rows"]
            if row["devices"] == most and row["tls"]
        }

    return read


def _simulated(report: Report) -> Mapping[str, Points]:
    """Waiting times of the simulated backend, p99, by kind of arrivals."""
    kinds: dict[str, list[tuple[float, float]]] = {}
    for row in report["loaded"]:
        if row["p99_ms"] > 0:
            kinds.setdefault(f"simulated, {row['kind']}", []).append((row["rate"], row["p99_ms"]))
    return kinds


def _memory(report: Report) -> Mapping[str, Points]:
    return {
        method: list(zip(report["clients"], peaks, strict=True))
        for method, peaks in report["mib"].items()
    }


def _rounds(field: str) -> Callable[[Report], Mapping[str, Points]]:
    """Figures of a round by its clients, by method."""

    def read(report: Report) -> Mapping[str, Points]:
        methods: dict[str, list[tuple[float, float]]] = {}
        for row in report["rows"]:
            methods.setdefault(row["method"], []).append((row["clients"], row[field]))
        return methods

    return read


def _agents(report: Report) -> Mapping[str, Points]:
    """Resident memory of agents in MiB, by network."""
    networks: dict[str, list[tuple[float, float]]] = {}
    for row in report["rows"]:
        point = row["depth"], row["resident_bytes"] / 2**20
        networks.setdefault(row["backbone"], []).append(point)
    return networks


def _backends(report: Report) -> Mapping[str, Points]:
    """Answers a second by the number of backends, by the bound on each."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in report["rows"]:
        share = row["share"]
        name = "no bound" if share is None else f"each at most {share:g} of a core"
        point = row["backends"], statistics.median(row["rates"])
        found.setdefault(name, []).append(point)
    return found


def _connections(report: Report) -> Mapping[str, Points]:
    """Memory of brokers under load, in MB, by broker."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in report["rows"]:
        name = f"{row['broker']}{', TLS' if row['tls'] else ''}"
        found.setdefault(name, []).append((row["devices"], row["loaded_mb"]))
    return found


def _heartbeats(report: Report) -> Mapping[str, Points]:
    """Seconds of the processor a minute, of the server and of its broker."""
    fields = {"server": "server_s", "Mosquitto": "broker_s"}
    return {
        name: [(row["devices"], row[field]) for row in report["beats"] if row[field] > 0]
        for name, field in fields.items()
    }


def _batches(report: Report) -> Mapping[str, Points]:
    """Milliseconds of the engine by rows of a batch, by network."""
    networks: dict[str, list[tuple[float, float]]] = {}
    for row in report["batches"]:
        networks.setdefault(row["backbone"], []).append((row["rows"], 1e3 * row["mean_s"]))
    return networks


def all_curves(plots: Sequence[Plot], results: Path) -> Iterator[tuple[Plot, list[Curve]]]:
    """Each plot that has curves, with them."""
    for plot in plots:
        curves, _ = curves_of(plot, results)
        if curves:
            yield plot, curves


_PLANNING: Final = "python -m benchmarks.planning"
_CLIENTS: Final = "python -m benchmarks.speed clients --data DIR"
_ROUNDS: Final = "python -m benchmarks.speed rounds --data DIR"
PLOTS: Final = (
    Plot(
        "latency-by-load",
        "Latency against offered load",
        "offered queries/s",
        "p99, ms",
        (
            Source("brokers", "python -P -m benchmarks.mqtt.brokers", _brokers("p99_ms")),
            Source("planning-arrivals", f"{_PLANNING} arrivals", _simulated),
        ),
    ),
    Plot(
        "engine-by-batch",
        "The engine's time against rows of a batch",
        "rows",
        "ms",
        (Source("planning-service", f"{_PLANNING} service", _batches),),
    ),
    Plot(
        "queries-by-backends",
        "Queries a second against backends",
        "backends",
        "queries/s",
        (Source("backends", "python -m benchmarks.load.backends", _backends),),
    ),
    Plot(
        "cohort-by-clients",
        "A round of ten clients against the clients there are",
        "clients",
        "processor, s a round",
        (Source("training-clients", _CLIENTS, _rounds("processor_s")),),
    ),
    Plot(
        "round-by-clients",
        "A round against its clients, who are all in it",
        "clients",
        "processor, s a round",
        (Source("training-rounds", _ROUNDS, _rounds("processor_s")),),
    ),
    Plot(
        "round-memory-by-clients",
        "Memory of a round against its clients, who are all in it",
        "clients",
        "peak memory, MiB",
        (Source("training-rounds", _ROUNDS, _rounds("peak_mib")),),
    ),
    Plot(
        "simulation-memory-by-clients",
        "Memory of a simulation against clients, ten of them at a time",
        "clients",
        "peak memory, MiB",
        (Source("training-memory", "python -m benchmarks.speed memory --data DIR", _memory),),
    ),
    Plot(
        "agent-memory-by-depth",
        "Memory of an agent against its depth",
        "depth",
        "resident memory, MiB",
        (Source("agent-memory", f"{_PLANNING} depths", _agents),),
    ),
    Plot(
        "broker-memory-by-devices",
        "Memory of a broker against devices",
        "devices",
        "memory under load, MB",
        (Source("brokers", "python -P -m benchmarks.mqtt.brokers", _connections),),
    ),
    Plot(
        "heartbeats-by-devices",
        "The server's work for heartbeats against devices",
        "devices",
        "processor, s a minute",
        (Source("planning-heartbeats", f"{_PLANNING} heartbeats", _heartbeats),),
    ),
)
