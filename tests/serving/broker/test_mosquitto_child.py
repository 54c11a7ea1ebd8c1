"""What only a managed Mosquitto does: devices known by hash, its files, its log."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from edge_sdk.errors import ConfigurationError
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.wire.broker_address import BrokerAddress
from server.audit.broker_events import read_broker_event
from server.broker.mosquitto_child import MosquittoChild
from server.broker.mosquitto_log import MosquittoLog
from server.registry.credentials import mosquitto_hash
from tests.serving.broker.own_brokers import device_login
from tests.serving.logins import is_let_in
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

SECRET = secrets.token_hex(32)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., MosquittoChild]]:
    """Makes Mosquittos on one folder, and stops them."""
    made: list[MosquittoChild] = []

    def own(**more: Any) -> MosquittoChild:
        made.append(MosquittoChild(tmp_path / "mosquitto", credential=SECRET, **more))
        return made[-1]

    yield own
    for child in made:
        child.stop()


def logs_in(child: MosquittoChild, name: str, password: str = SECRET) -> bool:
    address = BrokerAddress("127.0.0.1", child.port)
    return is_let_in(MqttLink(address, client_id=name, password=password))


def test_hash_is_the_one_that_mosquitto_makes() -> None:
    # 12 bytes of salt; made with Mosquitto 2.0.11's plugin: createClient with password "secret"
    hashed = mosquitto_hash("secret", bytes(range(12)))
    iterations, salt, derived = hashed.split("$")
    assert (iterations, salt, len(derived)) == ("101", "AAECAwQFBgcICQoL", 88)
    assert mosquitto_hash("secret") != mosquitto_hash("secret")  # each has a salt of its own


def test_device_known_by_its_hash_alone_is_let_in_from_the_start(
    make: Callable[..., MosquittoChild],
) -> None:
    child = make()
    child.set_principal(device_login("pi-1", SECRET))
    child.start()
    assert child.waiting == frozenset()
    assert logs_in(child, "pi-1")
    assert not logs_in(child, "pi-1", "wrong")


def test_device_without_a_hash_waits_until_it_shows_its_credential(
    make: Callable[..., MosquittoChild],
) -> None:
    old = replace(device_login("pi-1", SECRET), mosquitto_hash=None)
    child = make()
    child.set_principal(old)
    child.start()
    assert child.waiting == {"pi-1"}
    assert not logs_in(child, "pi-1")
    child.set_principal(old, SECRET)
    assert child.waiting == frozenset()
    assert logs_in(child, "pi-1")


def test_device_that_another_process_let_in_waits_for_its_credential_or_a_restart(
    make: Callable[..., MosquittoChild],
) -> None:
    child = make()
    child.start()
    for name in ("pi-1", "pi-2"):
        child.set_principal(device_login(name, SECRET))
    assert child.waiting == {"pi-1", "pi-2"}
    child.set_principal(device_login("pi-1", SECRET), SECRET)
    assert logs_in(child, "pi-1")
    assert not logs_in(child, "pi-2")
    pid = child.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: child.alive and child.pid != pid, "Mosquitto is not started again")
    assert child.waiting == frozenset()
    assert logs_in(child, "pi-2")


def test_login_that_the_file_of_the_last_run_had_is_gone_when_the_registry_lacks_it(
    make: Callable[..., MosquittoChild],
) -> None:
    first = make()
    first.set_principal(device_login("pi-1", SECRET))
    first.start()
    assert logs_in(first, "pi-1")
    first.stop()
    second = make()
    second.start()
    assert not logs_in(second, "pi-1")


def test_files_that_are_right_already_are_not_written_again(
    make: Callable[..., MosquittoChild], tmp_path: Path
) -> None:
    login = device_login("pi-1", SECRET)
    port, written = 0, []
    for _ in range(2):
        child = make()
        child.set_principal(login)
        child._port = port  # as a server that remembers its addresses
        child.start()
        port = child.port
        child.stop()
        written.append(
            {path.name: path.stat().st_mtime_ns for path in (tmp_path / "mosquitto").iterdir()}
        )
    assert written[0] == written[1]


def test_secrets_are_neither_in_its_files_nor_in_its_command(
    make: Callable[..., MosquittoChild], tmp_path: Path
) -> None:
    child = make()
    child.set_principal(device_login("pi-1", SECRET))
    child.start()
    assert child.pid is not None
    assert SECRET not in " ".join(psutil.Process(child.pid).cmdline())
    for path in (tmp_path / "mosquitto").iterdir():
        assert path.stat().st_mode & 0o077 == 0
        assert SECRET not in path.read_text()


def test_more_sockets_than_the_usual_limit_are_allowed(make: Callable[..., MosquittoChild]) -> None:
    child = make()
    child.start()
    assert child.pid is not None
    soft, hard = psutil.Process(child.pid).rlimit(psutil.RLIMIT_NOFILE)
    assert soft == min(hard, 65_536)


def test_mosquitto_that_is_not_installed_is_named(
    make: Callable[..., MosquittoChild], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("server.broker.mosquitto_files.PROGRAM_FOLDERS", str(tmp_path))
    with pytest.raises(ConfigurationError, match="apt install mosquitto"):
        make()


def test_logins_and_refusals_are_told(make: Callable[..., MosquittoChild]) -> None:
    events: list[dict[str, Any]] = []
    child = make(on_event=events.append)
    child.set_principal(device_login("pi-1", SECRET))
    child.start()
    assert logs_in(child, "pi-1")
    assert not logs_in(child, "pi-1", "wrong")
    child.remove_principal("pi-1")
    wait_until(lambda: [e for e in events if e["event"] == "refused"], lambda: str(events))
    login = next(e for e in events if e["client_id"] == "pi-1")
    assert login["event"] == "login"
    assert login["peer"].startswith("127.0.0.1:")
    refused = next(e for e in events if e["event"] == "refused")
    assert refused["why"] == "not authorised"


def test_log_lines_that_clients_write_are_read_as_what_they_are() -> None:
    log = MosquittoLog()
    assert log.read("New connection from 192.0.2.1:4000 on port 1883.") is None
    refused = log.read("Client <unknown> disconnected, not authorised.")
    assert refused == {
        "event": "refused",
        "client_id": "",
        "peer": "192.0.2.1:4000",
        "why": "not authorised",
    }
    for peer in ("192.0.2.2:1", "192.0.2.3:1"):
        log.read(f"New connection from {peer} on port 1883.")
    unsure = log.read("Client <unknown> disconnected due to protocol error.")
    assert unsure is not None
    assert (unsure["peer"], unsure["why"]) == ("", "protocol error")
    assert log.read("anything else") is None


def test_peers_that_left_without_a_word_do_not_hide_where_a_refusal_is_from(
    make: Callable[..., MosquittoChild],
) -> None:
    """One that looks whether the port is open leaves no line with its address at its end."""
    events: list[dict[str, Any]] = []
    child = make(on_event=events.append)
    child.start()
    for _ in range(3):
        socket.create_connection(("127.0.0.1", child.port)).close()
    for _ in range(2):  # the first one may overlap with those
        assert not logs_in(child, "pi-1", "wrong")
        wait_until(lambda: events and events[-1]["event"] == "refused", lambda: str(events))
        events.append({"event": "seen"})
    assert [e["peer"].split(":")[0] for e in events if e["event"] == "refused"][-1] == "127.0.0.1"


def test_peer_with_an_ipv6_address_is_told_so_that_its_port_can_be_told_apart() -> None:
    log = MosquittoLog()
    log.read("New connection from 2001:db8::1:4000 on port 1883.")
    refused = log.read("Client <unknown> disconnected, not authorised.")
    assert refused is not None
    assert refused["peer"] == "[2001:db8::1]:4000"
    event = read_broker_event(refused)
    assert event is not None
    assert event.source == "2001:db8::1"
