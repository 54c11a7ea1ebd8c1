"""A device beside attackers: its round trips, the server's memory, and how soon sockets are closed.

The parts stand in tests of their own, with sharper limits; this one makes the figures.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from benchmarks.mqtt import attacks
from benchmarks.mqtt.certificates import self_signed
from server.processes import ServerProcess

TRIPS = 400
ATTACK_S = 5.0
SILENT = 1_000
REQUEST = b"GET /v2/health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@dataclass(frozen=True)
class Beside:
    """Figures of a device beside one attack.

    Attributes:
        calm_ms, p99_ms: 99th percentile of its round trips before and meanwhile.
        growth_mb: of the attacked process at its highest.
        closed_s: until the last silent socket was closed; None where none is silent.
    """

    calm_ms: float
    p99_ms: float
    growth_mb: float
    closed_s: float | None = None

    @property
    def met(self) -> bool:
        """Whether others are within 20 %, sockets closed in 10 s, memory bounded."""
        return (
            self.p99_ms <= 1.2 * self.calm_ms
            and self.growth_mb < 64
            and (self.closed_s is None or self.closed_s <= 10)
        )

    def __str__(self) -> str:
        closed = "" if self.closed_s is None else f", closed in {self.closed_s:.1f} s"
        p99 = f"p99 {self.calm_ms:.1f} to {self.p99_ms:.1f} ms"
        return f"{p99}, {self.growth_mb:+.0f} MB{closed}"


def beside(
    trip: Callable[[], float],
    pid: int,
    attack: Callable[[], contextlib.AbstractContextManager[int]],
) -> Beside:
    """Figures of a device, by its round trip in ms, under an attack on a process."""
    process = psutil.Process(pid)
    calm = attacks.quantile([trip() for _ in range(TRIPS)], 0.99)
    before = highest = process.memory_info().rss
    with attack():
        trips, end = [], time.monotonic() + ATTACK_S
        while time.monotonic() < end:
            trips.append(trip())
            highest = max(highest, process.memory_info().rss)
    return Beside(calm, attacks.quantile(trips, 0.99), (highest - before) / 1e6)


@contextmanager
def flooding(kind: str, port: int) -> Iterator[int]:
    """A process that floods with one kind of packet."""
    until = time.time() + ATTACK_S + 3
    words = (kind, port, attacks.SECRET, until)
    process = multiprocessing.get_context("spawn").Process(target=attacks.flood, args=words)
    process.start()
    time.sleep(1.5)  # it starts
    yield 0
    process.terminate()
    process.join()


@contextmanager
def stuck(port: int) -> Iterator[int]:
    """A device that subscribes, is sent 40 MB, and reads nothing."""
    with attacks.log_in(port, "pi-1") as deaf, attacks.log_in(port, "backend-2", "backend") as own:
        topic = attacks.text("splitedge/v1/lab/pi-1/reply")
        deaf.sendall(attacks.packet(0x82, b"\x00\x01" + topic + b"\x00"))
        deaf.recv(5)
        own.settimeout(2)
        with contextlib.suppress(OSError):
            for _ in range(40):
                own.sendall(attacks.packet(0x30, topic + bytes(1_000_000)))
        yield 0


def silent_sockets(trip: Callable[[], float], pid: int, port: int) -> Beside:
    """Figures beside a thousand sockets that say nothing."""
    with contextlib.ExitStack() as sockets:
        opened: list[tuple[float, socket.socket]] = []

        @contextmanager
        def silence() -> Iterator[int]:
            for _ in range(SILENT):
                sock = sockets.enter_context(socket.create_connection(("127.0.0.1", port)))
                opened.append((time.monotonic(), sock))
            yield 0

        found = beside(trip, pid, silence)
        closed_s = 0.0
        for at, sock in opened:
            sock.settimeout(max(0.01, at + 20 - time.monotonic()))
            with contextlib.suppress(OSError):
                while sock.recv(4_096):
                    pass
            closed_s = max(closed_s, time.monotonic() - at)
        return Beside(found.calm_ms, found.p99_ms, found.growth_mb, closed_s)


def http_trip(port: int, tls: ssl.SSLContext | None) -> Callable[[], float]:
    """Round trips of one client in ms, over a connection that stays."""
    sock: socket.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
    sock = sock if tls is None else tls.wrap_socket(sock, server_hostname="127.0.0.1")

    def trip() -> float:
        began = time.perf_counter()
        sock.sendall(REQUEST)
        answer = b""
        while b'"live":true' not in answer.replace(b" ", b""):
            part = sock.recv(4_096)
            assert part, "closed on an honest client"
            answer += part
        return 1_000 * (time.perf_counter() - began)

    return trip


def trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@pytest.mark.fault_figures
def test_a_device_is_served_beside_attackers(tmp_path: Path, reached: Callable[..., None]) -> None:
    """FAULTS row 22: floods, a stuck subscriber, silent sockets, over MQTT, HTTP and TLS."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (8_192, hard))
    pair = self_signed(tmp_path)
    found: dict[str, Beside] = {}
    for kind in ("PINGREQ", "PUBACK", "SUBSCRIBE", "UNSUBSCRIBE", "PUBLISH"):
        with attacks.embedded() as child:
            prober = attacks.Prober(child.port)
            assert child.pid is not None
            found[f"{kind} flood"] = beside(
                prober.round_trip_ms, child.pid, partial(flooding, kind, child.port)
            )
            prober.close()
    with attacks.embedded() as child:
        prober = attacks.Prober(child.port)
        assert child.pid is not None
        port = child.port
        found["stuck subscriber"] = beside(prober.round_trip_ms, child.pid, partial(stuck, port))
        found["silent, MQTT"] = silent_sockets(prober.round_trip_ms, child.pid, port)
        prober.close()
    for name, words, tls in (
        ("HTTP", (), None),
        ("HTTPS", ("--tls-cert", str(pair[0]), "--tls-key", str(pair[1])), trusting()),
    ):
        server = ServerProcess(tmp_path / name)
        server.start(("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0", *words))
        try:
            process = server._process
            assert process is not None
            port = int(server.http.rpartition(":")[2])
            trip = http_trip(port, tls)
            found[f"silent, {name}"] = silent_sockets(trip, process.pid, port)
        finally:
            server.stop()
    missed = sorted(name for name, figures in found.items() if not figures.met)
    reached(
        "bystanders",
        "; ".join(f"{name}: {figures}" for name, figures in found.items()),
        missed=len(missed),
    )
    assert not missed
