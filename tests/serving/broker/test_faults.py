"""What the embedded broker does with clients that are silent, stuck, slow or too many."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import random
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.mqtt.certificates import self_signed
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.mqtt.messages import Message, Will
from edge_sdk.wire.broker_address import BrokerAddress
from server.broker import sockets
from server.broker.channel import Channel
from server.broker.child import BrokerChild
from server.broker.core.broker import Broker, Event
from server.broker.core.limits import BrokerLimits
from server.broker.embedded import EmbeddedBroker
from server.broker.policy import Principal, credential_sha256
from server.listening.direct_loop import DirectLoop
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

SECRET = secrets.token_hex(32)
DEVICES = ("pi-1", "pi-2", "pi-3")


@pytest.fixture(scope="module")
def child() -> Iterator[BrokerChild]:
    running = BrokerChild()
    running.set_principal(Principal("backend", "backend", None, credential_sha256(SECRET)))
    for device in DEVICES:
        running.set_principal(Principal(device, "device", "lab", credential_sha256(SECRET)))
    running.start()
    yield running
    running.stop()


@pytest.fixture
def backend(child: BrokerChild) -> Iterator[MqttLink]:
    """Answers each query with the same bytes."""
    link = linked(child, "backend-1", username="backend")

    def echo(message: Message) -> None:
        link.publish(message.topic.replace("query", "reply"), message.payload)

    link.subscribe("splitedge/v1/+/+/query", echo)
    link.start()
    link.wait_connected(5)
    yield link
    link.stop()


@pytest.fixture
def hasty() -> Iterator[int]:
    """The port of a broker in this process, with short time limits."""
    with in_thread(BrokerLimits(connect_s=0.3, stall_s=1.0, outbound_bytes=32_000_000)) as port:
        yield port


@pytest.fixture
def hasty_tls() -> Iterator[int]:
    """The same with TLS; the context has no certificate, because no handshake gets that far."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with in_thread(BrokerLimits(connect_s=0.3), tls) as port:
        yield port


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost, which is its own authority, and its key."""
    return self_signed(tmp_path_factory.mktemp("certificate"))


@contextlib.contextmanager
def in_thread(limits: BrokerLimits, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Run a broker in an event loop of its own; its port."""
    listening: queue.SimpleQueue[int] = queue.SimpleQueue()
    over = asyncio.Event()
    loop = DirectLoop()

    async def serve() -> None:
        broker = EmbeddedBroker(limits)
        digest = credential_sha256(SECRET)
        broker.set_principal(Principal("backend", "backend", None, digest))
        broker.set_principal(Principal("pi-1", "device", "lab", digest))
        listening.put(await broker.listen("127.0.0.1", 0, tls))
        await over.wait()
        await broker.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    yield listening.get(timeout=10)
    loop.call_soon_threadsafe(over.set)
    thread.join()
    loop.close()


class Device:
    """A well-behaved device that asks and is answered."""

    def __init__(self, child: BrokerChild, name: str) -> None:
        self._topic = f"splitedge/v1/lab/{name}/query"
        self._answer = threading.Event()
        self._link = linked(child, name)
        self._link.subscribe(f"splitedge/v1/lab/{name}/reply", lambda _: self._answer.set())
        self._link.start()
        self._link.wait_connected(5)

    def round_trip_s(self) -> float:
        self._answer.clear()
        began = time.perf_counter()
        assert self._link.publish(self._topic, bytes(1_000))
        assert self._answer.wait(10)
        return time.perf_counter() - began

    def stop(self) -> None:
        self._link.stop()


def linked(child: BrokerChild, client_id: str, username: str | None = None) -> MqttLink:
    address = BrokerAddress("127.0.0.1", child.port)
    return MqttLink(address, client_id=client_id, username=username, password=SECRET)


