"""Each broker as a child process: it listens, survives its own crash, and not its parent's."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.mqtt.certificates import self_signed
from edge_sdk.errors import ConfigurationError, LinkError
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.wire.broker_address import BrokerAddress
from server.broker.child import ListenSettings
from server.broker.policy import Principal, credential_sha256
from tests.serving.broker.own_brokers import (
    PROGRAMS,
    OwnBroker,
    Program,
    device_login,
    let_in,
    own_broker,
)
from tests.serving.logins import is_let_in
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

ROOT = Path(__file__).parents[3]
SECRET = secrets.token_hex(32)
DEVICE = device_login("pi-1", SECRET)


@pytest.fixture(params=PROGRAMS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., OwnBroker]]:
    """Makes brokers of one program that know `pi-1`, and stops them."""
    made: list[OwnBroker] = []

    def own(settings: ListenSettings | None = None) -> OwnBroker:
        made.append(own_broker(request.param, tmp_path / "broker", SECRET, settings))
        made[-1].set_principal(DEVICE)
        return made[-1]

    yield own
    for child in made:
        child.stop()


@pytest.fixture
def child(make: Callable[..., OwnBroker]) -> OwnBroker:
    running = make()
    running.start()
    return running


def link_to(child: OwnBroker, name: str = "pi-1", **options: str) -> MqttLink:
    address = BrokerAddress("127.0.0.1", child.port, tls=bool(options))
    return MqttLink(address, client_id=name, password=SECRET, ca=options.get("ca"))


def logs_in(child: OwnBroker, name: str = "pi-1") -> bool:
    return is_let_in(link_to(child, name))


def test_client_of_mqtt_5_is_let_in_or_falls_back(child: OwnBroker) -> None:
    assert child.alive
    assert logs_in(child)
    assert not logs_in(child, "pi-2")


def test_small_enough_for_one_command_to_run_everything(child: OwnBroker) -> None:
    assert child.pid is not None
    assert psutil.Process(child.pid).memory_info().rss < 50e6  # 30 MB here


def test_crashed_broker_restarts_with_the_same_port_and_principals(child: OwnBroker) -> None:
    port, pid = child.port, child.pid
    assert pid is not None
    link = link_to(child)
    link.start()
    link.wait_connected(5)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: child.alive and child.pid != pid, "the broker is not started again")
    assert child.port == port
    link.wait_connected(10)
    link.stop()


@pytest.mark.parametrize("program", PROGRAMS)
def test_listener_that_fails_does_not_end_the_watching(
    program: Program, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Event()

    def fail(_event: dict[str, Any]) -> None:
        told.set()
        raise RuntimeError("a fault of the listener")

    child = own_broker(program, tmp_path / "broker", SECRET, on_event=fail)
    child.set_principal(DEVICE)
    child.start()
    try:
        first = child.pid
        assert logs_in(child)
        assert told.wait(5)
        assert first is not None
        assert child.pid == first, "the broker was ended for a fault of the listener"
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: child.alive and child.pid != first, "a new broker")
        assert logs_in(child)
    finally:
        child.stop()
    assert "a fault of the listener" in caplog.text


def test_changes_made_while_it_is_down_are_in_force_when_it_is_back(child: OwnBroker) -> None:
    pid = child.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    child.remove_principal("pi-1")
    let_in(child, device_login("pi-2", SECRET), SECRET)
    wait_until(lambda: child.alive and child.pid != pid, "the broker is not started again")
    assert logs_in(child, "pi-2")
    assert not logs_in(child, "pi-1")


def test_revocation_holds_though_the_broker_hangs(child: OwnBroker) -> None:
    pid = child.pid
    assert pid is not None
    link = link_to(child)
    link.start()
    link.wait_connected(5)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    child.remove_principal("pi-1")
    assert time.monotonic() - began < 10
    assert child.pid != pid
    assert not logs_in(child)
    assert not link.connected
    link.stop()


@pytest.mark.parametrize("program", PROGRAMS)
def test_dies_when_its_parent_is_killed(program: Program, tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from tests.serving.broker.own_brokers import own_broker\n"
        "child = own_broker(sys.argv[1], Path(sys.argv[2]), 'secret')\n"
        "child.start(); print(child.pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-P", "-c", code, program, str(tmp_path)]
    parent = subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert parent.stdout is not None
    with parent.stdout:
        broker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
        wait_until(
            lambda: not broker.is_running() or broker.status() == psutil.STATUS_ZOMBIE,
            "the broker outlives its parent",
        )


def test_stop_ends_the_process_and_no_thread_stays(child: OwnBroker) -> None:
    assert child.pid is not None
    broker = psutil.Process(child.pid)
    child.stop()
    assert not child.alive
    assert not broker.is_running()
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"broker-child", "mosquitto"}


def test_port_that_is_taken_is_named(make: Callable[..., OwnBroker], free_port: int) -> None:
    taken = rf"port {free_port}: .* choose another"
    with (
        socket.create_server(("127.0.0.1", free_port)),
        pytest.raises(ConfigurationError, match=taken),
    ):
        make(ListenSettings(port=free_port)).start()


def test_a_broker_that_ends_at_its_first_start_is_told_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    no_pem = tmp_path / "no.pem"
    no_pem.write_text("this is no certificate")
    child = own_broker("embedded", tmp_path, SECRET, ListenSettings(certificate=no_pem, key=no_pem))
    with pytest.raises(LinkError, match="did not start: it ended with status 1; what it"):
        child.start()
    assert "next start" not in caplog.text  # there is none


def test_device_cannot_take_the_name_of_the_backend(child: OwnBroker) -> None:
    with pytest.raises(ConfigurationError, match="already a backend"):
        child.set_principal(Principal("backend", "device", "lab", credential_sha256(SECRET)))


def test_half_a_tls_pair_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="certificate and its key"):
        ListenSettings(certificate=Path("broker.pem"))


def test_tls_where_a_certificate_is_given(make: Callable[..., OwnBroker], tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    child = make(ListenSettings(certificate=certificate, key=key))
    child.start()
    link = link_to(child, ca=str(certificate))
    link.start()
    link.wait_connected(5)
    child.remove_principal("pi-1")  # orders reach it over TLS too
    wait_until(lambda: not link.connected, "the revoked device stays connected", 10)
    link.stop()
