"""A device whose clock is wrong connects over TLS, to its own authority only."""

from __future__ import annotations

import getpass
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

import pytest

from edge_sdk import installation
from edge_sdk.api import unmeasured_bundles
from edge_sdk.errors import LinkError
from edge_sdk.identity import Identity
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.wire.broker_address import BrokerAddress
from tests.edge.authority import Authority, make_authority
from tests.edge.brokers import Mosquitto
from tests.edge.bundles.depot import Depot
from tests.waiting import is_listening, wait_until

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

SetClock = Callable[[datetime | None], None]
NOW = datetime.now(UTC)
TOMORROW = NOW + timedelta(days=1)
IN_1970 = datetime(1970, 1, 2, tzinfo=UTC)
YEARS_AHEAD = NOW + timedelta(days=3650)


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """Sets this device's clock; None for the right one."""

    def set_to(at: datetime | None) -> None:
        class Set(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> Set:
                return cls.fromtimestamp((at or datetime.now(UTC)).timestamp(), tz)

        monkeypatch.setattr(installation, "datetime", Set)

    return set_to


@pytest.fixture
def tomorrow(tmp_path: Path) -> Authority:
    """An authority whose certificates begin tomorrow: to a clock of 1970, all of them do."""
    return make_authority(tmp_path / "tomorrow", TOMORROW)


@pytest.fixture
def broker(tmp_path: Path, free_port: int, tomorrow: Authority) -> Iterator[BrokerAddress]:
    """A Mosquitto with TLS by that authority."""
    # started by root it would become another user, who cannot read the key
    user = f"user {getpass.getuser()}\n"
    tls = f"{user}certfile {tomorrow.chain}\nkeyfile {tomorrow.chain}\n"
    running = Mosquitto(tmp_path, free_port, tls)
    running.start()
    wait_until(lambda: is_listening(free_port), "Mosquitto does not listen")
    yield BrokerAddress("127.0.0.1", free_port, tls=True)
    running.stop()


def link_to(broker: BrokerAddress, ca: Path) -> MqttLink:
    link = MqttLink(broker, client_id="pi-1", ca=str(ca))
    link.start()
    return link


@pytest.mark.parametrize("at", [IN_1970, YEARS_AHEAD], ids=["1970", "ten years ahead"])
def test_link_over_tls_comes_up_with_a_wrong_clock(
    broker: BrokerAddress, tomorrow: Authority, tmp_path: Path, set_clock: SetClock, at: datetime
) -> None:
    """FAULTS row 12: only the dates are left out; another authority stays refused."""
    set_clock(at)
    link = link_to(broker, tomorrow.ca)
    link.wait_connected(10)
    link.stop()
    other = link_to(broker, make_authority(tmp_path / "other", NOW - timedelta(days=1)).ca)
    wait_until(lambda: "not trusted" in other.last_error, lambda: other.last_error)
    other.stop()


def test_link_follows_a_clock_that_jumps_while_it_lives(
    broker: BrokerAddress, tomorrow: Authority, set_clock: SetClock
) -> None:
    """FAULTS row 12: with a right clock the dates are checked; it falls to 1970, and back."""
    link = link_to(broker, tomorrow.ca)
    wait_until(lambda: "not trusted" in link.last_error, lambda: link.last_error)
    assert not link.connected
    set_clock(IN_1970)
    link.wait_connected(20)
    set_clock(None)
    link.stop()
    again = link_to(broker, tomorrow.ca)
    wait_until(lambda: "not trusted" in again.last_error, lambda: again.last_error)
    again.stop()


def test_api_over_https_answers_a_device_with_a_wrong_clock(
    tmp_path: Path, tomorrow: Authority, set_clock: SetClock
) -> None:
    """FAULTS row 12: enrolment and reports take the same way."""
    depot = Depot(tmp_path / "server", tomorrow.context)
    depot.enrol(tmp_path / "device", tomorrow.ca)
    identity = Identity.load(tmp_path / "device")
    with pytest.raises(LinkError, match="not yet valid"):
        unmeasured_bundles(identity)
    for at in (IN_1970, YEARS_AHEAD):
        set_clock(at)
        with pytest.raises(LinkError, match="404"):  # an answer: this small server has no such page
            unmeasured_bundles(identity)
    depot.close()
