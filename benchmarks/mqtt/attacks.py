"""The embedded broker under floods, under TLS, and in a bare echo beside Mosquitto.

    python -m benchmarks.mqtt.attacks                    all parts, about three minutes
    python -m benchmarks.mqtt.attacks --part floods      one of them: floods, silent, fleet, echo
    python -m benchmarks.mqtt.attacks --label before     another name of the report

Everything runs on loopback. The attacker is a process of its own. Writes broker-LABEL.json into
benchmarks/results/.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import secrets
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import orjson
import typer

from benchmarks.mqtt.certificates import self_signed
from benchmarks.reports import RESULTS, Results, child_environment, commit
from edge_sdk.durable import write_atomic
from server.bench import brokers
from server.broker.child import BrokerChild, ListenSettings
from server.broker.policy import Principal, credential_sha256

SECRET: Final = secrets.token_hex(16)
PARTS: Final = ("floods", "silent", "fleet", "echo")
FLOOD_S: Final = 4.0
PAYLOAD: Final = bytes(1_800)

app = typer.Typer(add_completion=False)


# --- packets, by hand -----------------------------------------------------------------------


def text(value: str) -> bytes:
    """A string as MQTT writes it."""
    return len(value.encode()).to_bytes(2, "big") + value.encode()


def packet(first: int, body: bytes) -> bytes:
    """A packet with its length."""
    length, head = len(body), bytes((first,))
    while length >= 128:
        length, head = length >> 7, head + bytes((length & 127 | 128,))
    return head + bytes((length,)) + body


def connect_packet(client_id: str, user: str, secret: str = SECRET) -> bytes:
    """A CONNECT with a clean session and a keep-alive of 60 s."""
    head = b"\x00\x04MQTT\x04\xc2\x00\x3c"
    return packet(0x10, head + text(client_id) + text(user) + text(secret))


FLOODS: Final[Mapping[str, bytes]] = {
    "PINGREQ": b"\xc0\x00" * 32_768,
    "PUBACK": b"\x40\x02\x00\x01" * 16_384,
    "SUBSCRIBE": packet(0x82, b"\x00\x01" + b"\x00\x01a\x01" * 400_000),
    "UNSUBSCRIBE": packet(0xA2, b"\x00\x01" + b"\x00\x01a" * 500_000),
    "PUBLISH": packet(0x30, text("splitedge/v1/lab/pi-1/telemetry") + b"x") * 1_000,
    "CONNECT": b"",
}


def log_in(
    port: int,
    client_id: str,
    user: str = "",
    tls: ssl.SSLContext | None = None,
    secret: str = SECRET,
) -> Any:
    """A socket after its login."""
    sock: Any = socket.create_connection(("127.0.0.1", port), timeout=30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is not None:
        sock = tls.wrap_socket(sock)
    sock.sendall(connect_packet(client_id, user or client_id, secret))
    answer = sock.recv(4)
    if answer != b"\x20\x02\x00\x00":
        raise ConnectionError(f"login: expected a CONNACK, got {answer!r}")
    return sock


def flood(kind: str, port: int, secret: str, until: float) -> None:
    """Send the same packets as fast as the broker takes them, again after each cut."""
    while time.time() < until:
        with contextlib.suppress(OSError):
            if kind == "CONNECT":
                with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
                    sock.sendall(connect_packet("pi-1", "pi-1", secret))
                continue
            with log_in(port, "pi-1", secret=secret) as sock:
                sock.settimeout(1)
                drain = threading.Thread(target=read_all, args=(sock,), daemon=True)
                drain.start()
                while time.time() < until:
                    sock.sendall(FLOODS[kind])


def read_all(sock: socket.socket) -> None:
    """Read until the end, so that answers never hold the flooder back."""
    with contextlib.suppress(OSError):
        while True:
            with contextlib.suppress(TimeoutError):
                if not sock.recv(1_000_000):
                    return


class Prober:
    """A device whose queries a backend answers, both over plain sockets."""

    def __init__(self, port: int) -> None:
        self._backend = log_in(port, "backend-1", "backend")
        self._backend.sendall(packet(0x82, b"\x00\x01" + text("splitedge/v1/+/+/query") + b"\x00"))
        self._backend.recv(5)
        self._device = log_in(port, "pi-2")
        reply = text("splitedge/v1/lab/pi-2/reply")
        self._device.sendall(packet(0x82, b"\x00\x01" + reply + b"\x00"))
        self._device.recv(5)
        self._query = packet(0x30, text("splitedge/v1/lab/pi-2/query") + PAYLOAD)
        self._reply = packet(0x30, reply + PAYLOAD)

    def round_trip_ms(self) -> float:
        """Milliseconds from query to reply."""
        began = time.perf_counter()
        self._device.sendall(self._query)
        _take(self._backend, len(self._query))
        self._backend.sendall(self._reply)
        _take(self._device, len(self._reply))
        return 1_000 * (time.perf_counter() - began)

    def close(self) -> None:
        """Close both sockets."""
        self._device.close()
        self._backend.close()


def _take(sock: socket.socket, count: int) -> None:
    while count:
        part = sock.recv(count)
        if not part:
            raise ConnectionError("the broker closed the connection")
        count -= len(part)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which that share lies."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)


@contextlib.contextmanager
def embedded(devices: int = 2, pair: tuple[Path, Path] | None = None) -> Iterator[BrokerChild]:
    """The embedded broker with devices pi-1, pi-2, ... and a backend."""
    child = BrokerChild(ListenSettings(certificate=pair and pair[0], key=pair and pair[1]))
    child.set_principal(Principal("backend", "backend", None, credential_sha256(SECRET)))
    for number in range(1, devices + 1):
        name = f"pi-{number}"
        child.set_principal(Principal(name, "device", "lab", credential_sha256(SECRET)))
    child.start()
    try:
        yield child
    finally:
        child.stop()


def memory_mb(child: BrokerChild) -> float:
    """Resident memory of the broker's process."""
    pages = int(Path(f"/proc/{child.pid}/statm").read_text().split()[1])
    return round(pages * resource.getpagesize() / 1e6, 1)


