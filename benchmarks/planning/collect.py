"""The figures that `splitedge server plan` ships with, from the committed reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from benchmarks.planning.networks import NETWORKS
from edge_sdk.durable import write_atomic
from server.planning.figures import FILE, Figure

Report = Mapping[str, Any]
Read = Callable[[str], Report]
MB: Final = 1e6
KEPT_UP: Final = 0.95


def collected(results: Path) -> dict[str, Any]:
    """All figures, as figures.json has them.

    Args:
        results: folder of the reports.
    """

    def read(name: str) -> Report:
        report: Report = orjson.loads((results / f"{name}.json").read_bytes())
        return report

    figures = _of_broker(read) | _of_queries(read) | _of_heartbeats(read) | _of_people(read)
    return {
        "made_by": "python -m benchmarks.planning figures",
        "figures": {name: asdict(figure) for name, figure in sorted(figures.items())},
        "networks": _networks(read),
    }


def text(results: Path) -> bytes:
    """The content of figures.json."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(_rounded(collected(results)), option=options)


def rewrite(results: Path, path: Path = FILE) -> bool:
    """Write figures.json; whether it has changed."""
    now = text(results)
    if path.exists() and path.read_bytes() == now:
        return False
    write_atomic(path, now)
    return True


def _rounded(value: Any) -> Any:
    """The same with four significant digits: more were not measured."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {str(key): _rounded(each) for key, each in value.items()}
    return value


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Intercept, at least 0, and slope of the least-squares line."""
    slope, intercept = np.polyfit(xs, ys, 1)
    return max(0.0, float(intercept)), float(slope)


def _of_broker(read: Read) -> dict[str, Figure]:
    """Mosquitto's figures in `brokers`."""
    name = "brokers"
    found: dict[str, Figure] = {}
    for tls, label in ((False, ""), (True, "_tls")):
        rows = [
            row for row in read(name)["rows"] if row["broker"] == "mosquitto" and row["tls"] is tls
        ]
        devices = [row["devices"] for row in rows]
        base_mb, slope_mb = _line(devices, [row["loaded_mb"] for row in rows])
        how = f"Mosquitto{', TLS' if tls else ''}, {min(devices):,} to {max(devices):,} devices"
        largest = float(max(devices))
        found[f"connection{label}_bytes"] = Figure(
            MB * slope_mb, "bytes", name, f"slope of its memory: {how}", largest
        )
        slowest = min(row["logins_per_s"] for row in rows)
        found[f"logins{label}_per_s"] = Figure(
            slowest, "/s", name, f"slowest rate of logins: {how}", largest
        )
        if tls:
            found["broker_base_mb"] = Figure(
                base_mb, "MB", name, f"memory at no devices, by the same line: {how}", largest
            )
    return found


def _of_queries(read: Read) -> dict[str, Figure]:
    """Figures of a query, in `planning-service`."""
    name = "planning-service"
    served = [row for row in read(name)["served"] if row["broker"] == "mosquitto"]
    small = next(row for row in served if row["backbone"] == "tiny")
    return {
        "server_query_us": Figure(
            small["server_us"] - small["engine_us"],
            "us",
            name,
            "processor of the server a query over MQTT, less the engine's: tiny, Mosquitto",
            small["rate"],
        ),
        "broker_query_us": Figure(
            small["broker_us"],
            "us",
            name,
            "processor of Mosquitto for a query and its reply: tiny",
            small["rate"],
        ),
        "backend_mb": Figure(
            max(row["server_mb"] for row in served),
            "MB",
            name,
            "memory of a server with resnet18 loaded, after queries",
        ),
    }


def _of_heartbeats(read: Read) -> dict[str, Figure]:
    """Figures of a device, in `planning-heartbeats`, and the bytes of a heartbeat."""
    name = "planning-heartbeats"
    report = read(name)
    # where a busy machine left heartbeats unwritten, their work was not done either
    rows = [row for row in report["beats"] if row["points"] >= KEPT_UP * row["expected"]]
    devices = [row["devices"] for row in rows]
    largest = float(max(devices))
    how = f"{min(devices):,} to {max(devices):,} devices, a heartbeat every {report['every_s']:g} s"

    def line(field: str) -> tuple[float, float]:
        return _line(devices, [row[field] for row in rows])

    busy, memory, broker = line("server_s"), line("server_mb"), line("broker_s")
    pace = report["written"][-1]
    size = read("planning-sizes")["heartbeat"]
    return {
        "server_base_s": Figure(
            busy[0], "s a minute", name, f"processor of the server at no devices: {how}", largest
        ),
        "server_device_s": Figure(
            busy[1], "s a minute", name, f"processor of the server, a device: {how}", largest
        ),
        "server_base_mb": Figure(
            memory[0], "MB", name, f"memory of the server at no devices: {how}", largest
        ),
        "server_device_mb": Figure(
            memory[1], "MB", name, f"memory of the server, a device: {how}", largest
        ),
        "broker_beat_us": Figure(
            1e6 * broker[1] * report["every_s"] / 60,
            "us",
            name,
            f"processor of Mosquitto for a heartbeat: {how}",
            largest,
        ),
        "rows_per_s": Figure(
            pace["rows_per_s"][1],
            "/s",
            name,
            f"points that SQLite takes, {pace['rows']:,} in a transaction, median",
        ),
        "point_bytes": Figure(
            report["point_bytes"], "bytes", name, "database for a point, with its indices"
        ),
        "heartbeat_bytes": Figure(
            float(size["later"]), "bytes", "planning-sizes", "payload, after 2,000 answers"
        ),
    }


def _of_people(read: Read) -> dict[str, Figure]:
    """Enrolment, the fleet's page and the agent."""
    enrolments, dashboard = read("enrolments"), read("dashboard")
    ways = enrolments["ways"]
    way = next(name for name in ways if "8 threads" in name)
    page = next(page for page in dashboard["pages"] if page["page"] == "fleet")
    agent = read("footprint")["cases"]["agent"]
    return {
        "enrol_s": Figure(
            ways[way]["seconds"] / enrolments["devices"],
            "s",
            "enrolments",
            f"a device, by {way.replace('`', '')}",
            float(enrolments["devices"]),
        ),
        "fleet_page_bytes": Figure(
            page["bytes"] / dashboard["devices"],
            "bytes",
            "dashboard",
            "first load of the fleet's page, a device, the page's own files included",
            float(dashboard["devices"]),
        ),
        "agent_mb": Figure(
            agent["resident_bytes"] / MB, "MB", "footprint", "memory of an agent, a small network"
        ),
    }


def _networks(read: Read) -> dict[str, Any]:
    sizes, batches = read("planning-sizes")["sizes"], read("planning-service")["batches"]
    found = {}
    for network in NETWORKS:
        size = next(
            each
            for each in sizes
            if each["backbone"] == network.backbone and each["depth"] == network.depth
        )
        found[network.backbone] = {
            "depth": network.depth,
            "query": size["query"],
            "reply": float(size["reply"]),
            "bundle": float(size["bundle"]),
            "batch_s": {
                str(each["rows"]): each["mean_s"]
                for each in batches
                if each["backbone"] == network.backbone
            },
        }
    return found
