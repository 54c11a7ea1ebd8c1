"""A server with a Mosquitto of its own: which broker it starts, and devices that change brokers."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import create_engine, text

from edge_sdk.errors import ConfigurationError
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.wire.address import Address
from edge_sdk.wire.broker_address import BrokerAddress
from profiles.reference import load_reference
from server.app import create_app
from server.broker.child import BrokerChild
from server.broker.mosquitto_child import MosquittoChild
from server.registry.location import registry_file
from server.run import Addresses, choose_broker
from server.services import Services
from server.settings import BrokerProgram, ServerSettings
from tests.waiting import wait_until

pytestmark = pytest.mark.broker

FREE = Address("127.0.0.1", 0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[BrokerProgram], Services]]:
    """Starts servers on one state folder, one after the other."""
    with contextlib.ExitStack() as last:

        def start(program: BrokerProgram) -> Services:
            last.close()
            settings = ServerSettings(tmp_path, FREE, FREE, threads=1, broker_program=program)
            services = Services(settings)
            last.callback(services.stop)
            services.start()
            return services

        yield start


@pytest.fixture
def without_mosquitto(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which no Mosquitto is found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("server.broker.mosquitto_files.PROGRAM_FOLDERS", str(tmp_path))


def enrol(services: Services, name: str) -> str:
    profile = load_reference("raspberry-pi-4").to_dict()
    token = services.registry.create_token()
    device, credential = services.registry.redeem_token(token, name, profile)
    services.admit(device, credential)
    return credential


def link_to(services: Services, name: str, credential: str) -> MqttLink:
    address = BrokerAddress.parse(services.broker_address()["url"])
    return MqttLink(address, client_id=name, password=credential)


def lets_in(services: Services, name: str, credential: str) -> bool:
    link = link_to(services, name, credential)
    link.start()
    try:
        wait_until(lambda: link.connected or "ot authorized" in link.last_error, "no answer")
        return link.connected
    finally:
        link.stop()


def test_devices_of_the_embedded_broker_log_in_at_mosquitto_and_back(
    run: Callable[[BrokerProgram], Services],
) -> None:
    credential = enrol(run("embedded"), "pi-1")
    services = run("auto")
    assert isinstance(services.broker._child, MosquittoChild)
    assert lets_in(services, "pi-1", credential)
    newer = enrol(services, "pi-2")
    assert lets_in(services, "pi-2", newer)
    services = run("embedded")
    assert isinstance(services.broker._child, BrokerChild)
    assert lets_in(services, "pi-1", credential)
    assert lets_in(services, "pi-2", newer)


@pytest.mark.deadline
def test_a_device_of_an_earlier_release_is_let_in_once_it_asks_over_http(
    run: Callable[[BrokerProgram], Services], tmp_path: Path
) -> None:
    """It is refused at first; an agent that is refused asks the server for the broker's address."""
    services = run("embedded")
    credential = enrol(services, "pi-1")
    services.registry.close()
    engine = create_engine(f"sqlite:///{registry_file(tmp_path)}")
    with engine.begin() as connection:  # as such a release left it
        connection.execute(text("UPDATE devices SET mosquitto_hash = NULL"))
    engine.dispose()

    services = run("auto")
    link = link_to(services, "pi-1", credential)
    link.start()
    wait_until(lambda: "ot authorized" in link.last_error, lambda: link.last_error)
    client = TestClient(create_app(services))
    login = {"Authorization": f"Bearer pi-1:{credential}"}
    assert client.get("/api/v1/devices/pi-1/connection", headers=login).status_code == 200
    link.wait_connected(10)
    link.stop()
    wait_until(
        lambda: services.registry.device("pi-1").mosquitto_hash is not None, "it is not kept"
    )
    assert lets_in(run("auto"), "pi-1", credential)  # at once from then on


@pytest.mark.deadline
def test_a_device_revoked_at_mosquitto_is_cut_within_seconds(
    run: Callable[[BrokerProgram], Services],
) -> None:
    services = run("mosquitto")
    credential = enrol(services, "pi-1")
    link = link_to(services, "pi-1", credential)
    link.start()
    link.wait_connected(5)
    began = time.monotonic()
    services.registry.revoke("pi-1")  # as `splitedge server revoke` does, in another process
    wait_until(lambda: not link.connected, "it stays connected")
    assert time.monotonic() - began < 10
    link.stop()
    assert not lets_in(services, "pi-1", credential)


@pytest.mark.usefixtures("without_mosquitto")
def test_the_embedded_broker_runs_where_there_is_no_mosquitto_and_says_so(
    run: Callable[[BrokerProgram], Services], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="server")
    services = run("auto")
    assert isinstance(services.broker._child, BrokerChild)
    assert "the embedded broker runs: Mosquitto is not installed (apt install mosquitto)" in (
        caplog.messages
    )
    with pytest.raises(ConfigurationError, match="apt install mosquitto"):
        run("mosquitto")


def test_a_mosquitto_that_does_not_start_gives_way_to_the_embedded_broker(
    run: Callable[[BrokerProgram], Services],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    broken = tmp_path / "plugin.so"
    broken.write_bytes(b"no shared object")
    monkeypatch.setattr("server.broker.mosquitto_child.find_plugin", lambda: broken)
    services = run("auto")
    assert isinstance(services.broker._child, BrokerChild)
    assert any("the embedded broker runs in its place" in line for line in caplog.messages)
    credential = enrol(services, "pi-1")
    assert lets_in(services, "pi-1", credential)


@pytest.mark.parametrize(
    ("asked", "last", "program", "address"),
    [
        (None, "embedded:127.0.0.1:1999", "embedded", "127.0.0.1:1999"),  # as it was
        ("auto", "embedded:127.0.0.1:1999", "auto", "127.0.0.1:1999"),  # devices know the address
        ("auto:0.0.0.0:8883", "embedded:127.0.0.1:1999", "auto", "0.0.0.0:8883"),
        ("mosquitto:127.0.0.1:0", None, "mosquitto", "127.0.0.1:0"),
        (None, "auto:127.0.0.1:1999", "auto", "127.0.0.1:1999"),
    ],
)
def test_broker_is_chosen_as_asked_or_as_last_time(
    asked: str | None, last: str | None, program: str, address: str
) -> None:
    remembered = None if last is None else Addresses("127.0.0.1:8000", last)
    assert choose_broker(asked, remembered) == (program, Address.parse(address, "--mqtt"))


def test_the_first_time_a_taken_port_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setattr("server.run.MQTT_PORT_DEFAULT", free_port)
    assert choose_broker(None, None) == ("auto", Address("127.0.0.1", free_port))
    with socket.create_server(("127.0.0.1", free_port)):
        program, address = choose_broker(None, None)
    assert program == "auto"
    assert isinstance(address, Address)
    assert free_port < address.port < free_port + 10


def test_a_broker_of_the_users_own_stays_by_url() -> None:
    assert choose_broker("mqtts://hub:8883", None)[1] == BrokerAddress("hub", 8883, tls=True)
