"""A device in Home Assistant: a real agent, a real server, and a real Mosquitto between them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from edge_sdk import AgentSettings, EdgeAgent
from edge_sdk.errors import ConfigurationError, StorageError
from edge_sdk.home_assistant.address import HomeAddress
from edge_sdk.home_assistant.discovery import Topics
from edge_sdk.home_assistant.reporter import HomeReporter
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.mqtt.messages import Message
from edge_sdk.wire.broker_address import BrokerAddress
from edge_sdk.wire.messages import new_id
from tests.commands import Splitedge
from tests.edge.brokers import Mosquitto
from tests.reader import Document, Reader, environment
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.edge.digits import Digits
    from tests.edge.fleet import Fleet

DOCUMENT = Document("docs/home-assistant.md")
WRITTEN = "mqtt://USER:PASSWORD@homeassistant.local"

pytestmark = [pytest.mark.broker, pytest.mark.deadline]


class Home:
    """A client that listens and speaks as Home Assistant does."""

    def __init__(self, broker: BrokerAddress) -> None:
        self._newest: dict[str, bytes] = {}
        self._count: dict[str, int] = {}
        self.link = MqttLink(broker, client_id="home", username="")
        for topics in ("homeassistant/#", "splitedge/home/#"):
            self.link.subscribe(topics, self._take)
        self.link.start()
        self.link.wait_connected(10)

    def _take(self, message: Message) -> None:
        self._newest[message.topic] = message.payload
        self._count[message.topic] = self._count.get(message.topic, 0) + 1

    def newest(self, topic: str) -> bytes:
        return self._newest.get(topic, b"")

    def count(self, topic: str) -> int:
        return self._count.get(topic, 0)

    def state(self, topics: Topics) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.newest(topics.state) or b"{}")
        return found

    def wait(self, topics: Topics, **values: Any) -> dict[str, Any]:
        """Wait until the device shows these values."""
        wait_until(
            lambda: values.items() <= self.state(topics).items(),
            lambda: (values, self.state(topics)),
        )
        return self.state(topics)


def device(fleet: Fleet) -> tuple[Path, Topics]:
    """State folder and topics of a new device."""
    name = f"home-{new_id()[:8]}"
    return fleet.device(name), Topics.of(name)


@pytest.fixture
def home(mosquitto: Mosquitto) -> Iterator[Home]:
    home = Home(mosquitto.address)
    yield home
    home.link.stop()


def test_a_device_appears_answers_and_is_switched(
    fleet: Fleet, digits: Digits, mosquitto: Mosquitto, home: Home
) -> None:
    state, topics = device(fleet)
    address = HomeAddress(mosquitto.address, "Front door", every_s=60)
    asks = AgentSettings(threshold=-1.0, deadline_s=5.0)  # it would ask about everything
    with EdgeAgent.open(state, asks) as agent:
        with HomeReporter(agent, address) as reporter:
            agent.add_observer(reporter)
            wait_until(lambda: home.newest(topics.availability) == b"online", "it is not there")
            about = json.loads(home.newest(topics.discovery))
            assert about["device"]["name"] == "Front door"
            assert about["components"]["answer"]["options"] == list(agent.manifest.class_names)
            first = home.wait(topics, offloading="ON", answer=None, bundle="digits/1/d2")
            assert (first["confidence"], first["exit_rate"]) == (None, None)

            answer = agent.predict(digits.x[0])
            assert answer.source == "server"
            shown = home.wait(topics, answer=answer.class_name, source="server", server="ON")
            assert shown["confidence"] == round(100 * float(answer.probabilities.max()), 1)
            assert shown["exit_rate"] == 0.0

            home.link.publish(topics.command, b"OFF")
            home.wait(topics, offloading="OFF")
            assert not agent.offloading
            answer = agent.predict(digits.x[1])
            assert (answer.source, answer.reason) == ("device", "")
            home.wait(topics, source="device", exit_rate=None)  # it asks nobody: no exit

            # another Home Assistant has started: it knows of no device
            known = home.count(topics.discovery)
            home.link.publish(topics.birth, b"online")
            wait_until(lambda: home.count(topics.discovery) > known, "it is not announced again")
            assert reporter.report()["connected"] is True
        wait_until(lambda: home.newest(topics.availability) == b"offline", "it did not say goodbye")

    with EdgeAgent.open(state, asks) as agent, HomeReporter(agent, address):
        # not the state that the run before left at the broker
        wait_until(lambda: home.newest(topics.availability) == b"online", "it is not there again")
        home.wait(topics, offloading="OFF", answer=None)  # the restart left it off
        home.link.publish(topics.command, b"ON")
        home.wait(topics, offloading="ON")
        assert agent.predict(digits.x[0]).source == "server"


def test_a_broker_that_restarts_gets_the_device_again(
    fleet: Fleet, mosquitto: Mosquitto, home: Home
) -> None:
    state, topics = device(fleet)
    alone = AgentSettings(offload=False)
    with EdgeAgent.open(state, alone) as agent, HomeReporter(agent, HomeAddress(mosquitto.address)):
        wait_until(lambda: home.newest(topics.availability) == b"online", "it is not there")
        assert json.loads(home.newest(topics.discovery))["device"]["name"] == state.name
        before = home.count(topics.discovery)
        mosquitto.stop()
        mosquitto.start()
        wait_until(lambda: home.count(topics.discovery) > before, "it did not come back")


def test_the_document_shows_a_device_and_a_kill_makes_it_unavailable(
    fleet: Fleet, digits: Digits, mosquitto: Mosquitto, home: Home, tmp_path: Path
) -> None:
    state, topics = device(fleet)
    state.rename(tmp_path / "pi")
    (tmp_path / "pictures").mkdir()
    np.save(tmp_path / "pictures" / "a.npy", digits.x[3])
    script = DOCUMENT.snippet("run").replace(WRITTEN, mosquitto.address.url)
    agent = subprocess.Popen(
        ["bash", "-euc", f"exec {script.strip()} --smooth majority:3 --threshold 100"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: home.state(topics).get("answer"), "no answer is shown", 30)
        home.wait(topics, source="device", offloading="ON")
        assert json.loads(home.newest(topics.discovery))["device"]["name"] == "Front door"
        said = Reader(tmp_path).shell(DOCUMENT.snippet("switch")).splitlines()
        off = f"{state.name}: offloading is off: the device answers every input alone"
        assert said == [off, off, f"{state.name}: offloading is on"]
        home.wait(topics, offloading="ON")
    finally:
        agent.kill()
        agent.wait(10)
    wait_until(lambda: home.newest(topics.availability) == b"offline", "the broker said nothing")


def test_confidence_is_that_of_the_class_that_smoothing_shows(
    digits: Digits, mosquitto: Mosquitto, home: Home
) -> None:
    folder = digits.models / "digits" / "1" / "bundles" / "d2"
    with (
        EdgeAgent.from_bundle(folder) as agent,
        HomeReporter(agent, HomeAddress(mosquitto.address, "Front door")) as reporter,
    ):
        agent.add_observer(reporter)
        answer = agent.predict(digits.x[0])
        percents = [round(100 * float(share), 1) for share in answer.probabilities]
        topics = Topics.of("digits")
        home.wait(topics, answer=answer.class_name, confidence=percents[answer.label])
        other = (answer.label + 1) % 10
        assert percents[other] != percents[answer.label]
        reporter.smoothed({"smoothed_label": other, "smoothed_class_name": str(other)})
        home.wait(topics, answer=str(other), confidence=percents[other])


def test_the_switch_works_without_a_running_agent_and_on_a_full_disk(
    fleet: Fleet, digits: Digits, splitedge: Splitedge
) -> None:
    state, _ = device(fleet)
    assert splitedge("agent", "offloading", "off", "--state", state, "--json").json == {
        "device": state.name,
        "offloading": False,
    }
    asks = AgentSettings(threshold=-1.0, deadline_s=20.0)
    with EdgeAgent.open(state, asks) as agent:
        assert agent.predict(digits.x[0]).source == "device"
        assert agent.status().bytes_up == 0
        blocked = state / ".offloading.json.tmp"
        blocked.mkdir()  # no file can be written there
        with pytest.raises(StorageError, match="on until the agent ends, but not later"):
            agent.offloading = True
        assert agent.predict(digits.x[0]).source == "server"
        blocked.rmdir()
    (state / "offloading.json").write_text("{")  # not readable: it asks nobody
    with EdgeAgent.open(state, asks) as agent:
        assert not agent.status().offloading
    alone = EdgeAgent.open(state, AgentSettings(offload=False))
    with alone, pytest.raises(ConfigurationError, match="opened without a server"):
        alone.offloading = True
    (state / "offloading.json").unlink()
    with EdgeAgent.open(state, AgentSettings(offload=False)) as agent:
        agent.offloading = False  # a later run shall send nothing
    with EdgeAgent.open(state, asks) as agent:
        assert agent.predict(digits.x[0]).source == "device"
