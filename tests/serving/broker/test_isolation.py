"""One matrix on every broker: a device may touch its own topics, and nothing else.

The client is a plain socket that speaks just enough MQTT 3.1.1, so that it can also do what no
decent client would.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edge_sdk.wire.broker_address import BrokerAddress
from server.broker.child import BrokerChild, ListenSettings
from server.broker.mosquitto import MosquittoAdmin
from server.broker.mosquitto_files import write_config
from server.broker.policy import Principal, credential_sha256

pytestmark = pytest.mark.broker

DEVICES = [f"d{i}" for i in range(20)]
FROM_DEVICE = ("status", "telemetry", "query")
TO_DEVICE = ("reply", "command")
PACKET_BYTES = 100_000
SECRET = secrets.token_hex(32)
NOT_AUTHORISED = 5
REFUSED = 0x80
CONNACK, PUBLISH, PUBACK, SUBACK = 2, 3, 4, 9


def fleet_of(device: str) -> str:
    return "odd" if int(device[1:]) % 2 else "even"


def topic_of(device: str, kind: str) -> str:
    return f"splitedge/v1/{fleet_of(device)}/{device}/{kind}"


@dataclass(frozen=True)
class World:
    """A broker with twenty devices in two fleets, and what may be done to it."""

    name: str
    port: int
    add: Callable[[str, str], None]
    remove: Callable[[str], None]


@pytest.fixture(scope="module", params=["embedded", "mosquitto"])
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    start = embedded if request.param == "embedded" else mosquitto
    with start(tmp_path_factory.mktemp("broker")) as running:
        for device in DEVICES:
            running.add(device, SECRET)
        yield running


@contextlib.contextmanager
def embedded(_: Path) -> Iterator[World]:
    child = BrokerChild(ListenSettings(packet_bytes=PACKET_BYTES))
    child.start()
    try:
        child.set_principal(Principal("backend", "backend", None, credential_sha256(SECRET)))
        yield World(
            "embedded",
            child.port,
            lambda device, credential: child.set_principal(
                Principal(device, "device", fleet_of(device), credential_sha256(credential))
            ),
            child.remove_principal,
        )
    finally:
        child.stop()


@contextlib.contextmanager
def mosquitto(folder: Path) -> Iterator[World]:
    program = shutil.which("mosquitto") or shutil.which(
        "mosquitto", path="/usr/sbin:/usr/local/sbin"
    )
    if program is None:
        pytest.fail("this test needs the mosquitto program: install the package mosquitto")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = write_config(folder, credential=SECRET, port=port, packet_bytes=PACKET_BYTES)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([program, "-c", str(config)], stderr=log)
    admin = MosquittoAdmin(BrokerAddress("127.0.0.1", port), credential=SECRET)
    try:
        admin.start()
        yield World(
            "mosquitto",
            port,
            lambda device, credential: admin.set_device(fleet_of(device), device, credential),
            admin.remove_device,
        )
    finally:
        admin.stop()
        process.terminate()
        process.wait(10)


class Client:
    """A socket after CONNECT; `code` is that of its CONNACK, None without one."""

    def __init__(
        self,
        port: int,
        client_id: str,
        *,
        username: str | None = None,
        password: str = SECRET,
        will: tuple[str, bytes] | None = None,
    ) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        flags = 0xC2 | (0 if will is None else 0x24)  # user, password, clean; a retained will
        body = b"\x00\x04MQTT\x04" + bytes((flags, 0, 60)) + text(client_id)
        if will is not None:
            body += text(will[0]) + len(will[1]).to_bytes(2, "big") + will[1]
        self.send(0x10, body + text(username or client_id) + text(password))
        answer = self.receive()
        self.code = None if answer is None else answer[1][1]

    def send(self, first: int, body: bytes) -> None:
        length, head = len(body), bytes((first,))
        while length >= 128:
            length, head = length >> 7, head + bytes((length & 127 | 128,))
        self.socket.sendall(head + bytes((length,)) + body)

    def receive(self) -> tuple[int, bytes] | None:
        """First byte and body of the next packet, None at the end of the connection."""
        try:
            first, length, shift = self._take(1)[0], 0, 0
            while True:
                digit = self._take(1)[0]
                length |= (digit & 127) << shift
                shift += 7
                if digit < 128:
                    return first, self._take(length)
        except (EOFError, ConnectionError):
            return None

    def subscribe(self, *filters: str, qos: int = 1) -> list[int]:
        """The return code of each."""
        self.send(0x82, b"\x00\x01" + b"".join(text(name) + bytes((qos,)) for name in filters))
        while (packet := self.receive()) is not None:
            if packet[0] >> 4 == SUBACK:
                return list(packet[1][2:])
        pytest.fail("cut while subscribing")

    def publish(
        self, topic: str, payload: bytes, *, retain: bool = False, packet_id: int = 1
    ) -> None:
        self.send(0x32 | retain, text(topic) + packet_id.to_bytes(2, "big") + payload)

    def acknowledged(self, count: int) -> None:
        """Wait for so many PUBACKs."""
        while count:
            packet = self.receive()
            assert packet is not None, "cut while publishing"
            count -= packet[0] >> 4 == PUBACK

    def heard_until(
        self, last: bytes, times: int = 1, *, retained: bool = False
    ) -> list[tuple[str, bytes]]:
        """Topics and payloads, acknowledged, up to the last of so many payloads `last`.

        Messages sent before this client subscribed count only if `retained`.
        """
        heard = []
        while times:
            packet = self.receive()
            assert packet is not None, "cut while listening"
            if packet[0] >> 4 != PUBLISH:
                continue
            first, body = packet
            end = 2 + int.from_bytes(body[:2], "big")
            if first & 0x06:
                self.send(0x40, body[end : end + 2])
            payload = body[end + (2 if first & 0x06 else 0) :]
            if first & 0x01 and not retained:
                continue
            times -= payload == last
            if payload != last:
                heard.append((body[2:end].decode(), payload))
        return heard

    def is_cut(self, within_s: float) -> bool:
        """Whether the broker ends the connection in that time; reads all it sends."""
        self.socket.settimeout(within_s)
        try:
            while self.receive() is not None:
                pass
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self.socket.close()

    def leave(self) -> None:
        """Disconnect as one should: no will is sent."""
        self.send(0xE0, b"")
        self.is_cut(5)
        self.close()

    def _take(self, count: int) -> bytes:
        while len(self._received) < count:
            more = self.socket.recv(65_536)
            if not more:
                raise EOFError
            self._received += more
        taken, self._received = self._received[:count], self._received[count:]
        return taken


def text(value: str) -> bytes:
    return len(value.encode()).to_bytes(2, "big") + value.encode()


@contextlib.contextmanager
def clients_of(world: World) -> Iterator[Callable[..., Client]]:
    """Connects clients that are disconnected at the end of the block."""
    with contextlib.ExitStack() as clients:

        def connected(client_id: str, **options: object) -> Client:
            client = Client(world.port, client_id, **options)  # type: ignore[arg-type]  # as given
            clients.callback(client.close)
            return client

        yield connected


@pytest.fixture
def connect(world: World) -> Iterator[Callable[..., Client]]:
    """Connects clients that are disconnected at the end of the test."""
    with clients_of(world) as connected:
        yield connected


@pytest.fixture
def backend(connect: Callable[..., Client]) -> Client:
    """The server's client, which hears all that devices say."""
    client = connect("backend-test", username="backend")
    assert client.code == 0
    assert client.subscribe(*(f"splitedge/v1/+/+/{kind}" for kind in FROM_DEVICE)) == [1, 1, 1]
    return client


