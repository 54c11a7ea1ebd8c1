"""Heartbeats of many devices: processor, memory and rows of the database that they take."""

from __future__ import annotations

import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.dashboard.simulated import SimulatedDevice
from benchmarks.dashboard.site import BEAT_S, BUNDLES, Site
from benchmarks.reports import made_by, provenance, write
from server.registry.database import Registry
from server.registry.location import registry_file
from server.registry.telemetry.history import LastReading
from server.registry.telemetry.reading import Reading
from server.state import existing_registry

NAME: Final = "planning-heartbeats"
COMMAND: Final = "python -m benchmarks.planning heartbeats"
DEVICES: Final = (50, 1_000, 2_500, 5_000)
SETTLED_S: Final = 5.0
SECONDS: Final = 30.0
#: Readings that are written in one transaction, as housekeeping does every second.
WRITES: Final = (10, 100, 1_000)
TIMES: Final = 8


@dataclass(frozen=True, slots=True)
class Beats:
    """A server that takes the heartbeats of so many devices, one each 30 s.

    Attributes:
        server_s, broker_s: seconds of the processor a minute.
        points: of the history that were written. expected: heartbeats that were due.
    """

    devices: int
    server_s: float
    broker_s: float
    server_mb: float
    broker_mb: float
    points: int
    expected: float


@dataclass(frozen=True, slots=True)
class Written:
    """Points that are written in one transaction to SQLite.

    Attributes:
        rows_per_s: of the fastest, the median and the slowest transaction.
    """

    rows: int
    rows_per_s: tuple[float, float, float]


def measure(results: Path, devices: Sequence[int] = DEVICES) -> list[str]:
    """Measure everything and write the report; its blocks."""
    beats: list[Beats] = []
    written: list[Written] = []
    point_bytes = 0.0
    for many in devices:
        with tempfile.TemporaryDirectory(prefix="splitedge-heartbeats-") as work:
            site = Site(Path(work), many, history_s=0.0)
            beats.append(_beats(site, many))
            print(beats[-1], flush=True)
            if many >= max(WRITES) and not written:
                written = [_written(site, rows) for rows in WRITES]
                point_bytes = _point_bytes(site)
    report = {
        "command": COMMAND,
        **provenance(),
        "load": os.getloadavg()[0],
        "every_s": BEAT_S,
        "seconds": SECONDS,
        "beats": [asdict(one) for one in beats],
        "written": [asdict(one) for one in written],
        "point_bytes": point_bytes,
    }
    blocks = page(report)
    write(results / NAME, report, blocks)
    return blocks


def _beats(site: Site, devices: int) -> Beats:
    with site.running() as server:
        time.sleep(SETTLED_S)
        points, before, began = _points(site), server.usage(), time.monotonic()
        time.sleep(SECONDS)
        after, passed_s = server.usage(), time.monotonic() - began
        points = _points(site) - points
    return Beats(
        devices,
        60 * (after.server_s - before.server_s) / passed_s,
        60 * (after.broker_s - before.broker_s) / passed_s,
        after.server_bytes / 1e6,
        after.broker_bytes / 1e6,
        points,
        devices * passed_s / BEAT_S,
    )


def _points(site: Site) -> int:
    """Points of the history on the disk."""
    with closing(sqlite3.connect(f"file:{registry_file(site.state)}?mode=ro", uri=True)) as base:
        return int(base.execute("select count(*) from telemetry").fetchone()[0])


def _written(site: Site, rows: int) -> Written:
    """The pace of the history's transactions; each device has a point before."""
    with existing_registry(site.state) as registry:
        rates = sorted(_rates(registry, [one["name"] for one in site.devices[:rows]]))
    return Written(rows, (rates[0], rates[len(rates) // 2], rates[-1]))


def _rates(registry: Registry, names: Sequence[str]) -> Iterator[float]:
    devices = [
        SimulatedDevice(name, BUNDLES[number % 3], number) for number, name in enumerate(names)
    ]
    for turn in range(1 + TIMES):
        at = time.time() + turn  # no two points of a device have one second
        readings = {
            one.name: LastReading(at, Reading.from_heartbeat(one.heartbeat(BEAT_S)))
            for one in devices
        }
        began = time.perf_counter()
        registry.telemetry.record(readings)
        if turn:
            yield len(names) / (time.perf_counter() - began)


def _point_bytes(site: Site) -> float:
    """Bytes of the database for one point, its indices included."""
    path = registry_file(site.state)
    tables = "('telemetry', 'ix_telemetry_step_at', 'ix_telemetry_at_counts')"
    with closing(sqlite3.connect(path)) as base:
        try:
            asked = f"select sum(pgsize) from dbstat where name in {tables}"
            total = base.execute(asked).fetchone()[0]
        except sqlite3.OperationalError:  # an SQLite without dbstat: the whole file
            total = path.stat().st_size
        return float(total / base.execute("select count(*) from telemetry").fetchone()[0])


def page(report: dict[str, Any]) -> list[str]:
    """The report's text."""
    lines = [
        (
            "| devices | server, s of a processor a minute | broker | server, MB | broker, MB |"
            " points written | heartbeats due |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one['devices']:,} | {one['server_s']:.2f} | {one['broker_s']:.2f} |"
        f" {one['server_mb']:.0f} | {one['broker_mb']:.1f} | {one['points']:,} |"
        f" {one['expected']:,.0f} |"
        for one in report["beats"]
    ]
    table = ["| points in a transaction | points/s: least | median | most |", "|---|---|---|---|"]
    for one in report["written"]:
        cells = " | ".join(f"{rate:,.0f}" for rate in one["rows_per_s"])
        table.append(f"| {one['rows']:,} | {cells} |")
    return [
        "# What heartbeats take of the server",
        (
            "A server with Mosquitto as its child and SQLite on this machine's disk; simulated"
            f" devices, connected in the clear, send a heartbeat each {report['every_s']:g} s and"
            f" nothing else. {report['seconds']:g} s of each, once all were logged in."
            f" Load of the machine at the end: {report['load']:.1f}."
        ),
        "\n".join(lines),
        (
            "Points of the history, written as housekeeping writes them. A point takes"
            f" {report['point_bytes']:,.0f} bytes of the database, with its indices."
        ),
        "\n".join(table),
        made_by(report),
    ]
