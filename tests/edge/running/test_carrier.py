"""Slow, silent, wrong and hostile clients: they are bounded, and stop no other."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.mqtt.certificates import self_signed
from edge_sdk import EdgeAgent
from edge_sdk.errors import ConfigurationError
from edge_sdk.service import exchange
from edge_sdk.service.carrier import BodyMemory, Carrier
from edge_sdk.service.guard import Guard
from edge_sdk.service.listening import connect_in, listen_in
from edge_sdk.service.local_exchange import LocalExchange, read_head
from edge_sdk.service.messages import Request, RequestError, Response, json_response
from edge_sdk.service.service import BESIDE_INFERENCES, AgentService
from edge_sdk.settings_file.serve_table import ServeTable
from tests.edge.running.conftest import INFER, SAMPLES, Site, call, described
from tests.waiting import wait_until

DOORS = ["http", "local"]
CONNECTIONS = 4


def connected(site: Site, door: str) -> socket.socket:
    """A bare socket to that door."""
    if door == "http":
        return socket.create_connection(("127.0.0.1", site.port), 20)
    bare = socket.socket(socket.AF_UNIX)
    bare.settimeout(20)
    bare.connect(str(site.state / "agent.sock"))
    return bare


def answer_to(site: Site, door: str, raw: bytes) -> bytes:
    """All that comes back until the agent closes the connection."""
    with closing(connected(site, door)) as bare:
        bare.sendall(raw)
        with contextlib.suppress(ConnectionResetError):
            return b"".join(iter(lambda: bare.recv(65_536), b""))
    return b""


@contextlib.contextmanager
def opened(state: Path, bundle: Path, table: ServeTable) -> Iterator[Site]:
    """Another service, with settings of its own."""
    with (
        AgentService(state, table) as service,
        EdgeAgent.from_bundle(bundle) as agent,
        service.answering(agent),
    ):
        yield Site(state, agent, service)


@pytest.fixture(scope="module")
def small(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A service with few places."""
    table = ServeTable(address="127.0.0.1:0", connections=CONNECTIONS)
    with opened(tmp_path_factory.mktemp("small"), bundle, table) as site:
        yield site


HOST = b"Host: localhost\r\n"


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),  # TLS
        (b"GET /v2\r\n\r\n", b"400"),
        (b"GET /v2 HTTP/1.1\r\n" + HOST + b"no colon\r\n\r\n", b"400"),
        (b"GET /v2 HTTP/1.1\r\n" + HOST + b"Content-Length: -1\r\n\r\n", b"400"),
        (
            b"GET /v2 HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
            b"400",
        ),
        (b"GET /v2 HTTP/1.1\r\n" + HOST + b"x: " + b"y" * 100_000 + b"\r\n\r\n", b"431"),
        (b"POST /v2 HTTP/1.1\r\n" + HOST + b"Content-Length: 99999999\r\n\r\n", b"413"),
        (b"GET /v2 HTTP/1.0\r\n" + HOST + b"\r\n", b"200"),
        (b"GET /v2?a=b HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n", b"200"),
    ],
)
def test_what_is_no_request_is_refused_and_the_connection_closed(
    site: Site, door: str, raw: bytes, status: bytes
) -> None:
    assert answer_to(site, door, raw).split(b" ")[1] == status


def test_chunks_are_read_from_the_network_and_refused_on_the_socket(site: Site) -> None:
    head = b"POST /v2/repository/index HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n"
    raw = head + b"Connection: close\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    assert b"READY" in answer_to(site, "http", raw)
    assert b"411 Length Required" in answer_to(site, "local", raw)


@pytest.mark.parametrize("door", DOORS)
def test_many_requests_take_one_connection(site: Site, door: str) -> None:
    with closing(site.connect(door)) as connection:
        for _ in range(3):
            assert call(connection, "POST", INFER, described(SAMPLES)).status == 200
            assert call(connection, "GET", "/v2/health/ready").status == 200
            assert call(connection, "GET", "/nothing").status == 404


@pytest.mark.parametrize("door", DOORS)
def test_requests_in_one_packet_are_answered_in_turn(site: Site, door: str) -> None:
    one = b"GET /v2/health/live HTTP/1.1\r\n" + HOST + b"\r\n"
    last = b"GET /v2/health/live HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
    assert answer_to(site, door, one + one + last).count(b'{"live":true}') == 3