def test_devices_subscribe_to_their_own_topics_only(connect: Callable[..., Client]) -> None:
    """FAULTS row 15."""
    everyones = [
        topic_of(device, kind) for device in DEVICES for kind in (*FROM_DEVICE, *TO_DEVICE)
    ]
    for device in DEVICES:
        own = {topic_of(device, kind) for kind in TO_DEVICE}
        wild = [
            "#",
            "+/#",
            "splitedge/#",
            f"splitedge/v1/{fleet_of(device)}/#",
            f"splitedge/v1/{fleet_of(device)}/{device}/#",
            f"splitedge/v1/{fleet_of(device)}/{device}/+",
            f"splitedge/v1/+/{device}/reply",
            "splitedge/v1/+/+/query",
            "$SYS/#",
            "$SYS/broker/version",
            "$CONTROL/#",
            "$CONTROL/dynamic-security/v1/response",
            f"$share/g/{topic_of(device, 'reply')}",
            f"$share/g/{topic_of(DEVICES[0], 'query')}",
            "$share/g/#",
        ]
        asked = [*everyones, *wild]
        codes = connect(device).subscribe(*asked)
        granted = {name for name, code in zip(asked, codes, strict=True) if code != REFUSED}
        assert granted == own


def test_what_devices_publish_reaches_the_backend_from_its_owner_only(
    connect: Callable[..., Client], backend: Client
) -> None:
    """FAULTS row 15."""
    clients = {device: connect(device) for device in DEVICES}
    for device, client in clients.items():
        client.subscribe(*(topic_of(device, kind) for kind in TO_DEVICE))
    targets = [topic_of(device, kind) for device in DEVICES for kind in (*FROM_DEVICE, *TO_DEVICE)]
    for device, client in clients.items():  # retained too, so that nothing leaks later either
        for number, topic in enumerate(targets, start=1):
            client.publish(topic, device.encode(), retain=True, packet_id=number)
        client.acknowledged(len(targets))
        client.publish(topic_of(device, "query"), b"end")
    heard = backend.heard_until(b"end", times=len(DEVICES))
    owned = {
        (topic_of(device, kind), device.encode()) for device in DEVICES for kind in FROM_DEVICE
    }
    assert len(heard) == len(owned)
    assert set(heard) == owned

    for number, device in enumerate(DEVICES, start=1):
        backend.publish(topic_of(device, "reply"), b"end", packet_id=number)
    for client in clients.values():
        assert client.heard_until(b"end") == []

    late = connect("backend-late", username="backend")
    late.subscribe(*(f"splitedge/v1/+/+/{kind}" for kind in FROM_DEVICE))
    clients[DEVICES[0]].publish(topic_of(DEVICES[0], "query"), b"end")
    kept = set(late.heard_until(b"end", retained=True))
    assert kept <= owned
    assert {(topic_of(device, "status"), device.encode()) for device in DEVICES} <= kept


