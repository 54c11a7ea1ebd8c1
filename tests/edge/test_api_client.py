"""The HTTP client of a device before servers that are slow, wrong or hostile."""

from __future__ import annotations

import contextlib
import gzip
import os
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import orjson
import pytest

from benchmarks.mqtt.certificates import self_signed
from edge_sdk import EdgeAgent, api, enroll
from edge_sdk.errors import ConfigurationError, EnrolmentError, FrameError, LinkError, StorageError
from edge_sdk.http import HttpClient, Timeout
from edge_sdk.identity import Identity
from edge_sdk.offload.offloader import Offloader
from edge_sdk.offload.pending import NoReply, Target
from edge_sdk.wire.answers import HEADER_LENGTH
from edge_sdk.wire.broker_address import BrokerAddress
from edge_sdk.wire.frames import Tensor
from edge_sdk.wire.messages import Problem, Query, Reply
from profiles import load_reference
from server.tokens import create_token
from tests.edge.full_disk import read_only

if TYPE_CHECKING:
    from tests.edge.fleet import Fleet

TENSOR = Tensor("x", np.zeros((1, 4), np.float32))
QUERY = Query("0" * 32, "digits", "1", TENSOR, 5e3)
PI = load_reference("raspberry-pi-4")

Write = Callable[[bytes], object]


class Peer:
    """An HTTP server that sends what the test says, byte by byte, on any request."""

    def __init__(self, respond: Callable[[Write], object]) -> None:
        self.connections = 0
        self.hang_up = False  # after an answer
        self.requests: list[bytes] = []
        self._respond = respond
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with peer:
                try:
                    self._serve(peer)
                except OSError:
                    continue  # the device hung up

    def _serve(self, peer: socket.socket) -> None:
        peer.settimeout(5)
        raw = b""
        while piece := peer.recv(65536):
            raw += piece
            head, end, body = raw.partition(b"\r\n\r\n")
            _, _, after = head.lower().partition(b"content-length: ")
            length = int(after.split(b"\r\n")[0] or b"0")
            if end and len(body) >= length:
                self.requests.append(raw)
                raw = b""
                self._respond(peer.sendall)
                if self.hang_up:
                    return


