"""Seconds of the engine by batch, and of the processor a query, of the server and of its broker."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.load.clients import Load, LoadProcess
from benchmarks.load.fairness import Site
from benchmarks.load.processes import children, memory_bytes, processor_s
from benchmarks.planning.networks import NETWORKS, Network, smashed
from benchmarks.reports import made_by, provenance, write
from server.backend.ladder import Entry, LadderEngine

NAME: Final = "planning-service"
COMMAND: Final = "python -m benchmarks.planning service"
BATCHES: Final = (1, 2, 4, 8, 16, 32)
TIMED_S: Final = 0.8  # of each batch size
LEAST: Final = 20
KEPT: Final = 101  # quantiles of the times, from the least to the most
# queries a second of the load, by network: far below what the server can do
RATES: Final = {"tiny": 200.0, "resnet18": 60.0}
SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch size of one network, cut at the plan's depth.

    Attributes:
        seconds: quantiles 0, 1/(KEPT - 1), ..., 1 of the time that the engine takes.
    """

    backbone: str
    depth: int
    rows: int
    runs: int
    mean_s: float
    seconds: list[float]


@dataclass(frozen=True, slots=True)
class Served:
    """Queries of raw inputs at a fixed rate over MQTT, by the whole server.

    Attributes:
        server_us, broker_us: of the processor a query, without what they take idle.
        engine_us: of the engine alone, for one raw input.
        idle_s: of the processor a minute, of the server without queries.
        server_mb, broker_mb: resident at the end.
    """

    backbone: str
    broker: str
    rate: float
    answered: int
    server_us: float
    broker_us: float
    engine_us: float
    idle_s: float
    p50_ms: float
    p99_ms: float
    server_mb: float
    broker_mb: float


def measure(results: Path) -> list[str]:
    """Measure everything and write the report; its blocks."""
    with tempfile.TemporaryDirectory(prefix="splitedge-service-") as text:
        work = Path(text)
        batches = [each for one in NETWORKS for each in _batches(one, work / one.backbone)]
        served = [
            _served(one, broker, work / f"{one.backbone}-{broker}")
            for one in NETWORKS
            if one.backbone in RATES
            for broker in ("embedded", "mosquitto")
        ]
    report = {
        "command": COMMAND,
        **provenance(),
        "load": os.getloadavg()[0],
        "batches": [asdict(each) for each in batches],
        "served": [asdict(each) for each in served],
    }
    blocks = page(report)
    write(results / NAME, report, blocks)
    return blocks


def _batches(network: Network, work: Path) -> Iterator[Batch]:
    """The engine's times at the plan's depth, with one thread."""
    folder, manifest = network.export(work)
    engine = LadderEngine(folder, manifest, threads=1)
    entry = next(
        each for each in smashed(folder, manifest, max(BATCHES)) if each.depth == network.depth
    )
    for rows in BATCHES:
        entries = [Entry(network.depth, entry.array[at : at + 1]) for at in range(rows)]

        def run(batch: list[Entry] = entries) -> object:
            return engine.run(batch)

        taken = _timed(run)
        quantiles = np.quantile(taken, np.linspace(0, 1, KEPT)).tolist()
        mean_s = statistics.fmean(taken)
        yield Batch(network.backbone, network.depth, rows, len(taken), mean_s, quantiles)


def _timed(run: Callable[[], object], seconds: float = TIMED_S) -> list[float]:
    """Seconds of the processor of many calls: other programs do not count, as the clock would."""
    run()
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(taken) < LEAST:
        began = time.thread_time()
        run()
        taken.append(time.thread_time() - began)
    return taken


def _served(network: Network, broker: str, work: Path) -> Served:
    size = network.shape[-1]
    work.mkdir()
    site = Site(work, network.backbone, size, 1, ("--mqtt", f"{broker}:127.0.0.1:0"))
    try:
        rate = RATES[network.backbone]
        load = site.load("MQTT", 0, rate=rate, warm_s=0.0, seconds=SECONDS)
        _asked(load, 1.0)  # the model is loaded by its first query
        idle = _used(site.server.pid, lambda: time.sleep(5.0))
        found: list[Any] = []
        used = _used(site.server.pid, lambda: found.append(_asked(load, SECONDS)))
        memory = memory_bytes(site.server.pid), sum(map(memory_bytes, children(site.server.pid)))
    finally:
        site.server.stop()
    engine_s = statistics.median(_timed(_raw_run(work, network)))
    (tally,) = found
    answered = sum(tally.outcomes.values())
    per_query = [
        1e6 * (busy - used[2] * rest / idle[2]) / answered
        for busy, rest in zip(used[:2], idle[:2], strict=True)
    ]
    return Served(
        network.backbone,
        broker,
        rate,
        tally.outcomes["answered"],
        per_query[0],
        per_query[1],
        1e6 * engine_s,
        60 * idle[0] / idle[2],
        tally.quantile_ms(0.5),
        tally.quantile_ms(0.99),
        memory[0] / 1e6,
        memory[1] / 1e6,
    )


def _raw_run(work: Path, network: Network) -> Callable[[], object]:
    """A function that runs the engine on one raw input."""
    folder, manifest = network.export(work / "alone")
    engine = LadderEngine(folder, manifest, threads=1)
    entry = Entry(0, np.random.default_rng(6).normal(size=(1, *network.shape)).astype(np.float32))
    return lambda: engine.run([entry])


def _asked(load: Load, seconds: float) -> Any:
    """The tally of a load of so many seconds; the load's own start is not part of it."""
    fields = {name: getattr(load, name) for name in Load.__slots__}
    process = LoadProcess(Load(**{**fields, "seconds": seconds}))
    process.go()
    return process.tally()


def _used(pid: int, work: Callable[[], object]) -> tuple[float, float, float]:
    """Seconds of the processor of a server and of its broker while something is done, and how
    long that took."""
    before, began = (processor_s(pid), sum(map(processor_s, children(pid)))), time.perf_counter()
    work()
    passed_s = time.perf_counter() - began
    after = processor_s(pid), sum(map(processor_s, children(pid)))
    return after[0] - before[0], after[1] - before[1], passed_s


def page(report: dict[str, Any]) -> list[str]:
    """The report's text."""
    head = " | ".join(f"{rows} row{'s' if rows > 1 else ''}" for rows in BATCHES)
    lines = [f"| network, depth | {head} |", "|---" * (1 + len(BATCHES)) + "|"]
    for network in NETWORKS:
        own = [each for each in report["batches"] if each["backbone"] == network.backbone]
        cells = " | ".join(f"{1e3 * each['seconds'][KEPT // 2]:.3f}" for each in own)
        lines.append(f"| {network.backbone}, {network.depth} | {cells} |")
    table = [
        (
            "| network, broker | queries/s | server, us | engine alone, us | broker, us |"
            " idle server, s a minute | p50 / p99, ms | server, MB | broker, MB |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    table += [
        f"| {each['backbone']}, {each['broker']} | {each['rate']:g} | {each['server_us']:.0f} |"
        f" {each['engine_us']:.0f} | {each['broker_us']:.0f} | {each['idle_s']:.2f} |"
        f" {each['p50_ms']:.2f} / {each['p99_ms']:.2f} | {each['server_mb']:.0f} |"
        f" {each['broker_mb']:.0f} |"
        for each in report["served"]
    ]
    return [
        "# What a query takes of the server",
        (
            "Milliseconds of the processor that the ladder engine takes for one batch, medians, one"
            " thread, random weights. All rows of a batch enter at the depth."
        ),
        "\n".join(lines),
        (
            "Raw inputs at fixed times over MQTT, one sample each, by a server with one thread:"
            " microseconds of the processor a query, without what server and broker take idle."
            " Engine alone: the same input, one at a time, without a server. Other programs may run"
            f" on the machine (load {report['load']:.1f} at the end): they move the latencies, not"
            " the seconds of the processor."
        ),
        "\n".join(table),
        made_by(report),
    ]