def test_backends_share_queries_where_the_broker_can(
    world: World, connect: Callable[..., Client]
) -> None:
    shared = f"$share/splitedge/splitedge/v1/+/+/{FROM_DEVICE[2]}"
    workers = [connect(f"backend-{number}", username="backend") for number in range(2)]
    codes = [worker.subscribe(shared) for worker in workers]
    if world.name == "embedded":  # it says so at once, rather than never deliver
        assert codes == [[REFUSED], [REFUSED]]
        return
    assert codes == [[1], [1]]
    device = connect(DEVICES[0])
    for number in range(1, 11):
        device.publish(topic_of(DEVICES[0], "query"), b"work", packet_id=number)
    device.acknowledged(10)
    for worker in workers:  # Mosquitto takes turns
        assert worker.heard_until(b"work", times=5) == []


def test_retained_messages_of_others_are_never_delivered(
    connect: Callable[..., Client], backend: Client
) -> None:
    """FAULTS row 14."""
    for device in DEVICES[:3]:
        client = connect(device)
        client.publish(topic_of(device, "status"), b"here", retain=True)
        client.acknowledged(1)
        backend.publish(topic_of(device, "command"), b"for " + device.encode(), retain=True)
        backend.acknowledged(1)
    connect(DEVICES[4]).subscribe(topic_of(DEVICES[4], "command"))
    stranger = connect(DEVICES[5])
    stranger.subscribe(topic_of(DEVICES[5], "reply"), topic_of(DEVICES[5], "command"))
    backend.publish(topic_of(DEVICES[5], "reply"), b"end")
    assert stranger.heard_until(b"end", retained=True) == []
    for device in DEVICES[:3]:  # clear what Mosquitto keeps
        backend.publish(topic_of(device, "command"), b"", retain=True)
        backend.acknowledged(1)


def test_forged_will_is_never_delivered(
    world: World, connect: Callable[..., Client], backend: Client
) -> None:
    """FAULTS rows 14 and 15."""
    victims = {device: connect(device) for device in DEVICES[:2]}
    for device, victim in victims.items():
        victim.subscribe(topic_of(device, "reply"), topic_of(device, "command"))
    refused = []
    for device in DEVICES[2:]:
        others = [topic_of(other, "status") for other in DEVICES if other != device]
        commands = [topic_of(other, kind) for other in victims for kind in TO_DEVICE]
        wild = ["$SYS/broker/uptime", "splitedge/v1/+/+/status"]
        for topic in (*others, *commands, *wild):
            client = connect(device, will=(topic, b"forged"))
            refused.append(client.code != 0)
            client.close()
    if world.name == "embedded":  # Mosquitto lets them in and drops the will later
        assert all(refused)

    honest = connect(DEVICES[2], will=(topic_of(DEVICES[2], "status"), b"gone"))
    assert honest.code == 0
    honest.close()
    assert b"forged" not in {payload for _, payload in backend.heard_until(b"gone")}
    for number, (device, victim) in enumerate(victims.items(), start=1):
        backend.publish(topic_of(device, "reply"), b"end", packet_id=number)
        assert victim.heard_until(b"end", retained=True) == []