# --- the parts ------------------------------------------------------------------------------


def floods() -> dict[str, Any]:
    """Round trips of another device while one floods, for each kind of packet."""
    found: dict[str, Any] = {}
    for kind in FLOODS:
        with embedded() as child:
            prober = Prober(child.port)
            calm = [prober.round_trip_ms() for _ in range(300)]
            before = memory_mb(child)
            until = time.time() + FLOOD_S
            attacker = multiprocessing.get_context("spawn").Process(
                target=flood, args=(kind, child.port, SECRET, until), daemon=True
            )
            attacker.start()
            time.sleep(1.0)  # the process starts
            trips, highest = [], before
            while time.time() < until:
                trips.append(prober.round_trip_ms())
                highest = max(highest, memory_mb(child))
            ended = time.perf_counter()
            with contextlib.suppress(OSError):
                while prober.round_trip_ms() > 20:
                    pass
            recovery_s = time.perf_counter() - ended
            attacker.terminate()
            attacker.join()
            prober.close()
            found[kind] = {
                "calm_p99_ms": quantile(calm, 0.99),
                "trips": len(trips),
                "p50_ms": quantile(trips, 0.5),
                "p99_ms": quantile(trips, 0.99),
                "longest_ms": quantile(trips, 1.0),
                "recovery_s": round(recovery_s, 2),
                "memory_mb": [before, highest],
            }
            typer.echo(f"{kind}: {found[kind]}")
    return found


def silent() -> dict[str, Any]:
    """Memory of the broker under 1,500 TLS sockets that say nothing, and after them."""
    with tempfile.TemporaryDirectory() as folder, embedded(pair=self_signed(Path(folder))) as child:
        before = memory_mb(child)
        with contextlib.ExitStack() as sockets:
            for _ in range(1_500):
                sockets.enter_context(socket.create_connection(("127.0.0.1", child.port)))
            time.sleep(1)
            during = memory_mb(child)
            began = time.perf_counter()
            log_in(child.port, "pi-1", tls=_trusting()).close()
            login_ms = 1_000 * (time.perf_counter() - began)
        time.sleep(1)
        return {
            "before_mb": before,
            "during_mb": during,
            "after_mb": memory_mb(child),
            "login_ms": round(login_ms, 1),
        }


