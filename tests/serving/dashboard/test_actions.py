"""Actions of the dashboard: they do what the API does, in the name of who signed in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from server.registry.alerts.alert import Changes, Finding
from server.registry.credentials import token_secret

if TYPE_CHECKING:
    from tests.serving.dashboard.conftest import World

ANNA = "operator:anna"


@pytest.fixture(autouse=True)
def _signed_in(world: World) -> None:
    world.sign_in("anna")


def test_devices_are_let_in_refused_and_shut_out(world: World) -> None:
    for name in ("pi-1", "pi-2"):
        world.enrol(name, approve=True)
    assert world.act("devices/pi-1/approve").json() == {"done": "pi-1 is let in"}
    assert world.last_change() == (ANNA, "device.approve", "pi-1")
    assert world.act("devices/pi-2/reject").status_code == 200
    assert world.last_change() == (ANNA, "device.reject", "pi-2")
    assert world.act("devices/pi-1/rotate").status_code == 200
    assert world.last_change() == (ANNA, "device.rotate", "pi-1")
    assert world.act("devices/pi-1/revoke").status_code == 200
    assert world.last_change() == (ANNA, "device.revoke", "pi-1")
    assert world.cut_off == ["pi-2", "pi-1"]
    refused = world.act("devices/pi-1/rotate")
    assert (refused.status_code, "revoked" in refused.json()["error"]) == (409, True)
    assert world.act("devices/nobody/revoke").status_code == 404


def test_a_device_is_renamed(world: World) -> None:
    world.enrol("pi-1")
    done = world.act("devices/pi-1/rename", {"title": "Gate"})
    assert done.json() == {"done": "pi-1 is called Gate"}
    assert world.last_change() == (ANNA, "device.rename", "pi-1 title=Gate")
    assert world.act("devices/pi-1/rename", {"title": "Gate\n"}).status_code == 200
    refused = world.act("devices/pi-1/rename", {"title": "Ga\nte"})
    assert (refused.status_code, "line breaks" in refused.json()["error"]) == (400, True)


def test_a_device_is_pinned_and_tries_a_refused_bundle_again(world: World) -> None:
    world.enrol("pi-1")
    assert world.act("devices/pi-1/pin", {"bundle": "digits/1/d2"}).status_code == 200
    assert world.last_change() == (ANNA, "device.pin", "pi-1 digits/1/d2")
    assert world.act("devices/pi-1/unpin").status_code == 200
    assert world.last_change() == (ANNA, "device.unpin", "pi-1")
    assert world.chosen == ["pi-1", "pi-1"]
    world.registry.reports.note_update("pi-1", "digits/1/d2", "digits/2/d2", "too slow")
    assert world.act("devices/pi-1/lift", {"bundle": "digits/2/d2"}).status_code == 200
    assert world.last_change() == (ANNA, "quarantine.lift", "pi-1 digits/2/d2")


def test_models_move(world: World) -> None:
    for version in (1, 2):
        world.registry.catalogue.publish("digits", version)
    assert world.act("models/digits/activate", {"version": 1}).status_code == 200
    assert world.last_change() == (ANNA, "model.activate", "digits/1")
    assert world.act("models/digits/rollback").status_code == 200
    assert world.last_change() == (ANNA, "model.activate", "digits/2")
    assert world.act("fleets/yard/assign", {"model": "digits", "version": 1}).status_code == 200
    assert world.last_change() == (ANNA, "fleet.assign", "yard model=digits/1")
    assert world.act("models/digits/activate", {"version": 9}).status_code == 404


def test_a_roll_out_is_started_paused_and_aborted(world: World) -> None:
    for version in (1, 2):
        world.registry.catalogue.publish("digits", version)
    world.registry.catalogue.activate("digits", 1)
    world.enrol("pi-1")
    body = {"model": "digits", "version": 2, "shares": [0.5, 1.0], "health": "fallback<5%"}
    assert world.act("rollouts", body).status_code == 200
    (rollout,) = world.facts("rollouts")["rollouts"]
    assert (rollout["who"], rollout["state"], rollout["version"]) == (ANNA, "running", "digits/2")
    number = rollout["id"]
    for step in ("pause", "resume", "abort"):
        assert world.act(f"rollouts/{number}/{step}").status_code == 200
        assert world.last_change()[0] == ANNA
    assert world.act(f"rollouts/{number}/abort").status_code == 409
    assert world.act("rollouts", {**body, "shares": [1.0, 0.5]}).status_code == 400
    assert world.act("rollouts/99/pause").status_code == 404


def test_an_alert_is_shown_and_silenced(world: World) -> None:
    finding = Finding("silent", "pi-1", "nothing was heard for 5 minutes")
    world.registry.alerts.apply(Changes(opening=[finding]))
    body = {"kind": "silent", "about": "pi-1", "seconds": 60}
    assert world.act("alerts/silence", body).status_code == 200
    assert world.last_change()[0] == ANNA
    (shown,) = world.facts("alerts")
    assert (shown["text"], shown["closed_at"]) == (finding.text, None)
    assert shown["silenced_until"] > shown["opened_at"]
    assert world.act("alerts/silence", {**body, "about": "pi-2"}).status_code == 400


def test_a_token_of_the_dashboard_enrols_a_device(world: World) -> None:
    made = world.act("tokens", {"fleet": "yard"}).json()
    assert world.registry.token_works(token_secret(made["token"]))
    assert (world.last_change()[1], made["fleet"]) == ("token.create", "yard")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("devices/pi-1/pin", {}),
        ("devices/pi-1/pin", {"bundle": 1}),
        ("devices/pi-1/pin", {"bundle": "digits/1/d2", "more": True}),
        ("tokens", {"fleet": "No Fleet"}),
        ("models/digits/activate", {"version": 0}),
    ],
)
def test_a_body_that_no_page_sends_is_refused(world: World, path: str, body: object) -> None:
    world.enrol("pi-1")
    assert world.act(path, body).status_code == 400