def test_last_message_of_a_device_comes_before_its_will(
    connect: Callable[..., Client], backend: Client
) -> None:
    topic = topic_of(DEVICES[3], "status")
    for _ in range(20):
        device = connect(DEVICES[3], will=(topic, b"gone"))
        for number in range(1, 4):
            device.publish(topic, b"last words", packet_id=number)
        device.socket.shutdown(socket.SHUT_WR)
        assert backend.heard_until(b"gone") == [(topic, b"last words")] * 3


def test_refused_login_does_not_disturb_the_one_whose_name_it_used(
    connect: Callable[..., Client], backend: Client
) -> None:
    """FAULTS row 14."""
    victims = {device: connect(device) for device in DEVICES[:10]}
    for device, victim in victims.items():
        victim.subscribe(topic_of(device, "reply"))
    thief = DEVICES[19]
    for device in victims:
        assert connect(device, password="guess").code == NOT_AUTHORISED
        assert connect(device, username=thief).code != 0  # its own password, another's client id
        assert connect(device, username="", password="").code != 0
        assert connect(device, username="backend", password="guess").code == NOT_AUTHORISED
    for number, (device, victim) in enumerate(victims.items(), start=1):
        backend.publish(topic_of(device, "reply"), b"answer", packet_id=number)
        victim.heard_until(b"answer")


def test_same_device_again_takes_the_place_of_its_old_connection(
    connect: Callable[..., Client], backend: Client
) -> None:
    old = connect(DEVICES[0])
    new = connect(DEVICES[0])
    assert (old.code, new.code) == (0, 0)
    assert old.is_cut(5)
    new.subscribe(topic_of(DEVICES[0], "reply"))
    backend.publish(topic_of(DEVICES[0], "reply"), b"answer")
    new.heard_until(b"answer")


@pytest.mark.parametrize(
    "sent",
    [
        bytes(100_000),
        b"\x30\x03\x00\x01+",
        b"\x30\x0d" + text("splitedge/#"),
        b"\xf0\x00",
        b"\x10\x02\x00\x00",
        b"\x30\xff\xff\xff\xff\x01",
        b"\x82\x04\x00\x01\x00\x09",
    ],
    ids=["zeros", "plus", "hash", "reserved", "connect", "length", "subscribe"],
)
def test_nonsense_after_login_is_cut_and_others_go_on(
    connect: Callable[..., Client], backend: Client, sent: bytes
) -> None:
    """FAULTS row 14."""
    offender, other = connect(DEVICES[1]), connect(DEVICES[2])
    with contextlib.suppress(ConnectionError):  # it may be cut before it has sent all
        offender.socket.sendall(sent)
    assert offender.is_cut(5)
    other.publish(topic_of(DEVICES[2], "query"), b"end")
    backend.heard_until(b"end")


def test_largest_message_passes_and_larger_packets_are_cut(
    connect: Callable[..., Client], backend: Client
) -> None:
    """FAULTS row 16."""
    offender, other = connect(DEVICES[1]), connect(DEVICES[2])
    largest = b"x" * PACKET_BYTES
    offender.publish(topic_of(DEVICES[1], "query"), largest)
    backend.heard_until(largest)
    with contextlib.suppress(ConnectionError):
        offender.publish(topic_of(DEVICES[1], "query"), bytes(PACKET_BYTES + 301))
    assert offender.is_cut(5)
    other.publish(topic_of(DEVICES[2], "query"), b"end")
    assert backend.heard_until(b"end") == []


def test_message_to_sys_goes_nowhere(connect: Callable[..., Client], backend: Client) -> None:
    offender = connect(DEVICES[1])
    offender.publish("$SYS/broker/version", b"mine")
    offender.publish("$CONTROL/dynamic-security/v1", b'{"commands": []}')
    connect(DEVICES[2]).publish(topic_of(DEVICES[2], "query"), b"end")
    assert backend.heard_until(b"end") == []


