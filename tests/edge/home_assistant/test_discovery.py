"""What a device tells Home Assistant about itself, against the schema of its MQTT integration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from edge_sdk.errors import ConfigurationError
from edge_sdk.home_assistant.address import HomeAddress
from edge_sdk.home_assistant.discovery import (
    Described,
    State,
    Topics,
    discovery_message,
    read_command,
)
from edge_sdk.home_assistant.reporter import ExitRate
from edge_sdk.wire.broker_address import BrokerAddress

FIXTURES = Path(__file__).parents[2] / "fixtures" / "home-assistant"
TOPICS = Topics.of("pi-4")
DIGITS = tuple("0123456789")
STATE = State("3", 98.2, "device", 55.0, 0.3, "digits/1/d2", True, False)


def message(class_names: tuple[str, ...] = DIGITS, *, switchable: bool = True) -> dict[str, Any]:
    about = Described("pi-4", "Door", "digits/1/d2", class_names, switchable, "0.1.0")
    return discovery_message(about, TOPICS)


@pytest.fixture(scope="module")
def schema() -> Any:
    text = (FIXTURES / "device-discovery.schema.json").read_text()
    return jsonschema_rs.validator_for(json.loads(text))


@pytest.mark.parametrize("switchable", [True, False])
@pytest.mark.parametrize("names", [DIGITS, ("same", "same"), ("unknown", "cat"), ("x" * 300, "y")])
def test_home_assistant_takes_the_description(
    schema: Any, names: tuple[str, ...], switchable: bool
) -> None:
    found = message(names, switchable=switchable)
    schema.validate(found)
    assert TOPICS.discovery == "homeassistant/device/splitedge_pi-4/config"
    ids = [each["unique_id"] for each in found["components"].values() if len(each) > 1]
    assert len(set(ids)) == len(ids)
    # names that Home Assistant would take for states of its own, or twice, are plain text
    assert ("options" in found["components"]["answer"]) == (names == DIGITS)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("answer", {"unit_of_measurement": "%"}),  # refused for an enumeration
        ("latency", {"unit_of_measurement": "%"}),
        ("latency", {"expires_after": 5}),  # dropped in silence by Home Assistant
        ("offloading", {"command_topic": "a/+"}),
        ("source", {"unique_id": None}),
    ],
)
def test_the_schema_finds_faults(schema: Any, key: str, change: dict[str, Any]) -> None:
    found = message()
    found["components"][key] |= change
    assert not schema.is_valid(found)


def test_without_a_server_the_entities_of_offloading_are_removed() -> None:
    found = message(switchable=False)["components"]
    assert (found["server"], found["offloading"]) == (
        {"platform": "binary_sensor"},
        {"platform": "switch"},
    )


def test_every_template_finds_its_value() -> None:
    values = STATE.message()
    for entity in message()["components"].values():
        key = entity["value_template"].removeprefix("{{ value_json.").removesuffix(" }}")
        assert key in values
    assert values["offloading"] == "OFF"
    assert (values["server"], values["problem"]) == ("ON", "OFF")


def test_the_exit_rate_is_of_the_last_five_minutes() -> None:
    rate = ExitRate()
    assert rate.percent(0.0, 0, 0) is None
    assert rate.percent(10.0, 8, 10) == 80.0
    assert rate.percent(20.0, 8, 20) == 40.0
    assert rate.percent(310.0, 8, 20) == 0.0  # since 10 s: 0 of 10
    assert rate.percent(330.0, 8, 20) is None  # since 20 s: none
    assert ExitRate().percent(0.0, 3, 4) == 75.0  # the answers before the first report


def test_the_exit_rate_leaves_out_answers_with_offloading_switched_off() -> None:
    rate = ExitRate()
    assert rate.percent(0.0, 5, 10) == 50.0
    rate.leave_out(10.0, 105, 110)
    assert rate.percent(20.0, 106, 114) == 25.0


@pytest.mark.parametrize(
    ("payload", "on"), [(b"ON", True), (b"OFF", False), (b"off", False), (b"", None), (b"1", None)]
)
def test_commands(payload: bytes, on: bool | None) -> None:
    assert read_command(payload) is on


def test_the_address_has_the_login_and_the_options() -> None:
    text = "mqtt://me:p%40ss@ha.local:1884?name=Front door&every=30&prefix=ha/x&birth=ha/up"
    found = HomeAddress.parse(text, Path("/base"))
    broker = BrokerAddress("ha.local", 1884, username="me", password="p@ss")
    assert found == HomeAddress(broker, "Front door", 30, "ha/x", "ha/up")
    secure = HomeAddress.parse("mqtts://ha/?ca=ca.pem", Path("/base"))
    assert (secure.broker.port, secure.ca) == (8883, Path("/base/ca.pem"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ha.local", "expected the URL of its broker, as in mqtt://"),
        ("http://me:secret@ha.local", "home assistant http://ha.local: expected the URL"),
        ("mqtt://ha.local/topic", "expected a host without a topic"),
        ("mqtt://me:secret@ha:port", "broker URL"),
        ("mqtt://me:se/cret@ha.local", "expected a host without a topic"),
        ("mqtt://me:se@cret@ha.local/x", "of a password are written %2F %40 %3A %3F"),
        ("mqtt://me:1?cret@ha.local", "mqtt://ha.local: expected key=value after '?' and '&';"),
        ("mqtt://me:1?every=cret@ha.local", "every: expected a whole number of at least 1;"),
        ("mqtt://me:1?cret=a@ha.local", "expected options name, every, prefix, birth, ca;"),
        ("mqtt://me:cret?name=a@ha.local", "expected a host and a port"),
        ("mqtt://ha?every=0", "every: expected a whole number of at least 1"),
        ("mqtt://ha?prefix=a/#", "prefix: expected a topic without"),
        ("mqtt://ha?names=a", "expected options name, every, prefix, birth, ca"),
    ],
)
def test_a_wrong_address_is_named_without_its_login(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as fault:
        HomeAddress.parse(text, Path())
    assert message in str(fault.value)
    assert "cret" not in str(fault.value)
    assert "me:" not in str(fault.value)
