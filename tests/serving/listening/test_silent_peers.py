"""Peers that connect and say nothing, half of something, or that do not listen."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import urllib3
from fastapi import FastAPI, Request, Response

from server import http_connection
from server.http_connection import HEAD_S
from server.http_server import HttpServer
from server.listening.proof import prove_peer
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.conftest import Reached
    from tests.serving.listening.conftest import Certificate

pytestmark = pytest.mark.deadline

Serving = Callable[..., HttpServer]
HEAD = b"POST /body HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\n\r\n"


@pytest.fixture
def app() -> FastAPI:
    """An application with an answer at once, a body, a long poll and a long answer."""
    made = FastAPI()

    @made.get("/live")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @made.post("/body")
    async def body(request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    @made.get("/poll")
    async def poll(request: Request) -> dict[str, bool]:
        prove_peer(request.scope)
        await asyncio.sleep(1.5)
        return {"polled": True}

    @made.get("/long")
    async def long() -> Response:
        return Response(bytes(50_000_000))

    return made


def connect(server: HttpServer) -> socket.socket:
    """A plain connection."""
    host, _, port = server.url.partition("://")[2].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def ends_within(peer: socket.socket, timeout_s: float) -> bool:
    """Whether the server ends the connection in time; what it says before is thrown away."""
    peer.settimeout(timeout_s)
    end = time.monotonic() + timeout_s
    try:
        while peer.recv(65_536):
            if time.monotonic() > end:
                return False
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


@pytest.mark.parametrize("sent", [b"", b"GET /live HTTP/1.1\r\nHost: loc", HEAD + b"half"])
def test_peer_that_falls_silent_is_cut_off(serving: Serving, app: FastAPI, sent: bytes) -> None:
    """FAULTS row 22: before the head, within it and within the body."""
    server = serving(app)
    with connect(server) as peer:
        peer.sendall(sent)
        began = time.monotonic()
        assert ends_within(peer, 10)
        assert time.monotonic() - began > 0.8 * HEAD_S * 0.05  # it was given its time


@pytest.mark.parametrize("sent", [b"GET /live HTTP/1.1\r\n", HEAD])
def test_peer_that_drips_is_cut_off(serving: Serving, app: FastAPI, sent: bytes) -> None:
    """FAULTS row 22: each byte comes long before a silence would count."""
    server = serving(app)
    with connect(server) as peer:
        peer.sendall(sent)
        peer.setblocking(False)
        end = time.monotonic() + 10
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < end:
                time.sleep(0.05)
                peer.send(b"x")
                with contextlib.suppress(BlockingIOError):
                    if not peer.recv(1):
                        break
        assert time.monotonic() < end


def test_next_request_that_never_comes_whole_is_cut_off(serving: Serving, app: FastAPI) -> None:
    server = serving(app)
    with connect(server) as peer:
        peer.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in peer.recv(1000)
        peer.sendall(b"G")  # uvicorn's own limit of idle connections ends here
        assert ends_within(peer, 10)


def test_body_refused_early_and_never_sent_is_cut_off(serving: Serving, app: FastAPI) -> None:
    server = serving(app)
    with connect(server) as peer:
        peer.sendall(HEAD.replace(b"/body", b"/none"))
        assert b"404" in peer.recv(1000)
        peer.sendall(b"x")
        assert ends_within(peer, 10)


def test_peer_that_does_not_read_its_answer_is_cut_off(serving: Serving, app: FastAPI) -> None:
    """FAULTS row 22: its memory is given back."""
    server = serving(app)
    with connect(server) as peer:
        peer.sendall(b"GET /long HTTP/1.1\r\nHost: localhost\r\n\r\n")
        port = server._server._port
        assert port is not None
        wait_until(lambda: not port._open, "the connection is still open", 20)


def test_answer_that_is_read_slowly_is_sent_on(serving: Serving, app: FastAPI) -> None:
    """A link of 0.65 MB a turn takes 77 turns; a peer that reads nothing is cut off after 60."""
    server = serving(app)
    with connect(server) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        peer.sendall(b"GET /long HTTP/1.1\r\nHost: localhost\r\n\r\n")
        began, got = time.monotonic(), 0
        while got < 50_000_000:
            piece = peer.recv(65_536)
            assert piece, f"cut off after {got} bytes, {time.monotonic() - began:.1f} s"
            got += len(piece)
            time.sleep(max(0.0, began + got / 1.3e7 - time.monotonic()))


def test_slow_body_that_goes_on_is_read_whole(serving: Serving, app: FastAPI) -> None:
    """A link of 40 kB a turn takes longer than a silent peer has, and is served."""
    server = serving(app)
    with connect(server) as peer:
        peer.sendall(HEAD)
        for _ in range(20):
            time.sleep(0.05)
            peer.sendall(bytes(10_000))
        answer = b""
        while b'{"bytes":200000}' not in answer:
            piece = peer.recv(1000)
            assert piece, answer
            answer += piece


def test_long_body_has_a_deadline_as_a_whole(
    serving: Serving, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS row 22: at the least rate, 64 MB would hold their place for 18 hours."""
    monkeypatch.setattr(http_connection, "BODY_MOST_S", 20)
    server = serving(app)
    with connect(server) as peer:
        peer.sendall(HEAD.replace(b"200000", b"64000000"))
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 10:
                peer.sendall(bytes(10_000))  # worth 10 turns each time, by the rate alone
                time.sleep(0.05)
        assert 0.8 * 20 * 0.05 < time.monotonic() - began < 10