@pytest.mark.parametrize("door", DOORS)
def test_a_request_of_head_gets_the_headers_alone(site: Site, door: str) -> None:
    asked = b"HEAD /v2/health/live HTTP/1.1\r\n" + HOST + b"\r\n"
    last = b"GET /v2/health/live HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
    wrong = b"GET /v2\r\n\r\n"  # its answer has a body again
    assert answer_to(site, door, asked + wrong).endswith(b"}")
    first, second, body = answer_to(site, door, asked + last).split(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 ")
    assert b"content-length: " in first.lower()
    assert second.startswith(b"HTTP/1.1 200 ")
    assert body == b'{"live":true}'


def test_silent_clients_give_way_to_others(small: Site) -> None:
    with ExitStack() as silent:
        for _ in range(4 * CONNECTIONS):
            bare = silent.enter_context(closing(connected(small, "http")))
            with contextlib.suppress(OSError):  # it may have given way already
                bare.sendall(b"GET /v2 HT")
        for _ in range(3):
            assert small.call("POST", INFER, described(SAMPLES)).status == 200


def test_clients_that_do_not_read_give_way_to_others(site: Site) -> None:
    body = described(np.tile(SAMPLES, (200, 1, 1, 1)))  # its answer is longer than a socket holds
    lines = [f"POST {INFER} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    raw = "\r\n".join([*lines, "", ""]).encode() + body
    with ExitStack() as deaf:
        for _ in range(ServeTable().in_flight + BESIDE_INFERENCES + 1):
            deaf.enter_context(closing(connected(site, "local"))).sendall(raw)
        assert site.call("GET", "/v2/health/ready", door="local").status == 200


@contextlib.contextmanager
def carrying(state: Path, answer: Callable[[Request], Response]) -> Iterator[Path]:
    """A carrier of two places on the socket in a state folder."""
    with (
        listen_in(state) as listening,
        Carrier(
            listening,
            exchange=LocalExchange,
            check=lambda _: None,
            limit=lambda _: 100,
            answer=answer,
            connections=2,
        ),
    ):
        yield state


def asked(state: Path) -> socket.socket:
    """A connection with one request on its way."""
    bare = connect_in(state)
    assert bare is not None
    bare.settimeout(20)
    bare.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
    return bare


@pytest.mark.deadline
def test_a_client_waits_while_all_places_are_being_answered(tmp_path: Path) -> None:
    entered, go_on = threading.Semaphore(0), threading.Event()

    def answer(request: Request) -> Response:
        entered.release()
        assert go_on.wait(20)
        return json_response(request.path)

    with carrying(tmp_path, answer) as state, ExitStack() as clients:
        bare = [clients.enter_context(closing(asked(state))) for _ in range(5)]
        assert all(entered.acquire(timeout=20) for _ in range(2))
        assert not entered.acquire(blocking=False)
        go_on.set()
        for each in bare:
            assert each.recv(65_536).startswith(b"HTTP/1.1 200 OK")


def test_clients_beyond_the_places_are_all_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # longer than any pause of a busy machine: whoever sends and reads is never cut off
    monkeypatch.setattr("edge_sdk.service.carrier.GRACE_S", 20.0)

    def ask(_: int) -> bytes:
        with closing(asked(state)) as bare:
            return b"".join(iter(lambda: bare.recv(65_536), b""))

    with (
        carrying(tmp_path, lambda request: json_response(request.path)) as state,
        ThreadPoolExecutor(8) as clients,
    ):
        assert all(each.endswith(b'"/"') for each in clients.map(ask, range(100)))


@pytest.mark.deadline
def test_a_carrier_closes_while_a_client_waits_for_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_sdk.service.carrier.CLOSE_S", 0.1)
    entered, go_on, answered = threading.Semaphore(0), threading.Event(), threading.Event()

    def answer(request: Request) -> Response:
        entered.release()
        go_on.wait(20)
        answered.set()
        return json_response(request.path)

    with ExitStack() as clients:
        with carrying(tmp_path, answer) as state:
            bare = [clients.enter_context(closing(asked(state))) for _ in range(3)]
            assert all(entered.acquire(timeout=20) for _ in range(2))
        assert not answered.is_set()
        go_on.set()
        with contextlib.suppress(ConnectionResetError):
            assert bare[2].recv(65_536) == b""


def descriptors() -> int:
    """Number of files that this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.deadline
def test_descriptors_stay_bounded(small: Site) -> None:
    before = descriptors()
    with ExitStack() as clients:
        for _ in range(50):
            clients.enter_context(closing(connected(small, "http")))
        # of each connection this process holds both ends: 50 of the clients, few of the agent
        wait_until(
            lambda: descriptors() <= before + 50 + CONNECTIONS + 1,
            lambda: f"{before} descriptors before, {descriptors()} now",
        )
    assert small.call("GET", "/v2/health/live").status == 200


@pytest.mark.deadline
@pytest.mark.parametrize("door", DOORS)
def test_head_and_body_that_never_end_are_cut_off(
    site: Site, door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("local_exchange", "network_exchange"):
        for limit in ("HEAD_S", "BODY_S"):
            monkeypatch.setattr(f"edge_sdk.service.{module}.{limit}", 0.2)
    head = b"POST /v2/repository/index HTTP/1.1\r\n" + HOST
    for raw in (head, head + b"Content-Length: 2\r\n\r\n{"):
        assert answer_to(site, door, raw) == b""


def test_bodies_share_a_bounded_memory() -> None:
    memory = BodyMemory(100)
    with memory.held() as grow:
        grow(60)
        with memory.held() as other, pytest.raises(RequestError) as refused:
            other(41)
        assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
        with memory.held() as other:
            other(40)
    with memory.held() as again:
        again(100)


# web pages, secrets, https


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"Origin": "http://evil.example"}, "web pages may not ask"),
        ({"Origin": "null"}, "web pages may not ask"),
        ({"Sec-Fetch-Site": "same-origin"}, "web pages may not ask"),
        ({"Host": "evil.example"}, "expected localhost or a loopback address"),
        ({"Host": "127.0.0.1.evil.example:80"}, "expected localhost"),
        ({"Host": "localhost.evil.example"}, "expected localhost"),
        ({"Host": "10.0.0.1"}, "expected localhost"),
    ],
)
def test_web_pages_are_refused(site: Site, headers: dict[str, str], message: str) -> None:
    for method, path in (("GET", "/v2/health/ready"), ("POST", INFER)):
        answer = site.call(method, path, b"{}" if method == "POST" else None, headers)
        assert answer.status == 403
        assert message in answer.error


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "127.0.0.1", "127.9.9.9:1", "[::1]:8"]
)
def test_names_of_loopback_are_taken(host: str) -> None:
    Guard().check(exchange.Head("GET", "/v2", {"host": host}))


def test_secret_is_made_kept_and_asked_for(bundle: Path, tmp_path: Path) -> None:
    table = ServeTable(address="127.0.0.1:0", secret=Path("key.txt"))
    with opened(tmp_path, bundle, table) as site:
        assert site.service.new_secret == tmp_path / "key.txt"
        assert (tmp_path / "key.txt").stat().st_mode & 0o777 == 0o600
        secret = (tmp_path / "key.txt").read_text().strip()
        body = described(SAMPLES[:1])
        for wrong in ({}, {"Authorization": "Bearer x"}, {"Authorization": f"Basic {secret}"}):
            refused = site.call("POST", INFER, body, wrong)
            assert refused.status == 401
            assert "Authorization: Bearer SECRET" in refused.error
            assert secret not in refused.error
        good = {"Authorization": f"Bearer {secret}"}
        assert site.call("POST", INFER, body, good).status == 200
        assert site.call("GET", "/v2/health/ready").status == 200  # a probe needs none
        assert site.call("POST", INFER, body, door="local").status == 200  # nor does its owner
    with opened(tmp_path, bundle, table) as site:
        assert site.service.new_secret is None
        assert site.call("POST", INFER, body, good).status == 200


@pytest.mark.parametrize("text", ["short", "", "two words of enough characters"])
def test_file_that_holds_no_secret_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "key.txt").write_text(text)
    table = ServeTable(address="127.0.0.1:0", secret=Path("key.txt"))
    with (
        pytest.raises(ConfigurationError, match=r"key\.txt: expected one line of at least 16"),
        AgentService(tmp_path, table),
    ):
        pass


def test_https_on_every_address_with_a_secret(bundle: Path, tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path)
    table = ServeTable(
        address="0.0.0.0:0", cert=cert, key=key, secret=Path("key.txt"), connections=CONNECTIONS
    )
    with opened(tmp_path, bundle, table) as site, ExitStack() as silent:
        # clients that never begin with TLS hold no place
        for _ in range(3 * CONNECTIONS):
            silent.enter_context(closing(connected(site, "http")))
        secret = (tmp_path / "key.txt").read_text().strip()
        context = ssl.create_default_context(cafile=cert)
        with (
            closing(socket.create_connection(("127.0.0.1", site.port), 20)) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secure,
        ):
            request = (
                f"GET /v2 HTTP/1.1\r\nHost: pi.example\r\nAuthorization: Bearer {secret}\r\n\r\n"
            )
            secure.sendall(request.encode())
            assert secure.recv(65_536).startswith(b"HTTP/1.1 200 OK")
        # plain HTTP is no TLS: the connection ends without an answer
        assert (
            answer_to(site, "http", b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")[:4] != b"HTTP"
        )


def test_wrong_certificates_and_taken_ports_are_told(
    bundle: Path, site: Site, tmp_path: Path
) -> None:
    cert, key = self_signed(tmp_path)
    (tmp_path / "empty.pem").touch()
    for table, message in [
        (ServeTable(address=f"127.0.0.1:{site.port}"), "Address already in use"),
        (ServeTable(address="203.0.113.1:80", insecure=True), "cannot listen there"),
        (ServeTable(address="127.0.0.1:0", cert=Path("no.pem"), key=key), "cannot be read"),
        (ServeTable(address="127.0.0.1:0", cert=cert, key=Path("empty.pem")), "and its own key"),
    ]:
        with pytest.raises(ConfigurationError, match=message), AgentService(tmp_path, table):
            pass


# the socket in the state folder


def test_socket_is_its_owner_s_replaces_a_stale_one_and_goes(tmp_path: Path) -> None:
    state = tmp_path / ("deep" * 40) / ("er" * 60)  # longer than a socket's name may be
    state.mkdir(parents=True)
    stale = tmp_path / "stale"
    with closing(socket.socket(socket.AF_UNIX)) as left:
        left.bind(str(stale))
    stale.rename(state / "agent.sock")
    assert connect_in(state) is None
    with listen_in(state) as listening:
        assert (state / "agent.sock").stat().st_mode & 0o777 == 0o600
        asked = connect_in(state)
        assert asked is not None
        with closing(asked):
            accepted, _ = listening.accept()
            accepted.close()
    assert list(state.iterdir()) == []
    (state / "agent.sock").write_text("no socket")
    assert connect_in(state) is None
    assert connect_in(tmp_path / "nowhere") is None


NAME = st.text("abcXYZ-", min_size=1, max_size=10).filter(
    lambda name: name.lower() not in ("content-length", "host", "transfer-encoding")
)
VALUE = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)


@given(st.dictionaries(NAME, VALUE, max_size=10), st.sampled_from(["GET", "POST"]))
def test_heads_are_read_as_they_were_written(headers: dict[str, str], method: str) -> None:
    lines = [f"{method} /v2/x?q=1 HTTP/1.1", *(f"{name}: {text}" for name, text in headers.items())]
    head = read_head("\r\n".join(lines).encode())
    assert (head.method, head.path) == (method, "/v2/x")
    expected = {name.lower(): text.strip(" \t") for name, text in headers.items()}
    assert head.headers == expected


@given(st.binary(max_size=300))
def test_no_bytes_escape_as_another_error(raw: bytes) -> None:
    """FAULTS row 26."""
    with contextlib.suppress(RequestError):
        read_head(raw)


def test_a_request_that_ends_its_connection_in_a_roundabout_way_is_no_failure(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    raw = b"GET /v2 HTTP/1.1\r\n" + HOST + b"Connection: keep-alive, close\r\n\r\n"
    assert answer_to(site, "http", raw).startswith(b"HTTP/1.1 ")
    assert not caplog.records
