"""What is written for Mosquitto, without running it; test_broker_isolation.py runs it."""

from __future__ import annotations

import base64
import hashlib
import json
import stat
from pathlib import Path

import pytest

from edge_sdk.errors import ConfigurationError, LinkError
from edge_sdk.wire.broker_address import BrokerAddress
from server.broker.mosquitto import MosquittoAdmin
from server.broker.mosquitto_files import find_plugin, write_config


def test_listener_limits_and_secrets_are_as_asked(tmp_path: Path) -> None:
    config = write_config(tmp_path / "broker", credential="secret", port=4711, packet_bytes=5_000)
    lines = config.read_text().splitlines()
    assert "listener 4711 127.0.0.1" in lines
    assert "allow_anonymous false" in lines
    assert "max_packet_size 5300" in lines  # room for the topic
    assert "set_tcp_nodelay true" in lines
    security = config.with_name("dynamic-security.json")
    assert stat.S_IMODE(security.stat().st_mode) == 0o600
    assert "secret" not in security.read_text()


def test_password_is_hashed_as_the_plugin_hashes_it(tmp_path: Path) -> None:
    write_config(tmp_path, credential="secret")
    (backend,) = json.loads((tmp_path / "dynamic-security.json").read_text())["clients"]
    salt = base64.b64decode(backend["salt"])
    assert len(salt) == 12
    expected = hashlib.pbkdf2_hmac("sha512", b"secret", salt, backend["iterations"])
    assert base64.b64decode(backend["password"]) == expected


def test_what_no_role_allows_is_refused_to_all(tmp_path: Path) -> None:
    write_config(tmp_path, credential="secret")
    access = json.loads((tmp_path / "dynamic-security.json").read_text())["defaultACLAccess"]
    assert access == {
        "publishClientSend": False,
        "publishClientReceive": False,
        "subscribe": False,
        "unsubscribe": True,
    }


def test_devices_stay_when_it_is_written_again(tmp_path: Path) -> None:
    write_config(tmp_path, credential="secret", port=1)
    security = tmp_path / "dynamic-security.json"
    kept = json.loads(security.read_text())
    kept["clients"].append({"username": "pi-1", "roles": []})
    security.write_text(json.dumps(kept))
    config = write_config(tmp_path, credential="secret", port=2)
    assert "listener 2 127.0.0.1" in config.read_text()
    assert json.loads(security.read_text()) == kept


def test_another_credential_than_the_one_in_force_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, credential="secret")
    with pytest.raises(ConfigurationError, match="another credential"):
        write_config(tmp_path, credential="other")


def test_clear_text_off_loopback_must_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--insecure"):
        write_config(tmp_path, credential="secret", host="0.0.0.0")
    config = write_config(tmp_path, credential="secret", host="0.0.0.0", insecure=True)
    assert "listener 1883 0.0.0.0" in config.read_text()


def test_tls_needs_both_files(tmp_path: Path) -> None:
    pem, key = tmp_path / "broker.pem", tmp_path / "broker.key"
    with pytest.raises(ConfigurationError, match="one of them"):
        write_config(tmp_path, credential="secret", certificate=pem)
    config = write_config(
        tmp_path, credential="secret", host="192.0.2.1", certificate=pem, key=key
    ).read_text()
    assert f"certfile {pem}\nkeyfile {key}\n" in config


def test_plugin_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "plugin.so"
    with pytest.raises(ConfigurationError, match=str(missing)):
        write_config(tmp_path, credential="secret", plugin=missing)


def test_plugin_is_found_in_the_first_place_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = tmp_path / "a", tmp_path / "b"
    places[1].mkdir()
    monkeypatch.setattr(
        "server.broker.mosquitto_files.PLUGIN_FOLDERS", [str(place) for place in places]
    )
    with pytest.raises(ConfigurationError, match="install Mosquitto"):
        find_plugin()
    plugin = places[1] / "mosquitto_dynamic_security.so"
    plugin.touch()
    assert find_plugin() == plugin


def test_broker_that_is_away_is_reported(free_port: int) -> None:
    address = BrokerAddress("127.0.0.1", free_port)
    admin = MosquittoAdmin(address, credential="secret", timeout_s=0.3)
    with pytest.raises(LinkError, match=str(free_port)):
        admin.start()
    with pytest.raises(LinkError, match="away"):
        admin.set_device("lab", "pi-1", "secret")


def test_device_cannot_take_the_name_of_the_backend(free_port: int) -> None:
    admin = MosquittoAdmin(BrokerAddress("127.0.0.1", free_port), credential="secret")
    with pytest.raises(ConfigurationError, match="the server has this name"):
        admin.set_device("lab", "backend", "secret")
