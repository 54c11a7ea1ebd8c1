"""Fixtures of the device's tests: exports of the digits, a fleet, and a faulty network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.edge.brokers import Mosquitto
from tests.edge.digits import Digits, export_digits
from tests.edge.fault_proxy import FaultProxy
from tests.edge.fleet import Fleet


@pytest.fixture(scope="session")
def digits(
    tmp_path_factory: pytest.TempPathFactory, train_centrally: Callable[..., None]
) -> Digits:
    """The network on the digits, trained and exported once."""
    return export_digits(tmp_path_factory.mktemp("digits") / "models", train_centrally)


@pytest.fixture(scope="session")
def fleet(digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A server; each test repairs what it breaks."""
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), digits.models)
    yield fleet
    fleet.stop()


@pytest.fixture
def proxy(fleet: Fleet) -> Iterator[FaultProxy]:
    """A proxy between a device and the broker."""
    proxy = FaultProxy(fleet.broker_port)
    yield proxy
    proxy.close()


@pytest.fixture
def mosquitto(tmp_path: Path, free_port: int) -> Iterator[Mosquitto]:
    """A broker of the user's own."""
    broker = Mosquitto(tmp_path, free_port)
    broker.start()
    yield broker
    broker.stop()


@pytest.fixture
def make_proxy() -> Iterator[Callable[[int], FaultProxy]]:
    """Makes a proxy for a port."""
    made: list[FaultProxy] = []

    def make(port: int) -> FaultProxy:
        made.append(FaultProxy(port))
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()