@pytest.mark.parametrize("tls", [False, True])
def test_long_polls_and_idle_connections_survive(
    serving: Serving, app: FastAPI, certificate: Certificate, *, tls: bool
) -> None:
    """A poll lasts 30 turns here, which is three times what a silent peer has."""
    server = serving(app, tls=tls)
    url = server.url.replace("127.0.0.1", "localhost")
    with urllib3.PoolManager(ca_certs=str(certificate.cert), retries=False) as pool:
        assert pool.request("GET", f"{url}/live").status == 200
        time.sleep(0.2)
        answer = pool.request("GET", f"{url}/poll")
        assert (answer.status, answer.json()) == (200, {"polled": True})
        assert pool.connection_from_url(url).num_connections == 1


def test_silent_tls_peers_and_those_in_a_handshake_are_cut_off(
    serving: Serving, app: FastAPI, certificate: Certificate
) -> None:
    """FAULTS row 22: the deadline counts before the handshake."""
    server = serving(app, tls=True)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    hello = certificate.context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        hello.do_handshake()
    said = outgoing.read()
    for words in (b"", said[:40], said):
        with connect(server) as peer:
            peer.sendall(words)
            assert ends_within(peer, 10), words


def test_clear_text_at_a_tls_port_is_refused(serving: Serving, app: FastAPI) -> None:
    server = serving(app, tls=True)
    with connect(server) as peer:
        peer.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        began = time.monotonic()
        assert ends_within(peer, 5)
        assert time.monotonic() - began < 0.4


def test_large_bodies_and_answers_pass_tls(
    serving: Serving, app: FastAPI, certificate: Certificate
) -> None:
    server = serving(app, tls=True)
    url = server.url.replace("127.0.0.1", "localhost")
    with urllib3.PoolManager(ca_certs=str(certificate.cert), retries=False) as pool:
        answer = pool.request("POST", f"{url}/body", body=bytes(20_000_000))
        assert answer.json() == {"bytes": 20_000_000}
        assert len(pool.request("GET", f"{url}/long").data) == 50_000_000


class LimitedServer:
    """`limited_server.py` as a process; `tick_s` is how long a second of its limits lasts.

    Attributes:
        url: where it listens. process: itself. log: what it wrote to standard error.
    """

    def __init__(
        self,
        log: Path,
        descriptors: int,
        certificate: Certificate | None = None,
        tick_s: float = 0.1,
    ) -> None:
        program = Path(__file__).with_name("limited_server.py")
        words = [sys.executable, "-P", str(program), str(descriptors), str(tick_s)]
        if certificate is not None:
            words += [str(certificate.cert), str(certificate.key)]
        self.log = log
        self._context = None if certificate is None else certificate.context
        with log.open("w") as stderr:
            self._child = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        assert self._child.stdout is not None
        self.url = self._child.stdout.readline().strip()
        self.process = psutil.Process(self._child.pid)

    def connect(self) -> socket.socket:
        """A plain connection."""
        port = int(self.url.rpartition(":")[2])
        return socket.create_connection(("127.0.0.1", port), timeout=10)

    def answers_within(self) -> float:
        """Seconds until a new client has its answer."""
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            peer = stack.enter_context(self.connect())
            if self._context is not None:
                peer = self._context.wrap_socket(peer, server_hostname="localhost")
                stack.enter_context(peer)
            peer.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert peer.recv(1000).startswith(b"HTTP/1.1 200")
        return time.monotonic() - began

    def end(self) -> None:
        """End it."""
        self._child.communicate("", timeout=20)


@pytest.mark.parametrize("tls", [False, True])
def test_more_silent_peers_than_descriptors_keep_nobody_out(
    tmp_path: Path, certificate: Certificate, *, tls: bool, thorough: bool, reached: Reached
) -> None:
    """FAULTS row 22: 1,100 silent or half-sent connections against a limit of 1,024."""
    tick_s = 1.0 if thorough else 0.1
    server = LimitedServer(tmp_path / "log", 1_024, certificate if tls else None, tick_s)
    try:
        before = server.process.memory_info().rss
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(server.connect()) for _ in range(1_100)]
            for peer in silent[::2]:
                with contextlib.suppress(ConnectionError):  # it gave way already
                    peer.sendall(b"\x16\x03\x01" if tls else b"GET /live HTTP/1.1\r\nHost: loc")
            times = []
            began = time.monotonic()
            while time.monotonic() - began < 9 * tick_s:
                times.append(server.answers_within())
                time.sleep(0.05)
            ends = [ends_within(peer, 10) for peer in silent]
            closed_s = time.monotonic() - began
        grown = server.process.memory_info().rss - before
    finally:
        server.end()
    reached(
        "silent-sockets-http",
        f"{'HTTPS' if tls else 'HTTP'}: the slowest answer after {max(times):.3f} s, all closed"
        f" after {closed_s:.1f} s, memory grown by {grown / 1e6:.0f} MB",
        slowest_answer_s=max(times),
        closed_s=closed_s,
        grown_bytes=grown,
    )
    assert not thorough or closed_s < 10
    assert max(times) < 1
    assert all(ends)
    assert grown < 40_000_000  # 313 kB each, as before, would be 240 MB
    log = server.log.read_text()
    assert len(log.splitlines()) < 30
    assert "Traceback" not in log


def test_machine_without_descriptors_is_said_once_a_second_and_passes(tmp_path: Path) -> None:
    """FAULTS row 22: the places are more than the descriptors that are left."""
    server = LimitedServer(tmp_path / "log", 200)
    try:
        with contextlib.ExitStack() as stack:
            server.process.rlimit(psutil.RLIMIT_NOFILE, (40, 200))
            for _ in range(60):
                stack.enter_context(server.connect())
            time.sleep(1)
        wait_until(lambda: "not accepted: Too many open files" in server.log.read_text(), "no log")
        server.process.rlimit(psutil.RLIMIT_NOFILE, (200, 200))
        assert server.answers_within() < 1
    finally:
        server.end()
    log = server.log.read_text()
    assert len(log) < 2_000
    assert "Traceback" not in log