@pytest.mark.deadline
def test_revoked_device_is_cut_and_stays_out(world: World, connect: Callable[..., Client]) -> None:
    """FAULTS row 24."""
    world.add("d98", SECRET)
    stolen = connect("d98")
    assert stolen.code == 0
    began = time.monotonic()
    world.remove("d98")
    assert stolen.is_cut(10)
    assert time.monotonic() - began < 10
    assert connect("d98").code == NOT_AUTHORISED
    world.remove("d98")  # again is fine

    world.add("d98", "another secret")  # found, and enrolled again
    assert connect("d98").code == NOT_AUTHORISED
    assert connect("d98", password="another secret").code == 0
    world.remove("d98")


def test_new_credential_takes_the_place_of_the_old_one(
    world: World, connect: Callable[..., Client]
) -> None:
    world.add("d97", SECRET)
    world.add("d97", "new secret")
    assert connect("d97").code == NOT_AUTHORISED
    assert connect("d97", password="new secret").code == 0
    world.remove("d97")


def pairs_that_pass(world: World, devices: list[str]) -> dict[str, set[tuple[str, str]]]:
    """For each way of reaching another device, the pairs (who, whose topic) that got through."""
    passed: dict[str, set[tuple[str, str]]] = {
        way: set() for way in ("subscribe", "publish", "retain", "will")
    }
    with contextlib.ExitStack() as clients:

        def connected(client_id: str, **options: Any) -> Client:
            client = Client(world.port, client_id, **options)
            clients.callback(client.close)
            return client

        backend = connected("backend-pairs", username="backend")
        backend.subscribe(*(f"splitedge/v1/+/+/{kind}" for kind in FROM_DEVICE))
        owner = {topic_of(device, kind): device for device in devices for kind in FROM_DEVICE}
        for device in devices:
            client = connected(device)
            codes = client.subscribe(*(topic_of(other, "reply") for other in devices))
            granted = {other for other, code in zip(devices, codes, strict=True) if code < REFUSED}
            passed["subscribe"] |= {(device, other) for other in granted}
            for number, other in enumerate(devices):
                word = f"publish {device}".encode()
                client.publish(topic_of(other, "query"), word, packet_id=2 * number + 1)
                word = f"retain {device}".encode()
                client.publish(
                    topic_of(other, "status"), word, retain=True, packet_id=2 * number + 2
                )
            client.acknowledged(2 * len(devices))
            client.publish(topic_of(device, "query"), b"end")
        heard = backend.heard_until(b"end", times=len(devices))
        for device in devices:
            for other in devices:
                will = topic_of(other, "status"), f"will {device}".encode()
                dying = Client(world.port, device, will=will)
                dying.socket.close()  # without a word, so that the will is published
            last = connected(device)
            last.publish(topic_of(device, "query"), b"end")
        heard += backend.heard_until(b"end", times=len(devices))
        late = connected("backend-late", username="backend")
        late.subscribe(*(f"splitedge/v1/+/+/{kind}" for kind in FROM_DEVICE))
        last = connected(devices[0])
        last.publish(topic_of(devices[0], "query"), b"end")
        heard += late.heard_until(b"end", retained=True)
    for topic, payload in heard:
        way, _, device = payload.decode().partition(" ")
        passed[way].add((device, owner[topic]))
    return passed


@pytest.mark.fault_figures
def test_of_ten_thousand_pairs_only_those_of_a_device_with_itself_pass(
    tmp_path: Path, reached: Callable[..., None]
) -> None:
    """FAULTS row 15: 50 x 50 devices x {subscribe, publish, retain, will}, on both brokers."""
    devices = [f"d{number}" for number in range(50)]
    own = {(device, device) for device in devices}
    wrong: dict[str, int] = {}
    for start in (embedded, mosquitto):
        folder = tmp_path / start.__name__
        folder.mkdir()
        with start(folder) as world:
            for device in devices:
                world.add(device, SECRET)
            passed = pairs_that_pass(world, devices)
        wrong[world.name] = sum(len(pairs ^ own) for pairs in passed.values())
    reached(
        "isolation",
        "; ".join(f"{name}: {count} of 10,000 pairs wrong" for name, count in wrong.items()),
        **wrong,
    )
    assert set(wrong.values()) == {0}