Serve = Callable[[Callable[[Write], object]], Peer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a peer that responds as told."""
    peers: list[Peer] = []

    def start(respond: Callable[[Write], object]) -> Peer:
        peers.append(Peer(respond))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


def response(status: int, body: bytes = b"", *fields: str) -> bytes:
    head = [f"HTTP/1.1 {status} Word", f"Content-Length: {len(body)}", *fields, "", ""]
    return "\r\n".join(head).encode() + body


def identity_at(peer: Peer, credential: str = "secret") -> Identity:
    return Identity(peer.url, "pi-4", "default", credential)


def infer(peer: Peer, timeout_s: float = 5.0) -> Reply:
    return api.infer(identity_at(peer), QUERY, time.monotonic() + timeout_s)


def test_bytes_of_both_bodies_are_counted(serve: Serve) -> None:
    body = b'{"error": "not now"}'
    peer = serve(lambda write: write(response(502, body)))
    counted: list[tuple[int, int]] = []
    deadline = time.monotonic() + 5
    with pytest.raises(LinkError):
        api.infer(identity_at(peer), QUERY, deadline, lambda up, down: counted.append((up, down)))
    [request] = peer.requests
    assert counted == [(len(request.partition(b"\r\n\r\n")[2]), 0), (0, len(body))]


@pytest.mark.parametrize("status", [401, 403, 502])
def test_what_may_pass_is_no_answer(serve: Serve, status: int) -> None:
    peer = serve(lambda write: write(response(status, b'{"error": "not now"}')))
    with pytest.raises(LinkError, match=f"not now .HTTP {status}."):
        infer(peer)


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        (400, Problem.FAILED),
        (404, Problem.UNKNOWN_MODEL),
        (429, Problem.OVERLOADED),
        (500, Problem.FAILED),
        (503, Problem.NOT_READY),
        (504, Problem.EXPIRED),
    ],
)
def test_what_the_server_says_of_a_query_keeps_its_word(
    serve: Serve, status: int, problem: Problem
) -> None:
    assert infer(serve(lambda write: write(response(status)))).problem is problem


@pytest.mark.parametrize("length", ["many", "-1", "9" * 5000])
def test_a_header_length_that_is_no_number_is_a_bad_frame(serve: Serve, length: str) -> None:
    peer = serve(lambda write: write(response(200, b"{}", f"{HEADER_LENGTH}: {length}")))
    with pytest.raises(FrameError, match="expected a number of bytes"):
        infer(peer)


def test_an_endless_answer_is_cut(serve: Serve) -> None:
    sent = 0

    def respond(write: Write) -> None:
        nonlocal sent
        write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            write(bytes(65536))
            sent += 65536

    peer = serve(respond)
    with pytest.raises(LinkError, match=f"at most {api.JSON_BYTES} bytes"):
        api.locate_broker(identity_at(peer))
    assert sent < api.JSON_BYTES + 16_000_000  # what the sockets' buffers took on top


def test_a_broker_whose_url_cannot_be_one_is_no_answer(serve: Serve, tmp_path: Path) -> None:
    body = b'{"broker": {"url": "mqtt://hub.example:port"}}'
    peer = serve(lambda write: write(response(200, body)))
    with pytest.raises(LinkError, match="broker URL: expected mqtt://HOST:PORT"):
        api.locate_broker(identity_at(peer), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_address_that_the_disk_does_not_keep_is_warned_of_once(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = b'{"broker": {"url": "mqtt://hub.example:1883"}}'
    peer = serve(lambda write: write(response(200, body)))
    with read_only(tmp_path):
        known = api.FleetBroker.known(tmp_path, identity_at(peer))
        for _ in range(3):
            found = api.locate_broker(identity_at(peer), tmp_path)
    assert (known.broker, found.broker) == ("mqtt://127.0.0.1:1883", "mqtt://hub.example:1883")
    (warned,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert f"{api.CONNECTION_NAME}: cannot be read ([Errno 2]" in warned


@pytest.mark.deadline
def test_an_answer_that_dribbles_ends_soon_after_the_deadline(serve: Serve) -> None:
    def respond(write: Write) -> None:
        write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(1000):
            write(b" ")
            time.sleep(0.02)

    start = time.monotonic()
    with pytest.raises(LinkError, match="expected the whole answer within"):
        infer(serve(respond), timeout_s=0.3)
    assert time.monotonic() - start < 0.9  # the deadline, one read of as long, and some


def test_nothing_is_unpacked(serve: Serve) -> None:
    bomb = gzip.compress(bytes(10_000_000))
    peer = serve(lambda write: write(response(200, bomb, "Content-Encoding: gzip")))
    with pytest.raises(LinkError, match="names no broker"):
        api.locate_broker(identity_at(peer))
    assert b"accept-encoding: identity" in peer.requests[0].lower()


@pytest.mark.deadline
def test_an_answer_that_breaks_off_is_no_answer(serve: Serve) -> None:
    peer = serve(lambda write: write(response(200, bytes(100))[:-1]))
    peer.hang_up = True
    with HttpClient() as client, pytest.raises(LinkError, match="the answer broke off"):
        client.request("GET", peer.url, timeout=Timeout(total_s=5.0), at_most=1000)


def test_another_port_than_the_api_s_is_told(fleet: Fleet, tmp_path: Path) -> None:
    at_broker = f"http://127.0.0.1:{fleet.broker_port}"
    at_api = fleet.http.replace("http://", "https://")
    for url, advice in [
        (at_broker, "is this the address of the API, and not of the broker?"),
        (at_api, "is it an http:// address, without TLS?"),
    ]:
        with pytest.raises(LinkError) as refused:
            enroll(url, "token", tmp_path / "pi", profile=PI)
        assert advice in str(refused.value)
        assert not set("'()") & set(str(refused.value).partition(" (")[2].rpartition(")")[0])


def test_a_certificate_that_is_not_trusted_is_told(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path, by_address=False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def refuse_handshakes() -> None:
            for _ in range(2):
                peer, _ = listening.accept()
                with contextlib.suppress(OSError), context.wrap_socket(peer, server_side=True):
                    pass

        server = threading.Thread(target=refuse_handshakes, daemon=True)
        server.start()
        port = listening.getsockname()[1]
        for host, ca, advice in [
            ("localhost", None, "certificate to this device and give --ca FILE to `agent enroll`"),
            ("127.0.0.1", cert, "use an address that the certificate names"),
        ]:
            with pytest.raises(LinkError) as refused:
                enroll(f"https://{host}:{port}", "token", tmp_path / "pi", profile=PI, ca=ca)
            assert advice in str(refused.value)
        server.join()


@pytest.mark.deadline
def test_a_redirect_is_not_followed(serve: Serve) -> None:
    peer = serve(lambda write: write(response(302, b"", "Location: /elsewhere")))
    with HttpClient() as client:
        answer = client.request("GET", peer.url, timeout=Timeout(total_s=5.0), at_most=1000)
    assert (answer.status, len(peer.requests)) == (302, 1)


@pytest.mark.deadline
@pytest.mark.parametrize(("repeatable", "sent"), [(True, 3), (False, 2)])
def test_what_may_arrive_twice_outlives_the_end_of_an_idle_connection(
    serve: Serve, repeatable: bool, sent: int
) -> None:
    def respond(write: Write) -> None:
        if len(peer.requests) == 2:
            raise ConnectionError("the server gives this connection up as the request arrives")
        write(response(202))

    def post() -> int:
        return client.request(
            "POST", peer.url, timeout=Timeout(total_s=5.0), at_most=9, repeatable=repeatable
        ).status

    peer = serve(respond)
    with HttpClient() as client:
        assert post() == 202
        if repeatable:
            assert post() == 202
        else:
            with pytest.raises(LinkError, match="cannot be reached"):
                post()
    assert len(peer.requests) == sent


@pytest.mark.deadline
def test_a_server_that_hangs_up_at_once_is_asked_once(serve: Serve) -> None:
    peer = serve(lambda _: None)
    peer.hang_up = True
    with HttpClient() as client, pytest.raises(LinkError, match="cannot be reached"):
        client.request("GET", peer.url, timeout=Timeout(total_s=5.0), at_most=9, repeatable=True)
    assert len(peer.requests) == 1


def test_the_link_is_measured_over_one_connection(serve: Serve) -> None:
    peer = serve(lambda write: write(response(200, b"ping")))
    with api.Echo(identity_at(peer)) as echo:
        for _ in range(5):
            echo(b"ping")
    assert (peer.connections, len(peer.requests)) == (1, 5)


@pytest.mark.deadline
def test_whatever_goes_wrong_over_http_ends_the_wait(free_port: int) -> None:
    # a header field may not hold a line break: http.client raises a ValueError, which is not ours
    identity = Identity(f"http://127.0.0.1:{free_port}", "pi-4", "default", "a\nb")
    offloader = Offloader(identity, BrokerAddress("127.0.0.1", free_port), max_packet_bytes=1)
    try:
        offloader._availability.query_answered()
        start = time.monotonic()
        pending = offloader.begin(lambda: TENSOR, Target("digits", "1"), 10.0)
        outcome = offloader.finish(pending)
    finally:
        offloader.close()
    assert time.monotonic() - start < 5
    assert isinstance(outcome, NoReply)
    assert "Invalid header value" in outcome.reason


def test_enrolling_by_name_then_opening_an_agent(fleet: Fleet, tmp_path: Path) -> None:
    state = tmp_path / "pi"
    identity = enroll(fleet.http, create_token(fleet.state), str(state), profile=PI, name="lib")
    assert identity.device == "lib"
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    with EdgeAgent.open(state) as agent:
        assert agent.status().device == "lib"
    with pytest.raises(ConfigurationError, match="enrolled there already"):
        enroll(fleet.http, "t", state, profile=PI)


def test_a_folder_that_cannot_be_written_costs_no_token(fleet: Fleet, tmp_path: Path) -> None:
    token = create_token(fleet.state)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        enroll(fleet.http, token, tmp_path / "file" / "pi", profile=PI, name="clumsy")
    assert enroll(fleet.http, token, tmp_path / "pi", profile=PI, name="clumsy").device == "clumsy"


@pytest.mark.parametrize("content", [None, b"", b"no certificate"])
def test_an_authority_file_that_is_none_costs_no_token(
    serve: Serve, tmp_path: Path, content: bytes | None
) -> None:
    peer = serve(lambda write: write(response(500)))
    if content is not None:
        (tmp_path / "hub.pem").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"hub.pem: cannot be used.*name a PEM file"):
        enroll(peer.url, "t", tmp_path / "pi", profile=PI, ca=tmp_path / "hub.pem")
    assert peer.requests == []
    assert not (tmp_path / "pi").exists()


def test_an_answer_without_an_identity_is_said_and_leaves_nothing(
    serve: Serve, tmp_path: Path
) -> None:
    body = orjson.dumps({"root": "{}", "device": "pi"})
    peer = serve(lambda write: write(response(201, body)))
    with pytest.raises(EnrolmentError, match="names no usable identity"):
        enroll(peer.url, "t", tmp_path / "pi", profile=PI)
    assert not os.path.lexists(tmp_path / "pi")


@pytest.mark.deadline
def test_after_the_token_is_spent_the_device_is_enrolled_whatever_fails(
    serve: Serve, tmp_path: Path
) -> None:
    """The link cannot be measured, nor a bundle be fetched: both are told, and how to go on."""
    broker = {"url": "mqtt://127.0.0.1:1", "max_packet_bytes": 1000}
    body = {"root": "{}", "device": "pi", "fleet": "default", "credential": "c", "broker": broker}
    answers = [response(201, orjson.dumps(body))]

    def respond(write: Write) -> None:
        write(answers.pop() if answers else response(500, b'{"error": "down"}'))

    command = [sys.executable, "-P", "-m", "edge_sdk.cli", "agent", "enroll", "--token", "t"]
    command += ["--server", serve(respond).url, "--state", str(tmp_path / "pi")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    warning, error = done.stderr.strip().splitlines()
    assert warning.startswith("warning: the link was not measured: ")
    assert error.startswith("error: enrolled as pi, but without a bundle: update: ")
    assert error.endswith("then run `splitedge agent update`")
    assert Identity.load(tmp_path / "pi").device == "pi"
