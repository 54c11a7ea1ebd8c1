"""MQTT 3.1.1 as ordinary clients use it, on the embedded broker with its policy opened."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion

from benchmarks.mqtt.open_broker import open_broker
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

QUIET_S = 0.15  # so long nothing may come, before a test believes that nothing comes


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with open_broker() as listening:
        yield listening


class User:
    """A paho client that notes what it hears; `present` is the flag of its last CONNACK."""

    def __init__(self, port: int, client_id: str, *, clean: bool = True, **options: Any) -> None:
        self.heard: queue.SimpleQueue[MQTTMessage] = queue.SimpleQueue()
        self.present: bool | None = None
        self.code = ""
        self._answered: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self.client = Client(
            CallbackAPIVersion.VERSION2, client_id=client_id, clean_session=clean,
            reconnect_on_failure=False,
        )  # fmt: skip
        self.client.on_connect = self._connected
        self.client.on_message = lambda _c, _u, message: self.heard.put(message)
        self.client.on_subscribe = lambda _c, _u, _i, codes, _p: self._answered.put(codes)
        self.client.on_unsubscribe = lambda _c, _u, _i, codes, _p: self._answered.put(codes)
        if will := options.get("will"):
            self.client.will_set(*will)
        self.client.connect("127.0.0.1", port, keepalive=options.get("keepalive", 60))
        self.client.loop_start()
        wait_until(lambda: self.code, "no CONNACK")

    def _connected(self, _c: Client, _u: Any, flags: Any, code: Any, _p: Any) -> None:
        self.present, self.code = flags.session_present, str(code)

    def subscribe(self, *filters: tuple[str, int]) -> list[int]:
        self.client.subscribe(list(filters))
        return [code.value for code in self._answered.get(timeout=5)]

    def unsubscribe(self, topic_filter: str) -> None:
        self.client.unsubscribe(topic_filter)
        self._answered.get(timeout=5)

    def publish(self, topic: str, payload: bytes, qos: int = 1, *, retain: bool = False) -> None:
        self.client.publish(topic, payload, qos, retain).wait_for_publish(5)

    def hears(self, count: int) -> list[tuple[str, bytes, int, bool]]:
        """So many messages and not one more, as topic, payload, QoS, retained."""
        messages = [self.heard.get(timeout=5) for _ in range(count)]
        with contextlib.suppress(queue.Empty):
            extra = self.heard.get(timeout=QUIET_S)
            pytest.fail(f"one message too many: {extra.topic} {extra.payload!r}")
        return [(m.topic, bytes(m.payload), m.qos, m.retain) for m in messages]

    def leave(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()

    def break_off(self) -> None:
        """End the connection without a word."""
        sock = self.client.socket()
        assert isinstance(sock, socket.socket)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        self.client.loop_stop()


@pytest.fixture
def join(port: int) -> Iterator[Callable[..., User]]:
    """Connects users that leave at the end of the test."""
    with contextlib.ExitStack() as leaving:

        def joined(client_id: str, **options: Any) -> User:
            user = User(port, client_id, **options)
            leaving.callback(user.leave)
            return user

        yield joined


def test_messages_of_every_quality_arrive_once_in_order(join: Callable[..., User]) -> None:
    user = join("one")
    assert user.present is False
    assert user.subscribe(("basic", 2)) == [2]
    for qos in (0, 1, 2):
        user.publish("basic", b"%d" % qos, qos)
    assert user.hears(3) == [("basic", b"%d" % qos, qos, False) for qos in (0, 1, 2)]


def test_second_connect_on_a_socket_ends_it(port: int) -> None:
    connect = b"\x10\x0f\x00\x04MQTT\x04\x02\x00\x3c\x00\x03raw"
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.sendall(connect)
        assert sock.recv(4) == b"\x20\x02\x00\x00"
        sock.sendall(connect)
        assert sock.recv(4) == b""


def test_retained_message_is_the_last_one_until_an_empty_one(join: Callable[..., User]) -> None:
    user = join("keeper")
    for qos, topic in enumerate(("kept/a", "kept/b", "kept/c")):
        user.publish(topic, b"old", qos, retain=True)
        user.publish(topic, b"new", qos, retain=True)
    late = join("late")
    late.subscribe(("kept/+", 2))
    expected = [(f"kept/{name}", b"new", qos, True) for qos, name in enumerate("abc")]
    assert sorted(late.hears(3)) == expected
    for topic in ("kept/a", "kept/b", "kept/c"):
        user.publish(topic, b"", retain=True)
    later = join("later")
    later.subscribe(("kept/+", 2))
    assert later.hears(0) == []


def test_messages_wait_for_a_client_that_keeps_its_session(join: Callable[..., User]) -> None:
    join("away", clean=False).leave()
    away = join("away", clean=False)
    away.subscribe(("offline/#", 2))
    away.leave()
    sender = join("sender")
    for qos in (0, 1, 2):
        sender.publish("offline/x", b"%d" % qos, qos)
    back = join("away", clean=False)
    assert back.present is True
    assert back.hears(2) == [("offline/x", b"1", 1, False), ("offline/x", b"2", 2, False)]
    back.leave()
    clean = join("away")  # a clean session drops the kept one
    assert clean.present is False
    sender.publish("offline/x", b"gone")
    assert clean.hears(0) == []


def test_will_is_sent_when_the_connection_breaks_and_not_after_a_farewell(
    join: Callable[..., User],
) -> None:
    listener = join("listener")
    listener.subscribe(("wills/#", 2))
    join("polite", will=("wills/polite", b"gone", 1, False)).leave()
    join("broken", will=("wills/broken", b"gone", 2, True)).break_off()
    assert listener.hears(1) == [("wills/broken", b"gone", 2, False)]
    late = join("late listener")
    late.subscribe(("wills/#", 2))
    assert late.hears(1) == [("wills/broken", b"gone", 2, True)]
    late.publish("wills/broken", b"", retain=True)


def test_overlapping_filters_deliver_once_with_the_highest_quality(
    join: Callable[..., User],
) -> None:
    user = join("overlap")
    assert user.subscribe(("over/#", 2), ("over/+", 1), ("over/x", 0)) == [2, 1, 0]
    user.publish("over/x", b"once", 2)
    assert user.hears(1) == [("over/x", b"once", 2, False)]


def test_keep_alive_that_runs_out_sends_the_will(port: int, join: Callable[..., User]) -> None:
    listener = join("watcher")
    listener.subscribe(("silence", 1))
    silent = b"\x00\x04MQTT\x04\x06\x00\x01\x00\x06silent\x00\x07silence\x00\x07expired"
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.sendall(bytes((0x10, len(silent))) + silent)
        assert sock.recv(4) == b"\x20\x02\x00\x00"
        began = time.monotonic()
        assert listener.heard.get(timeout=5).payload == b"expired"
        assert time.monotonic() - began > 1.4  # one and a half times the keep-alive


def test_what_was_not_acknowledged_is_sent_again(port: int, join: Callable[..., User]) -> None:
    connect = b"\x10\x12\x00\x04MQTT\x04\x00\x00\x3c\x00\x06forget"
    sender = join("resender")
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.sendall(connect + b"\x82\x0a\x00\x01\x00\x05again\x02")
        assert take(sock, 9) == b"\x20\x02\x00\x00\x90\x03\x00\x01\x02"
        sender.publish("again", b"1", 1)
        sender.publish("again", b"2", 2)
        first = take(sock, 24)  # both of them, which it does not acknowledge
    assert first == b"\x32\x0a\x00\x05again\x00\x011" + b"\x34\x0a\x00\x05again\x00\x022"
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.sendall(connect)
        assert take(sock, 4) == b"\x20\x02\x01\x00"
        repeated = b"\x3a\x0a\x00\x05again\x00\x011" + b"\x3c\x0a\x00\x05again\x00\x022"
        assert take(sock, 24) == repeated
        sock.sendall(b"\x40\x02\x00\x01\x50\x02\x00\x02")
        assert take(sock, 4) == b"\x62\x02\x00\x02"  # and the second is not released yet
    back = join("forget", clean=False)
    assert back.hears(0) == []


def take(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        assert part, f"the broker closed the connection after {data!r}"
        data += part
    return data


def test_empty_client_id_needs_a_clean_session(port: int) -> None:
    for flags, answer in ((b"\x02", b"\x20\x02\x00\x00"), (b"\x00", b"\x20\x02\x00\x02")):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            sock.sendall(b"\x10\x0c\x00\x04MQTT\x04" + flags + b"\x00\x3c\x00\x00")
            assert take(sock, 4) == answer


def test_topics_of_the_broker_itself_match_no_wildcard(join: Callable[..., User]) -> None:
    user = join("nosy")
    user.subscribe(("#", 1), ("+/mine", 1))
    user.publish("$mine/mine", b"hidden", 1)
    user.publish("yours/mine", b"seen", 1)
    assert user.hears(1) == [("yours/mine", b"seen", 1, False)]


def test_unsubscribed_topics_are_silent(join: Callable[..., User]) -> None:
    user = join("fickle")
    user.subscribe(("a", 1), ("b", 1), ("c/#", 1))
    user.unsubscribe("a")
    user.unsubscribe("c/#")
    for topic in ("a", "b", "c", "c/d"):
        user.publish(topic, topic.encode())
    assert user.hears(1) == [("b", b"b", 1, False)]


def test_same_client_id_again_takes_over_and_the_old_ones_will_is_told(
    join: Callable[..., User],
) -> None:
    listener = join("gossip")
    listener.subscribe(("moved", 1))
    old = join("mover", will=("moved", b"old is gone", 1, False))
    join("mover")
    assert listener.hears(1) == [("moved", b"old is gone", 1, False)]
    wait_until(lambda: not old.client.is_connected(), "the old connection stays")
