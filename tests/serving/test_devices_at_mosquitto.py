"""Devices at a Mosquitto of one's own, which keeps them while the server is down or away."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from edge_sdk.errors import LinkError
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.mqtt.messages import Message
from edge_sdk.wire.broker_address import BrokerAddress
from edge_sdk.wire.topics import Kind, Topic, parse_topic
from profiles import load_reference
from server.app import create_app
from server.broker.mosquitto import MosquittoAdmin
from server.broker.mosquitto_files import BACKEND, write_config
from server.registry.database import Registry
from server.services import Services
from server.settings import ServerSettings
from tests.serving.running_services import FREE, enrol, wait_turns
from tests.waiting import is_listening, wait_until


@contextlib.contextmanager
def own_mosquitto(folder: Path, port: int) -> Iterator[BrokerAddress]:
    """One that keeps devices apart, as `broker-config` writes it; its address with the login."""
    config = write_config(folder, credential="secret", port=port)
    program = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin")
    assert program is not None, "install Mosquitto 2.0 or newer to run the broker tests"
    address = BrokerAddress("127.0.0.1", port, username=BACKEND, password="secret")
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen([program, "-c", config], stderr=log) as it,
    ):
        try:
            wait_until(lambda: is_listening(port), "Mosquitto does not listen")
            yield address
        finally:
            it.terminate()


def lets_in(address: BrokerAddress, device: str, credential: str) -> bool:
    link = MqttLink(address, client_id=device, username=device, password=credential)
    link.start()
    try:
        wait_until(lambda: link.connected or "ot authorized" in link.last_error, "no answer")
        return link.connected
    finally:
        link.stop()


def leave_status(address: BrokerAddress, device: str, credential: str) -> None:
    link = MqttLink(address, client_id=device, username=device, password=credential)
    link.start()
    link.wait_connected(10)
    link.publish(str(Topic("default", device, Kind.STATUS)), b"{}", retain=True)
    link.flush(10)
    link.stop()


def kept_statuses(address: BrokerAddress, known: str) -> set[str]:
    """Devices whose status the broker keeps, of which one is known to be."""
    found: set[str] = set()
    with contextlib.ExitStack() as stack:
        for reader in ("first", "second"):  # the first has its whole answer before the second's
            heard: list[str] = []
            link = MqttLink(address, client_id=reader, username=BACKEND, password=address.password)
            link.subscribe("splitedge/v1/+/+/status", partial(_note, heard, found))
            link.start()
            stack.callback(link.stop)
            wait_until(partial(heard.__contains__, known), "it keeps none")
    return found


def _note(heard: list[str], found: set[str], message: Message) -> None:
    heard.append(parse_topic(message.topic).device)
    found.add(heard[-1])


@pytest.mark.broker
def test_a_device_revoked_while_the_server_was_down_is_shut_out_of_mosquitto(
    tmp_path: Path, free_port: int
) -> None:
    with own_mosquitto(tmp_path / "mosquitto", free_port) as address:
        settings = ServerSettings(tmp_path / "state", FREE, address, threads=1)
        services = Services(settings)
        services.start()
        credentials = {name: enrol(services, name) for name in ("pi-1", "pi-2", "pi-3")}
        services.stop()
        assert lets_in(address, "pi-1", credentials["pi-1"])
        assert lets_in(address, "pi-3", credentials["pi-3"])
        for name in ("pi-1", "pi-2"):  # as the last words of agents that ended
            leave_status(address, name, credentials[name])
        registry = Registry.open(f"sqlite:///{tmp_path / 'state' / 'registry.db'}")
        registry.revoke("pi-1")
        registry.membership.remove("pi-3")  # no row is left of it
        registry.close()

        services = Services(settings)
        services.start()
        try:
            assert not lets_in(address, "pi-1", credentials["pi-1"])
            assert lets_in(address, "pi-2", credentials["pi-2"])
            assert not lets_in(address, "pi-3", credentials["pi-3"])
            assert kept_statuses(address, "pi-2") == {"pi-2"}
        finally:
            services.stop()


@pytest.mark.broker
def test_mosquitto_lists_the_devices_that_it_lets_in_and_no_other_client(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.broker.mosquitto.PAGE", 2)
    with own_mosquitto(tmp_path / "mosquitto", free_port) as address:
        admin = MosquittoAdmin(address, credential="secret")
        admin.start()
        try:
            assert admin.devices() == frozenset()
            names = {f"pi-{number}" for number in range(5)}
            for name in names:
                admin.set_device("default", name, "secret")
            admin._upsert("Client", {"username": "grafana", "password": "secret"})
            assert admin.devices() == names
            admin.remove_device("pi-3")
            assert admin.devices() == names - {"pi-3"}
        finally:
            admin.stop()


@pytest.mark.deadline
@pytest.mark.broker
def test_enrolment_while_mosquitto_is_away_fails_and_works_once_it_is_back(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = load_reference("raspberry-pi-4").to_dict()
    with contextlib.ExitStack() as stack:
        with own_mosquitto(tmp_path / "mosquitto", free_port) as address:
            services = Services(ServerSettings(tmp_path / "state", FREE, address, threads=1))
            services.start()
            stack.callback(services.stop)
        body = {"token": services.registry.create_token(), "name": "pi-1", "profile": profile}
        client = stack.enter_context(TestClient(create_app(services)))
        answer = client.post("/api/v1/enroll", json=body)
        assert answer.status_code == 503
        assert "try again when the broker is back" in answer.json()["error"]
        assert services.registry.devices() == ()

        with own_mosquitto(tmp_path / "mosquitto", free_port):

            def enrolled() -> bool:
                nonlocal answer
                answer = client.post("/api/v1/enroll", json=body)
                return bool(answer.status_code == 201)  # the client is httpx's, untyped here

            wait_until(enrolled, "the token does not work again")
            assert answer.json()["device"] == "pi-1"
            wait_turns(services, monkeypatch)
            assert lets_in(address, "pi-1", answer.json()["credential"])


@pytest.mark.deadline
@pytest.mark.broker
def test_one_removal_that_fails_stops_no_other(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_mosquitto(tmp_path / "mosquitto", free_port) as address:
        services = Services(ServerSettings(tmp_path / "state", FREE, address, threads=1))
        services.start()
        try:
            credentials = {name: enrol(services, name) for name in ("pi-1", "pi-2", "pi-3")}
            assert services.broker._admin is not None
            remove, failing = services.broker._admin.remove_device, [True]

            def flaky(device: str, fleet: str | None = None) -> None:
                if device == "pi-1" and failing:
                    raise LinkError("Mosquitto did not answer")
                remove(device, fleet)

            monkeypatch.setattr(services.broker._admin, "remove_device", flaky)
            for name in ("pi-1", "pi-2"):
                services.registry.revoke(name)
            wait_until(lambda: not lets_in(address, "pi-2", credentials["pi-2"]), "still let in")
            assert lets_in(address, "pi-1", credentials["pi-1"])
            assert lets_in(address, "pi-3", credentials["pi-3"])
            failing.clear()
            wait_until(lambda: not lets_in(address, "pi-1", credentials["pi-1"]), "still let in")
        finally:
            services.stop()