def raw(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def logged_in(
    port: int, client_id: str, *, keep_alive_s: int = 60, username: str | None = None
) -> socket.socket:
    """A bare socket after its login, which then does nothing by itself."""
    sock = raw(port)
    sock.sendall(connect_packet(client_id, username or client_id, keep_alive_s))
    assert sock.recv(4) == b"\x20\x02\x00\x00"
    return sock


def connect_packet(client_id: str, username: str, keep_alive_s: int = 60) -> bytes:
    body = b"\x00\x04MQTT\x04\xc2" + keep_alive_s.to_bytes(2, "big")
    body += text(client_id) + text(username) + text(SECRET)
    return bytes((0x10, len(body))) + body


def subscribed(sock: socket.socket, topic: str) -> None:
    sock.sendall(subscribe_packet(topic))
    assert sock.recv(5) == b"\x90\x03\x00\x01\x01"


def subscribe_packet(topic: str) -> bytes:
    body = b"\x00\x01" + text(topic) + b"\x01"
    return bytes((0x82, len(body))) + body


def publish_packet(topic: str, payload: bytes) -> bytes:
    body = text(topic) + b"\x00\x01" + payload
    assert 128 <= len(body) < 2_097_152
    length = bytes((len(body) & 127 | 128, len(body) >> 7 & 127 | 128, len(body) >> 14))
    return b"\x32" + length + body


def text(value: str) -> bytes:
    return len(value).to_bytes(2, "big") + value.encode()


def ends_within(sock: socket.socket, limit_s: float) -> bool:
    """Whether the broker ends the connection in that time; reads what it sends."""
    sock.settimeout(limit_s)
    try:
        while sock.recv(65_536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


def received_until_the_end(sock: socket.socket) -> int:
    """Bytes the broker still sends before it ends the connection."""
    received = 0
    sock.settimeout(10)
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(1_000_000):
            received += len(part)
    return received


def memory_mb(child: BrokerChild) -> float:
    assert child.pid is not None
    resident: int = psutil.Process(child.pid).memory_info().rss
    return resident / 1e6


def test_a_thousand_silent_sockets_are_closed_and_hinder_no_device(
    child: BrokerChild, backend: MqttLink
) -> None:
    """FAULTS row 22."""
    before = memory_mb(child)
    with contextlib.ExitStack() as sockets:
        device = Device(child, "pi-1")
        sockets.callback(device.stop)
        silent = [sockets.enter_context(raw(child.port)) for _ in range(900)]
        slow = [sockets.enter_context(raw(child.port)) for _ in range(100)]
        began = time.monotonic()
        for sock in slow:  # half a login, and then no more
            sock.sendall(b"\x10\x40\x00\x04MQ")
        # no paho here: its select() takes no descriptor above 1,023
        sockets.enter_context(logged_in(child.port, "pi-2"))
        assert time.monotonic() - began < 2
        assert device.round_trip_s() < 2
        assert memory_mb(child) - before < 30
        assert all(ends_within(sock, 10) for sock in (*silent, *slow))
        assert 3 < time.monotonic() - began < 10
        device.round_trip_s()


def test_more_logins_than_allowed_close_the_oldest_at_once(child: BrokerChild) -> None:
    with contextlib.ExitStack() as sockets:
        oldest = sockets.enter_context(raw(child.port))
        for _ in range(1_000):
            sockets.enter_context(raw(child.port))
        assert ends_within(oldest, 2)


def test_half_logins_do_not_push_out_a_client_that_is_slower_than_they(child: BrokerChild) -> None:
    """FAULTS row 22: on a slow link, a client is silent for a moment after it has connected."""
    half = b"\x10\x40\x00\x04MQ"
    with contextlib.ExitStack() as sockets:

        def attack() -> None:
            sockets.enter_context(raw(child.port)).sendall(half)

        for _ in range(BrokerLimits().logins_per_address):
            attack()
        for _ in range(5):
            honest = sockets.enter_context(raw(child.port))
            time.sleep(0.02)
            attack()
            time.sleep(0.02)
            honest.sendall(connect_packet("pi-1", "pi-1"))
            assert honest.recv(4) == b"\x20\x02\x00\x00"


def test_login_longer_than_4_kb_is_cut_before_it_is_read(child: BrokerChild) -> None:
    with raw(child.port) as sock:
        sock.sendall(b"\x10\x80\x40")  # announces 8,192 bytes
        assert ends_within(sock, 2)


def test_keep_alive_is_enforced(child: BrokerChild) -> None:
    with (
        logged_in(child.port, "pi-1", keep_alive_s=1) as silent,
        logged_in(child.port, "pi-2", keep_alive_s=1) as living,
    ):
        began = time.monotonic()
        ends = threading.Thread(target=ends_within, args=(silent, 10), daemon=True)
        ends.start()
        while ends.is_alive():
            living.sendall(b"\xc0\x00")
            assert living.recv(2) == b"\xd0\x00"
            time.sleep(0.3)  # pings well within its keep-alive
        # one and a half times the keep-alive, and up to a second until the sweep
        assert 1.4 < time.monotonic() - began < 4
        living.sendall(b"\xc0\x00")
        assert living.recv(2) == b"\xd0\x00"


def test_device_that_does_not_read_is_cut_and_memory_stays_bounded(
    child: BrokerChild, backend: MqttLink
) -> None:
    """FAULTS row 22."""
    other = Device(child, "pi-2")
    before = memory_mb(child)
    with logged_in(child.port, "pi-1") as deaf:
        subscribed(deaf, "splitedge/v1/lab/pi-1/reply")
        sent, highest = 0, before
        for _ in range(150):  # 150 MB, far more than the kernel's own buffers
            sent += backend.publish("splitedge/v1/lab/pi-1/reply", bytes(1_000_000))
            highest = max(highest, memory_mb(child))
            other.round_trip_s()
        assert sent > 100
        assert highest - before < 60
        # of the 150 MB it gets no more than what the kernel held when it was cut
        assert received_until_the_end(deaf) < 30_000_000
    other.stop()


def test_device_that_takes_no_byte_is_cut_though_little_waits(hasty: int) -> None:
    with (
        logged_in(hasty, "pi-1") as deaf,
        logged_in(hasty, "backend-1", username="backend") as backend,
    ):
        subscribed(deaf, "splitedge/v1/lab/pi-1/reply")
        packet = publish_packet("splitedge/v1/lab/pi-1/reply", bytes(1_900_000))
        for _ in range(7):  # within what may wait, above what the kernel takes
            backend.sendall(packet)
        time.sleep(2.5)  # the fault: it reads nothing for that long
        assert received_until_the_end(deaf) < 7 * 1_900_000


@pytest.mark.parametrize("with_tls", [False, True])
def test_device_that_says_its_end_and_takes_no_byte_is_closed(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, *, with_tls: bool
) -> None:
    """FAULTS row 22: its half of the connection has ended; the other half would stay for ever."""
    monkeypatch.setattr(sockets, "_CLOSE_S", 0.5)
    limits = BrokerLimits(outbound_bytes=32_000_000)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)
    trusting = ssl.create_default_context(cafile=str(certificate[0]))
    with in_thread(limits, tls if with_tls else None) as port, contextlib.ExitStack() as stack:

        def client(name: str, username: str) -> socket.socket:
            sock = raw(port)
            if with_tls:
                sock = trusting.wrap_socket(sock, server_hostname="localhost")
            stack.enter_context(sock)
            sock.sendall(connect_packet(name, username))
            assert sock.recv(4) == b"\x20\x02\x00\x00"
            return sock

        deaf, backend = client("pi-1", "pi-1"), client("backend-1", "backend")
        subscribed(deaf, "splitedge/v1/lab/pi-1/reply")
        for _ in range(7):  # within what may wait, above what the kernel takes
            backend.sendall(publish_packet("splitedge/v1/lab/pi-1/reply", bytes(1_900_000)))
            assert backend.recv(4) == b"\x40\x02\x00\x01"  # so it is on its way to the device
        here = deaf.getsockname()[1]

        def is_open() -> bool:
            found = psutil.Process().net_connections("tcp")
            return any(one.laddr[1] == port and one.raddr and one.raddr[1] == here for one in found)

        assert is_open()
        deaf.shutdown(socket.SHUT_WR)
        wait_until(lambda: not is_open(), "the broker's side of the socket is still open", 20)


def test_device_that_reads_slowly_stays_though_ever_more_waits_for_it(hasty: int) -> None:
    with (
        logged_in(hasty, "pi-1") as slow,
        logged_in(hasty, "backend-1", username="backend") as backend,
    ):
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        subscribed(slow, "splitedge/v1/lab/pi-1/reply")
        packet = publish_packet("splitedge/v1/lab/pi-1/reply", bytes(1_500_000))
        for _ in range(20):  # 30 MB, less than may wait
            backend.sendall(packet)
            read = 0
            while read < 500_000:  # the fault: it reads a third of what it gets
                part = slow.recv(500_000 - read)
                assert part, "the broker cut a device that reads"
                read += len(part)
            time.sleep(0.2)


@pytest.mark.parametrize("fault", ["attend", "check_pulse"])
def test_fault_in_one_connection_ends_that_one_alone(
    fault: str, hasty: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner: type = Channel if fault == "attend" else Broker
    real = getattr(owner, fault)
    armed = threading.Event()

    def faulty(self: Any, *arguments: Any) -> Any:
        connection = self.connection if fault == "attend" else arguments[0]
        if armed.is_set() and connection is not None and connection.client_id == "pi-1":
            raise RuntimeError("a fault of ours")
        return real(self, *arguments)

    monkeypatch.setattr(owner, fault, faulty)
    with (
        logged_in(hasty, "pi-1") as broken,
        logged_in(hasty, "backend-1", username="backend") as backend,
    ):
        subscribed(broken, "splitedge/v1/lab/pi-1/reply")
        armed.set()
        # it is for the broken one, and acknowledged in the same turn
        backend.sendall(publish_packet("splitedge/v1/lab/pi-1/reply", bytes(200)))
        assert backend.recv(4) == b"\x40\x02\x00\x01"
        assert ends_within(broken, 5)
        with raw(hasty) as silent:
            assert ends_within(silent, 3), "the sweep does not run any more"
    assert "a fault of ours" in caplog.text


def test_sweep_that_fails_is_logged_and_the_next_one_follows(
    hasty: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def faulty(*_: Any) -> None:
        raise RuntimeError("a fault of ours")

    with monkeypatch.context() as fault:
        fault.setattr(Broker, "tick", faulty)
        wait_until(lambda: "a fault of ours" in caplog.text, "no sweep failed")
    with raw(hasty) as silent:
        assert ends_within(silent, 10), "the sweep does not run any more"


def test_socket_that_starts_no_tls_is_closed_like_any_silent_one(hasty_tls: int) -> None:
    with raw(hasty_tls) as silent:
        assert ends_within(silent, 2)


def test_flood_is_slowed_down_and_others_go_on(child: BrokerChild, backend: MqttLink) -> None:
    """FAULTS row 22."""
    other = Device(child, "pi-2")
    before = memory_mb(child)
    packet = publish_packet("splitedge/v1/lab/pi-1/query", bytes(8_000))
    with logged_in(child.port, "pi-1") as flooder:
        stop = time.monotonic() + 3

        def flood() -> None:
            with contextlib.suppress(OSError):  # it never reads, so it may be cut
                while time.monotonic() < stop:
                    flooder.sendall(packet)

        flooding = threading.Thread(target=flood, daemon=True)
        flooding.start()
        trips, highest = [], before
        while flooding.is_alive():
            trips.append(other.round_trip_s())
            highest = max(highest, memory_mb(child))
        flooding.join()
    other.stop()
    assert highest - before < 40
    assert sorted(trips)[len(trips) // 2] < 0.25


def test_backend_that_is_stuck_stops_its_senders_and_not_the_memory(child: BrokerChild) -> None:
    before = memory_mb(child)
    packet = publish_packet("splitedge/v1/lab/pi-1/query", bytes(100_000))
    with (
        logged_in(child.port, "backend-2", username="backend") as stuck,
        logged_in(child.port, "pi-1") as flooder,
    ):
        subscribed(stuck, "splitedge/v1/+/+/query")
        flooder.settimeout(1)
        sent = 0
        with contextlib.suppress(TimeoutError):  # when the broker no longer reads
            while sent < 200_000_000:
                sent += flooder.send(packet)
        assert sent < 50_000_000
        assert memory_mb(child) - before < 20


def test_client_that_leaves_at_any_moment_may_come_back(child: BrokerChild) -> None:
    """One that left while its login was under way was held to be there for good."""
    draw = random.Random(0)
    words = [
        connect_packet("pi-1", "pi-1"),
        subscribe_packet("splitedge/v1/lab/pi-1/command"),
        publish_packet("splitedge/v1/lab/pi-1/query", bytes(200)),
    ]
    for _ in range(300):
        with raw(child.port) as sock:
            for word in (*words[: draw.randint(1, 3)], *[b"\xe0\x00"] * draw.randint(0, 1)):
                sock.sendall(word)
                time.sleep(draw.choice((0, 0, 0.0003, 0.001)))
        with raw(child.port) as again:
            again.settimeout(5)
            again.sendall(words[0])
            assert again.recv(4) == b"\x20\x02\x00\x00"


def test_open_exchanges_of_quality_of_service_2_are_bounded(child: BrokerChild) -> None:
    with logged_in(child.port, "pi-1") as sock:
        for packet_id in range(1, 66):
            body = text("splitedge/v1/lab/pi-1/query") + packet_id.to_bytes(2, "big")
            sock.sendall(bytes((0x34, len(body))) + body)
        received = b""
        with contextlib.suppress(ConnectionError):
            while part := sock.recv(1_000):
                received += part
    assert received == b"".join(b"\x50\x02" + n.to_bytes(2, "big") for n in range(1, 65))


def test_logins_that_are_not_logged_leave_room_for_warnings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A fleet that comes back logs in at once; its refusals are what an operator needs to read."""
    caplog.set_level(logging.INFO, "server.broker.embedded")
    told: list[dict[str, Any]] = []

    async def happen() -> None:
        broker = EmbeddedBroker(on_event=told.append)
        for number in range(500):
            broker._happened(Event("login", f"pi-{number}", "127.0.0.1", ""))
        broker._happened(Event("refused", "eve", "127.0.0.1", "wrong credential"))

    DirectLoop().run_until_complete(happen())
    assert len(told) == 501  # the audit log is told of all
    (line,) = caplog.messages
    assert "'eve' refused" in line
    assert "(0 lines left out before)" in line


def test_revoked_device_leaves_no_retained_status(child: BrokerChild, backend: MqttLink) -> None:
    topic = "splitedge/v1/lab/lost/status"
    principal = Principal("lost", "device", "lab", credential_sha256(SECRET))
    child.set_principal(principal)
    heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    backend.subscribe(topic, lambda message: heard.put(message.payload))
    link = MqttLink(
        BrokerAddress("127.0.0.1", child.port),
        client_id="lost",
        password=SECRET,
        will=Will(topic, b"offline"),
    )
    link.start()
    link.wait_connected(5)
    link.publish(topic, b"online", retain=True)
    assert heard.get(timeout=5) == b"online"
    child.remove_principal("lost")
    assert heard.get(timeout=5) == b"offline"  # its will is still told to those who listen
    link.stop()

    # subscriptions are served in order: what is retained for the second comes after the first's
    other = topic.replace("lost", "pi-1")
    pi = linked(child, "pi-1")
    pi.start()
    pi.wait_connected(5)
    assert pi.publish(other, b"online", retain=True)
    late: list[Message] = []
    listener = linked(child, "backend-3", username="backend")
    listener.subscribe(topic, late.append)
    listener.subscribe(other, late.append)
    listener.start()
    wait_until(lambda: late, "nothing was retained")
    listener.stop()
    pi.stop()
    assert {message.topic for message in late} == {other}
