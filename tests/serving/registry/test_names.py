"""Names of devices: many tokens at once, a device that comes back, one that is removed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import select

from server.errors import (
    AuthenticationError,
    BadRequestError,
    TokenError,
    UnknownDeviceError,
)
from server.registry.database import Registry
from server.registry.membership import columns_with_devices


@pytest.fixture
def registry(registry_url: str) -> Iterator[Registry]:
    registry = Registry.open(registry_url)
    yield registry
    registry.close()


def test_tokens_for_many_devices_are_made_at_once(registry: Registry) -> None:
    made = registry.create_tokens(200, "yard", 7 * 86_400.0, "spring")
    assert len(set(made)) == 200
    for number in (0, 199):
        device, _ = registry.redeem_token(made[number], "cam", {})
        assert device.fleet == "yard"
    assert [one.id for one in registry.devices("yard")] == ["cam", "cam-2"]
    with pytest.raises(TokenError):
        registry.redeem_token(made[0], "cam", {})
    (entry,) = registry.trail.entries(what="token.create")
    assert entry.detail == "fleet=yard count=200 note=spring"
    for count in (0, -1, 10_001):
        with pytest.raises(BadRequestError, match="count: expected 1 to 10000 tokens, got"):
            registry.create_tokens(count)


def test_a_device_that_comes_back_keeps_its_name_and_what_was_said_of_it(
    registry: Registry,
) -> None:
    first, lost = registry.redeem_token(registry.create_token("yard"), "pi-4", {"name": "a"})
    registry.tags.add("pi-4", ["canary"])
    registry.capabilities.pin("pi-4", depth=2)
    registry.revoke("pi-4")
    (token,) = registry.create_tokens(1, device="pi-4")
    back, credential = registry.redeem_token(token, "raspberrypi", {"name": "b"})
    assert (back.id, back.fleet, back.tags, back.profile) == (
        *("pi-4", "yard", ("canary",)),
        {"name": "b"},
    )
    assert back.active
    assert registry.capabilities.pinned()["pi-4"].depth == 2
    assert registry.authenticate("pi-4", credential).id == first.id
    with pytest.raises(AuthenticationError):
        registry.authenticate("pi-4", lost)
    assert [one.id for one in registry.devices()] == ["pi-4"]


@pytest.mark.parametrize("revoked", [False, True])
def test_undoing_leaves_a_device_that_comes_back_as_it_was(
    registry: Registry, revoked: bool
) -> None:
    _, old = registry.redeem_token(registry.create_token(), "pi-4", {"name": "a"})
    if revoked:
        registry.revoke("pi-4")
    (token,) = registry.create_tokens(1, device="pi-4")
    was = registry.device("pi-4")
    device, _, before = registry.redeem(token, None, {"name": "b"}, approve=True)
    assert before == was
    registry.undo_enrolment(device, token, before)
    assert registry.device("pi-4") == was
    if not revoked:
        assert registry.authenticate("pi-4", old).id == "pi-4"  # it works on as before
    again, credential = registry.redeem_token(token, None, {})
    assert registry.authenticate(again.id, credential).id == "pi-4"


def test_a_revocation_ends_the_tokens_with_which_a_device_comes_back(registry: Registry) -> None:
    """A token in a drawer must not undo a revocation."""
    registry.redeem_token(registry.create_token(), "pi-4", {})
    registry.redeem_token(registry.create_token(), "pi-5", {})
    (before,) = registry.create_tokens(1, device="pi-4")
    (others,) = registry.create_tokens(1, device="pi-5")
    registry.revoke("pi-4")
    assert not registry.token_works(before)
    with pytest.raises(TokenError):
        registry.redeem_token(before, None, {})
    assert registry.device("pi-4").revoked_at is not None
    (after,) = registry.create_tokens(1, device="pi-4")  # that is how the operator lets it back in
    registry.revoke("pi-4")  # and thinks better of it
    assert not registry.token_works(after)
    assert registry.token_works(others)


def test_a_token_for_a_device_is_one_and_of_its_fleet(registry: Registry) -> None:
    registry.redeem_token(registry.create_token("yard"), "pi-4", {})
    with pytest.raises(BadRequestError, match="one token, for the fleet yard in which pi-4 is"):
        registry.create_tokens(2, device="pi-4")
    with pytest.raises(BadRequestError, match="got 1 for barn"):
        registry.create_tokens(1, "barn", device="pi-4")
    with pytest.raises(UnknownDeviceError, match="pi-9"):
        registry.create_tokens(1, device="pi-9")


def test_a_removed_device_leaves_its_name_and_nothing_else(registry: Registry) -> None:
    _, credential = registry.redeem_token(registry.create_token(), "pi-4", {})
    registry.redeem_token(registry.create_token(), "pi-5", {})
    for name in ("pi-4", "pi-5"):
        registry.reports.note_update(name, None, "digits/1/d2", "no space")
        registry.capabilities.failed(name, "digits/1/d2", "no memory", kind="memory")
        registry.capabilities.pin(name, depth=1)
        registry.membership.ask_to_rotate(name)
    (waiting,) = registry.create_tokens(1, device="pi-4")
    registry.membership.remove("pi-4", who="someone")
    assert [one.id for one in registry.devices()] == ["pi-5"]
    with registry._transactions.reading() as connection:
        for column in columns_with_devices():
            held = connection.scalars(select(column).where(column.is_not(None))).all()
            assert set(held) <= {"pi-5"}, column
    assert registry.membership.refused_bundles("pi-5")
    with pytest.raises(AuthenticationError):
        registry.authenticate("pi-4", credential)
    assert registry.trail.entries(about="pi-4")[0].what == "device.remove"
    with pytest.raises(UnknownDeviceError):
        registry.membership.remove("pi-4")
    # the name is free, and a token that was made for the removed device does not take it over
    other, own = registry.redeem_token(registry.create_token(), "pi-4", {})
    assert other.id == "pi-4"
    assert registry.membership.refused_bundles("pi-4") == {}
    with pytest.raises(TokenError):
        registry.redeem_token(waiting, "raspberrypi", {})
    assert registry.authenticate("pi-4", own).id == "pi-4"
