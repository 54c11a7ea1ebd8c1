"""Embedded broker and Mosquitto under many devices: memory, logins, latency, storm.

    python -m benchmarks.mqtt.brokers

Each row is one broker with one number of devices, plain or with TLS. Devices and backend are
processes of their own, so their work is not the broker's; all share the machine's cores.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import orjson
import typer
from rich.console import Console

from benchmarks.mqtt.certificates import self_signed
from benchmarks.mqtt.crowd import BACKEND, FLEET, QUERY, REPLY, Where, name
from benchmarks.reports import RESULTS, Results, child_environment, made_by, provenance, write
from server.broker.child import BrokerChild, ListenSettings
from server.broker.mosquitto_child import MosquittoChild
from server.broker.policy import Principal, credential_sha256
from server.processes import ChildProcess
from server.registry.credentials import mosquitto_hash

NAME: Final = "brokers"
PROGRAMS: Final = ("embedded", "mosquitto")
#: Queries a second. Each is two messages, so that the last asks for 2,000 messages a second.
RATES: Final = (300, 600, 1000)
LOAD_S: Final = 8

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Row:
    """One broker under one crowd. Memory in MB of the broker's process, times in seconds.

    Attributes:
        logins_per_s: over all devices, subscriptions included.
        loads: answers and latencies at each rate.
        storm: the broker was killed: how many came back, and how long it took.
    """

    broker: str
    devices: int
    tls: bool
    empty_mb: float
    idle_mb: float
    loaded_mb: float
    logins_per_s: float
    loads: list[dict[str, Any]]
    storm: dict[str, Any]


@app.command(epilog="Example: python -m benchmarks.mqtt.brokers --devices 500")
def main(
    devices: Annotated[list[int], typer.Option(help="Numbers of devices.")] = [500, 2000, 5000],  # noqa: B006 - typer's form
    qos: Annotated[int, typer.Option(min=0, max=1, help="Quality of service of queries.")] = 0,
    results: Results = RESULTS,
) -> None:
    """Measure all rows, and write results/brokers.json and .md."""
    console, rows = Console(stderr=True), []
    for number in devices:
        for tls in (False, True):
            for program in PROGRAMS:
                what = f"{program}, {number} devices{', TLS' if tls else ''}"
                with console.status(what), tempfile.TemporaryDirectory() as folder:
                    rows.append(measure(program, number, Path(folder), qos, tls=tls))
                console.print(f"{what}: {orjson.dumps(asdict(rows[-1])).decode()}")
    about = {"command": "python -m benchmarks.mqtt.brokers", "qos": qos, **provenance()}
    report = {"about": about, "rows": [asdict(row) for row in rows]}
    write(results / NAME, report, _blocks(rows, qos, made_by(about)))


def measure(program: str, devices: int, folder: Path, qos: int, *, tls: bool) -> Row:
    """One row."""
    password = secrets.token_urlsafe(32)
    pair = self_signed(folder, is_rsa=True) if tls else (None, None)
    settings = ListenSettings(certificate=pair[0], key=pair[1])
    broker: BrokerChild | MosquittoChild
    if program == "mosquitto":
        broker = MosquittoChild(folder / program, settings, credential=password)
    else:
        broker = BrokerChild(settings)
        broker.set_principal(Principal(BACKEND, "backend", None, credential_sha256(password)))
    digests = credential_sha256(password), mosquitto_hash(password)
    for number in range(devices):
        broker.set_principal(Principal(name(number), "device", FLEET, *digests))
    broker.start()
    children: list[ChildProcess] = []
    try:
        time.sleep(1)
        empty = memory_mb(broker.pid)
        ca = None if pair[0] is None else str(pair[0])
        backend = _side("backend", Where(broker.port, password, ca=ca, qos=qos))
        children.append(backend)
        backend.expect("up", "did not log in")
        crowd = _side("devices", Where(broker.port, password, devices, ca, qos))
        children.append(crowd)
        took_s = orjson.loads(crowd.expect("up", "did not log in"))["seconds"]
        time.sleep(1)
        idle = memory_mb(broker.pid)
        loads = [_ask(crowd, f"load {rate} {LOAD_S}") for rate in RATES]
        loaded = memory_mb(broker.pid)
        crowd.write_line("storm")
        time.sleep(0.2)
        assert broker.pid is not None
        os.kill(broker.pid, signal.SIGKILL)
        storm = orjson.loads(crowd.read_line())
    finally:
        for child in reversed(children):
            child.close()
        broker.stop()
    return Row(program, devices, tls, empty, idle, loaded, round(devices / took_s, 1), loads, storm)


def memory_mb(pid: int | None) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return round(int(line.split()[1]) * 1024 / 1e6, 1)
    raise RuntimeError(f"process {pid} has no memory")


def _side(side: str, where: Where) -> ChildProcess:
    words = [sys.executable, "-P", "-m", "benchmarks.mqtt.crowd", side]
    return ChildProcess(
        f"the {side}", [*words, orjson.dumps(where).decode()], environment=child_environment()
    )


def _ask(crowd: ChildProcess, line: str) -> dict[str, Any]:
    crowd.write_line(line)
    answer: dict[str, Any] = orjson.loads(crowd.read_line())
    return answer


def _blocks(rows: Iterable[Row], qos: int, how: str) -> Iterable[str]:
    yield "# Brokers under many devices"
    yield (
        f"A query of {len(QUERY):,} bytes and its answer of {len(REPLY):,}, QoS {qos} both ways, on"
        " loopback: device, broker, backend and back. Devices send one after the other at fixed"
        " times, and a latency counts from the time when the query was due;"
        f" {LOAD_S} s at each rate, one run. Memory is that of the broker's process: before the"
        " logins, after them, after the load. Storm: the broker is killed with signal 9, the"
        " server's code starts it again, and devices come back with the agent's jitter; seconds"
        " until all are logged in and subscribed. Devices, backend and broker share the machine's"
        " cores: compare rows, not days. A query and its answer are two messages, so that"
        f" {RATES[-1]:,}/s are {2 * RATES[-1]:,} messages a second."
    )
    head = "broker | devices | TLS | MB empty | MB idle | MB loaded | logins/s"
    head += "".join(f" | p50 / p99 at {rate}/s (ms) | answered" for rate in RATES)
    lines = [f"| {head} | storm (s) |", "|" + "---|" * (head.count("|") + 2)]
    for row in rows:
        cells = [row.broker, f"{row.devices:,}", "yes" if row.tls else "no"]
        cells += [f"{each:.1f}" for each in (row.empty_mb, row.idle_mb, row.loaded_mb)]
        cells.append(f"{row.logins_per_s:.0f}")
        for load in row.loads:
            cells.append(f"{load['p50_ms']} / {load['p99_ms']}")
            cells.append(f"{load['answered']:,} of {load['sent']:,}")
        back = row.storm["back"]
        missing = "" if back == row.devices else f", {row.devices - back} not back"
        cells.append(f"{row.storm['seconds']}{missing}")
        lines.append(f"| {' | '.join(cells)} |")
    yield "\n".join(lines)
    yield how


if __name__ == "__main__":
    app()
