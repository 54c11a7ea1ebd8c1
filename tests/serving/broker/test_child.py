"""The broker as a child process: it listens, survives its own crash, and not its parent's."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from edge_sdk.errors import ConfigurationError
from edge_sdk.mqtt import BrokerAddress, MqttLink
from server.broker.child import BrokerChild, ListenSettings
from server.broker.policy import Principal, credential_sha256
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

SECRET = secrets.token_hex(32)
DEVICE = Principal("pi-1", "device", "lab", credential_sha256(SECRET))


@pytest.fixture
def child() -> Iterator[BrokerChild]:
    running = BrokerChild()
    running.set_principal(DEVICE)
    running.start()
    yield running
    running.stop()


def link_to(child: BrokerChild, name: str = "pi-1", **options: str) -> MqttLink:
    address = BrokerAddress("127.0.0.1", child.port, tls=bool(options))
    return MqttLink(address, client_id=name, password=SECRET, ca=options.get("ca"))


def logs_in(child: BrokerChild, name: str = "pi-1") -> bool:
    link = link_to(child, name)
    link.start()
    try:
        wait_until(
            lambda: link.connected or "Not authorized" in link.last_error, lambda: link.last_error
        )
        return link.connected
    finally:
        link.stop()


def test_client_of_mqtt_5_falls_back_and_is_let_in(child: BrokerChild) -> None:
    assert child.alive
    assert logs_in(child)
    assert not logs_in(child, "pi-2")


def test_small_enough_for_one_command_to_run_everything(child: BrokerChild) -> None:
    assert child.pid is not None
    assert psutil.Process(child.pid).memory_info().rss < 50e6  # 30 MB here


def test_crashed_broker_restarts_with_the_same_port_and_principals(child: BrokerChild) -> None:
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


def test_changes_made_while_it_is_down_are_in_force_when_it_is_back(child: BrokerChild) -> None:
    pid = child.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    child.remove_principal("pi-1")
    child.set_principal(Principal("pi-2", "device", "lab", credential_sha256(SECRET)))
    wait_until(lambda: child.alive and child.pid != pid, "the broker is not started again")
    assert logs_in(child, "pi-2")
    assert not logs_in(child, "pi-1")


def test_revocation_holds_though_the_broker_hangs(child: BrokerChild) -> None:
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


def test_dies_when_its_parent_is_killed() -> None:
    program = (
        "import time; from server.broker.child import BrokerChild\n"
        "child = BrokerChild(); child.start(); print(child.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        broker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
        wait_until(
            lambda: not broker.is_running() or broker.status() == psutil.STATUS_ZOMBIE,
            "the broker outlives its parent",
        )


def test_stop_ends_the_process_and_no_thread_stays(child: BrokerChild) -> None:
    assert child.pid is not None
    broker = psutil.Process(child.pid)
    child.stop()
    assert not child.alive
    assert not broker.is_running()
    assert "broker-child" not in {thread.name for thread in threading.enumerate()}


def test_port_that_is_taken_is_named(free_port: int) -> None:
    taken = rf"port {free_port}: .* choose another"
    with (
        socket.create_server(("127.0.0.1", free_port)),
        pytest.raises(ConfigurationError, match=taken),
    ):
        BrokerChild(ListenSettings(port=free_port)).start()


def test_device_cannot_take_the_name_of_the_backend(child: BrokerChild) -> None:
    child.set_principal(Principal("backend", "backend", None, credential_sha256(SECRET)))
    with pytest.raises(ConfigurationError, match="already a backend"):
        child.set_principal(Principal("backend", "device", "lab", credential_sha256(SECRET)))


def test_half_a_tls_pair_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="certificate and its key"):
        ListenSettings(certificate=Path("broker.pem"))


def test_tls_where_a_certificate_is_given(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    child = BrokerChild(ListenSettings(certificate=certificate, key=key))
    child.set_principal(DEVICE)
    child.start()
    try:
        link = link_to(child, ca=str(certificate))
        link.start()
        link.wait_connected(5)
        link.stop()
    finally:
        child.stop()


def self_signed(folder: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "broker")])
    now = dt.datetime.now(dt.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "broker.pem", folder / "broker.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths
