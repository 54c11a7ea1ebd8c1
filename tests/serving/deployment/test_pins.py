"""Pins of devices are followed, also after a failure and after a time without a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server.deployment.assignment import Assigner
from server.registry.database import Registry, open_registry


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """With the devices pi-1 to pi-3."""
    opened = open_registry(tmp_path)
    for number in (1, 2, 3):
        opened.redeem_token(opened.create_token(), f"pi-{number}", {})
    yield opened
    opened.close()


def test_a_pin_made_while_the_server_was_stopped_is_followed(registry: Registry) -> None:
    registry.capabilities.pin("pi-1", depth=2)
    assigner = _assigner(registry)
    assert _followed(assigner) == ["pi-1"]
    assert _followed(assigner) == []
    registry.capabilities.unpin("pi-1")
    registry.capabilities.pin("pi-2", bundle="m/1/d1")
    assert _followed(assigner) == ["pi-1", "pi-2"]
    assert _followed(assigner) == []


def test_a_pin_is_followed_again_after_a_failure(registry: Registry) -> None:
    assigner = _assigner(registry)
    for number in (1, 2, 3):
        registry.capabilities.pin(f"pi-{number}", depth=1)

    def fail_on_second(device: str) -> None:
        if device == "pi-2":
            raise OSError("the database is away")

    with pytest.raises(OSError, match="away"):
        assigner.follow_pins(fail_on_second)
    assert _followed(assigner) == ["pi-2", "pi-3"]


def _assigner(registry: Registry) -> Assigner:
    return Assigner(
        registry, wanted=lambda _: None, published=lambda _name, _version: None, rule="budget"
    )


def _followed(assigner: Assigner) -> list[str]:
    found: list[str] = []
    assigner.follow_pins(found.append)
    return found
