"""Steps with a server in the test's process: a device enrols, the housekeeper has its turn."""

from __future__ import annotations

import pytest

from edge_sdk.wire.address import Address
from profiles import load_reference
from server.services import Services
from tests.waiting import wait_until

FREE = Address("127.0.0.1", 0)


def enrol(services: Services, name: str, reference: str = "raspberry-pi-4") -> str:
    """A device as the route enrols it; its credential."""
    token = services.registry.create_token()
    profile = load_reference(reference).to_dict()
    device, credential = services.registry.redeem_token(token, name, profile)
    services.admit(device, credential)
    return credential


def wait_turns(services: Services, monkeypatch: pytest.MonkeyPatch, count: int = 1) -> None:
    """Wait until the housekeeper has begun and ended so many turns from now."""
    ended: list[bool] = []
    last_duty = services._keep_signed

    def counted() -> None:
        last_duty()
        ended.append(True)

    with monkeypatch.context() as patch:
        patch.setattr(services, "_keep_signed", counted)
        # the first to end may have begun before
        wait_until(lambda: len(ended) > count, "the housekeeper has no turn")
