"""A broker, a scripted server on it, and offloaders that ask it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from edge_sdk.identity import Identity
from edge_sdk.offload.offloader import Offloader
from edge_sdk.wire.broker_address import BrokerAddress
from server.broker.child import BrokerChild
from server.broker.policy import Principal, credential_sha256
from tests.edge.offload.scripted import SECRET, Open, Scripted, wait_until_present


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerChild]:
    child = BrokerChild()
    child.set_principal(Principal("backend", "backend", None, credential_sha256(SECRET)))
    child.start()
    yield child
    child.stop()


@pytest.fixture
def server(broker: BrokerChild) -> Iterator[Scripted]:
    server = Scripted(broker)
    yield server
    server.link.stop()


@pytest.fixture
def offloader(
    broker: BrokerChild, server: Scripted, request: pytest.FixtureRequest
) -> Iterator[Open]:
    """Opens the offloader of a new device, connected and with the server present."""
    opened: list[Offloader] = []

    def start(
        *,
        wait: bool = True,
        port: int | None = None,
        http: str = "http://127.0.0.1:9",
        **other: Any,
    ) -> Offloader:
        device = f"pi-{request.node.name.replace('_', '-')}"[:50].rstrip("-").lower()
        device = "".join(c for c in device if c.isalnum() or c == "-")
        principal = Principal(device, "device", "default", credential_sha256(SECRET))
        broker.set_principal(principal)
        server.device = device
        offloader = Offloader(
            Identity(http, device, "default", SECRET),
            BrokerAddress("127.0.0.1", port or broker.port),
            **{"probe_interval_s": 0.1, **other},
        )
        opened.append(offloader)
        if wait:
            wait_until_present(offloader)
        return offloader

    yield start
    for one in opened:
        one.close()
