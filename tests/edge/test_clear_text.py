"""A device's credential leaves for other machines encrypted only: FAULTS row 13.

0.0.0.0 is no loopback address, and reaches this machine: what a device sends there is what it would
send to another machine.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_sdk import enroll
from edge_sdk.api import CONNECTION_NAME, FleetBroker, locate_broker
from edge_sdk.cli.main import main
from edge_sdk.errors import ConfigurationError, LinkError
from edge_sdk.identity import Identity
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.offload.offloader import Offloader
from edge_sdk.state import StateLock
from edge_sdk.training.device.invitation import CommandLink
from edge_sdk.training.device.trainer_client import TrainerClient
from edge_sdk.wire.address import Address
from edge_sdk.wire.broker_address import BrokerAddress
from edge_sdk.wire.clear_text import is_clear
from profiles import load_reference
from server.broker.child import BrokerChild, ListenSettings
from server.broker.policy import Principal, credential_sha256
from server.settings import ServerSettings
from tests.waiting import wait_until

SECRET = "s3cret" * 7
OTHER = "0.0.0.0"
PI = load_reference("raspberry-pi-4")


class Eavesdropper:
    """A listener on all addresses that keeps all it is sent."""

    def __init__(self) -> None:
        self.heard = b""
        self._listener = socket.create_server((OTHER, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                peer, _ = self._listener.accept()
                with peer, contextlib.suppress(OSError):
                    peer.settimeout(1)
                    while part := peer.recv(4096):
                        self.heard += part

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def eve() -> Iterator[Eavesdropper]:
    listening = Eavesdropper()
    yield listening
    listening.close()


@pytest.mark.parametrize(
    ("url", "clear"),
    [
        ("mqtt://hub.example", True),
        ("http://192.168.1.10:8000", True),
        ("http://127.evil.example", True),
        ("mqtts://hub.example", False),
        ("https://hub.example", False),
        ("mqtt://127.0.0.1", False),
        ("http://[::1]:8000", False),
        ("mqtt://localhost", False),
    ],
)
def test_another_machine_without_encryption_is_told_by_the_url(url: str, clear: bool) -> None:
    assert is_clear(url) is clear


@pytest.mark.broker
def test_device_of_https_that_is_told_mqtt_sends_no_credential(
    eve: Eavesdropper, caplog: pytest.LogCaptureFixture
) -> None:
    """FAULTS row 13: a server, or one who speaks for it, names a broker without encryption."""
    identity = Identity("https://hub.example:8000", "pi-1", "lab", SECRET)
    told = FleetBroker(f"mqtt://{OTHER}:{eve.port}")
    with contextlib.closing(Offloader(identity, BrokerAddress(OTHER, eve.port))) as offloader:
        link = MqttLink(BrokerAddress.parse(told.broker), client_id="pi-1", password=SECRET)
        link.start()
        with pytest.raises(LinkError, match=r"without encryption.*--tls-cert.*--insecure"):
            link.wait_connected(0.3)
        time.sleep(0.3)
        assert eve.heard == b""
        assert offloader.presence.name != "PRESENT"
        link.stop()
    refusals = [line for line in caplog.messages if "does not connect" in line]
    assert len(refusals) == 2  # each link says it once
    assert all(SECRET not in line for line in refusals)


@pytest.mark.deadline
@pytest.mark.broker
def test_device_that_may_connects_without_encryption() -> None:
    broker = BrokerChild(ListenSettings(host=OTHER))
    broker.set_principal(Principal("pi-1", "device", "lab", credential_sha256(SECRET)))
    broker.start()
    identity = Identity("https://hub.example:8000", "pi-1", "lab", SECRET, insecure=True)
    try:
        offloader = Offloader(identity, BrokerAddress(OTHER, broker.port))
        wait_until(lambda: offloader._link.connected, lambda: offloader._link.last_error)
        offloader.close()
    finally:
        broker.stop()


@pytest.mark.broker
def test_waiting_for_an_invitation_sends_no_credential_either(
    eve: Eavesdropper, tmp_path: Path
) -> None:
    """FAULTS row 13."""
    told = {"broker": {"url": f"mqtt://{OTHER}:{eve.port}"}}
    (tmp_path / CONNECTION_NAME).write_text(json.dumps(told))
    identity = Identity(f"https://{OTHER}:9", "pi-1", "lab", SECRET)
    with CommandLink(identity, tmp_path):
        time.sleep(0.5)
    assert eve.heard == b""


def test_enrolling_over_http_sends_no_token(eve: Eavesdropper, tmp_path: Path) -> None:
    """FAULTS row 13."""
    url = f"http://{OTHER}:{eve.port}"
    with pytest.raises(ConfigurationError, match=r"without encryption.*https://.*--insecure"):
        enroll(url, "token", tmp_path / "pi", profile=PI)
    assert eve.heard == b""
    assert not (tmp_path / "pi").exists()


def test_trainer_on_another_machine_is_sent_no_credential(eve: Eavesdropper) -> None:
    """FAULTS row 13."""
    identity = Identity("https://hub.example:8000", "pi-1", "lab", SECRET)
    with pytest.raises(ConfigurationError, match=r"trainer: .*without encryption"):
        TrainerClient(identity, f"http://{OTHER}:{eve.port}")
    assert eve.heard == b""


@pytest.mark.deadline
def test_identity_of_an_earlier_release_goes_on(eve: Eavesdropper, tmp_path: Path) -> None:
    """One enrolled over http has shown its credential already; one over https has not."""
    fields = {"device": "pi-1", "fleet": "lab", "credential": SECRET, "ca": None}
    for server, insecure in (
        (f"http://{OTHER}:{eve.port}", True),
        ("https://hub.example:8000", False),
        ("http://127.0.0.1:8000", False),
    ):
        (tmp_path / "agent.json").write_text(json.dumps({"server": server, **fields}))
        assert Identity.load(tmp_path).insecure is insecure
    (tmp_path / "agent.json").write_text(
        json.dumps({"server": f"http://{OTHER}:{eve.port}", **fields})
    )
    with contextlib.suppress(LinkError):
        locate_broker(Identity.load(tmp_path), timeout_s=0.3)
    wait_until(lambda: SECRET.encode() in eve.heard, lambda: str(eve.heard))


def test_the_rule_is_kept_and_changed_by_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def splitedge(*words: Any) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["splitedge", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        caught = capsys.readouterr()
        return int(left.value.code or 0), caught.out + caught.err

    Identity("https://hub.example:8000", "pi-1", "lab", SECRET).save(tmp_path)
    for rule, allowed in (("allow", True), ("refuse", False)):
        assert splitedge("agent", "insecure", rule, "--state", tmp_path)[0] == 0
        assert Identity.load(tmp_path).insecure is allowed
    with StateLock(tmp_path, "agent"):
        assert "restart it" in splitedge("agent", "insecure", "refuse", "--state", tmp_path)[1]
    url = "http://hub.example:8000"
    words = ("agent", "enroll", "--server", url, "--token", "t", "--state", tmp_path / "new")
    status, said = splitedge(*words)
    assert status != 0
    assert "--server: http://hub.example:8000 is another machine without encryption" in said


def test_server_with_tls_tells_no_address_without(tmp_path: Path) -> None:
    """FAULTS row 13."""
    free = Address("127.0.0.1", 0)

    def settings(public: str, *, insecure: bool = False) -> ServerSettings:
        pair: dict[str, Any] = {"tls_cert": Path("a.pem"), "tls_key": Path("a.key")}
        return ServerSettings(tmp_path, free, free, mqtt_public=public, insecure=insecure, **pair)

    with pytest.raises(ConfigurationError, match=r"--mqtt-public .* mqtts://HOST:PORT"):
        settings("mqtt://hub.example:1883")
    settings("mqtt://hub.example:1883", insecure=True)
    settings("mqtts://hub.example:8883")


def test_no_plain_address_is_told_at_the_port_where_the_broker_speaks_tls(tmp_path: Path) -> None:
    """FAULTS row 13."""
    pair: dict[str, Any] = {"tls_cert": Path("a.pem"), "tls_key": Path("a.key")}
    http, broker = Address("127.0.0.1", 0), Address("0.0.0.0", 18883)

    def settings(public: str) -> ServerSettings:
        return ServerSettings(tmp_path, http, broker, mqtt_public=public, insecure=True, **pair)

    for host in ("127.0.0.1", "localhost", "0.0.0.0"):
        with pytest.raises(ConfigurationError, match=rf"give mqtts://{host}:18883, or"):
            settings(f"mqtt://{host}:18883")
    settings("mqtts://127.0.0.1:18883")
    settings("mqtt://127.0.0.1:18884")  # a proxy's own port