def fleet(devices: int = 500) -> dict[str, Any]:
    """Memory of the broker with 500 devices logged in, plain and over TLS."""
    found = {}
    for name in ("plain", "tls"):
        with tempfile.TemporaryDirectory() as folder:
            pair = self_signed(Path(folder)) if name == "tls" else None
            with embedded(devices, pair) as child, contextlib.ExitStack() as sockets:
                before = memory_mb(child)
                context = _trusting() if pair else None
                began = time.perf_counter()
                for number in range(1, devices + 1):
                    sock = sockets.enter_context(log_in(child.port, f"pi-{number}", tls=context))
                    topic = text(f"splitedge/v1/lab/pi-{number}/reply")
                    sock.sendall(packet(0x82, b"\x00\x01" + topic + b"\x01"))
                    sock.recv(5)
                took = time.perf_counter() - began
                found[name] = {
                    "before_mb": before,
                    "logged_in_mb": memory_mb(child),
                    "kb_each": round(1_000 * (memory_mb(child) - before) / devices),
                    "logins_per_s": round(devices / took),
                }
    return found


def _children() -> set[int]:
    """Ids of this process's own children."""
    lists = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {int(pid) for each in lists for pid in each.read_text().split()}


def echo(rounds: int = 30, trips: int = 100) -> dict[str, Any]:
    """Bare paho round trips at QoS 1 over both brokers, in short turns.

    Both brokers run all the time, so that other work on the machine hinders both alike.
    """
    taken: dict[str, list[float]] = {}
    processor_s: dict[str, float] = {}
    with contextlib.ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        starts = {"embedded": brokers.embedded}
        if brokers.find_mosquitto() is not None:
            starts["mosquitto"] = partial(brokers.mosquitto, folder)
        pings = {}
        for name, start in starts.items():
            before = _children()
            port = running.enter_context(start()).port
            (broker,) = _children() - before
            pings[name] = running.enter_context(_echo(port)), broker
            taken[name], processor_s[name] = [], 0.0
        for number in range(rounds + 1):
            for name in sorted(pings, reverse=bool(number % 2)):
                ping, pid = pings[name]
                at_first = _processor_s(pid)
                turn = [ping() for _ in range(trips)]
                if number:  # the first round warms up
                    taken[name] += turn
                    processor_s[name] += _processor_s(pid) - at_first
    medians = {name: round(statistics.median(times)) for name, times in taken.items()}
    ratio = medians["embedded"] / medians.get("mosquitto", medians["embedded"])
    return {
        "median_us": medians,
        "ratio": round(ratio, 2),
        "fastest_tenth_us": {
            name: round(statistics.quantiles(times, n=10)[0]) for name, times in taken.items()
        },
        "processor_us_an_echo": {
            name: round(1e6 * spent / (rounds * trips)) for name, spent in processor_s.items()
        },
    }


@contextlib.contextmanager
def _echo(port: int) -> Iterator[Callable[[], float]]:
    """A function that sends bytes to a bare paho process and waits for them; microseconds."""
    from server.bench.echo import connect  # noqa: PLC0415 - paho, needed by this part alone

    command = [sys.executable, "-P", "-m", "server.bench.echo", str(port)]
    command += [brokers.ECHO_USER, "echo", brokers.QUERY, brokers.REPLY]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment()
    )
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdout.readline()
    client = connect(port, brokers.PING_USER, "ping", brokers.REPLY)
    answered = threading.Event()
    client.on_message = lambda *_: answered.set()

    def ping() -> float:
        answered.clear()
        began = time.perf_counter()
        client.publish(brokers.QUERY, PAYLOAD, qos=1)
        if not answered.wait(5):
            raise RuntimeError("echo: no answer within 5 s")
        return 1e6 * (time.perf_counter() - began)

    try:
        yield ping
    finally:
        client.disconnect()
        client.loop_stop()
        process.stdin.close()
        process.wait()


def _processor_s(pid: int) -> float:
    """Seconds that a process has had the processor, to the nanosecond."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@app.command()
def main(
    results: Results = RESULTS,
    part: Annotated[list[str], typer.Option(help=f"One of {', '.join(PARTS)}; repeatable.")] = [],  # noqa: B006
    label: Annotated[str, typer.Option(help="Name of the report.")] = "embedded",
) -> None:
    """Attack the embedded broker on loopback, and write what was measured."""
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (8_192, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    measures = {"floods": floods, "silent": silent, "fleet": fleet, "echo": echo}
    report: dict[str, Any] = {"commit": commit()}
    for name in part or PARTS:
        report[name] = measures[name]()
        typer.echo(f"{name}: {report[name]}")
    write_atomic(results / f"broker-{label}.json", orjson.dumps(report, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    app()
