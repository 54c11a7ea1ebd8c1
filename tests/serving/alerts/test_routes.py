"""Routes of alerts: who may read them, what they show, and a silence by a key of an operator."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from edge_sdk.wire.address import Address
from profiles import load_reference
from server.app import create_app
from server.registry.alerts.alert import Changes, Finding
from server.registry.operator import load_or_create_operator_secret
from server.services import Services
from server.settings import ServerSettings

FREE = Address("127.0.0.1", 0)


class Api:
    """The API of a server that is not started: its registry has a device and three alerts."""

    def __init__(self, state: Path) -> None:
        self.services = Services(ServerSettings(state, FREE, FREE, threads=1))
        registry = self.services.registry
        secret = registry.redeem_token(
            registry.create_token(), "pi-1", load_reference("raspberry-pi-4").to_dict()
        )[1]
        self.device = f"pi-1:{secret}"
        operator = load_or_create_operator_secret(state)
        self.services.operator_sha256 = hashlib.sha256(operator.encode()).hexdigest()
        self.operator = f"operator:{operator}"
        findings = [
            Finding("silent", "pi-1", "last heard long ago"),
            Finding("drift", "pi-1", "less sure"),
            Finding("training", "yard 2.toml", "it stands still"),
        ]
        opened, _ = registry.alerts.apply(Changes(opening=findings))
        registry.alerts.apply(Changes(closing=opened[1:2]))
        self.client = TestClient(create_app(self.services))

    def call(
        self, method: str, path: str = "", body: Any = None, who: str | None = None
    ) -> tuple[int, Any]:
        login = self.operator if who is None else who
        headers = {"Authorization": f"Bearer {login}"} if login else {}
        reply = self.client.request(method, f"/api/v1/alerts{path}", json=body, headers=headers)
        return reply.status_code, reply.json()

    def kinds(self, path: str = "") -> list[str]:
        status, answer = self.call("GET", path)
        assert status == 200, answer
        return [alert["kind"] for alert in answer["alerts"]]


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    made = Api(tmp_path / "server")
    yield made
    made.client.close()
    made.services.alerts.close()
    made.services.registry.close()


def test_open_alerts_are_shown_and_the_closed_ones_where_they_are_asked_for(api: Api) -> None:
    assert api.kinds() == ["silent", "training"]
    assert api.kinds("?limit=1") == ["silent"]
    assert api.kinds("?closed=true") == ["training", "drift", "silent"]
    assert api.kinds("?closed=true&limit=1") == ["training"]
    (first, _) = api.call("GET")[1]["alerts"]
    assert set(first) == {
        *("id", "kind", "about", "text", "level", "opened_at", "closed_at", "silenced_until")
    }
    assert (first["about"], first["closed_at"], first["silenced_until"]) == ("pi-1", None, None)


@pytest.mark.parametrize("path", ["?limit=0", "?limit=10001", "?closed=perhaps", "?about=pi-1"])
def test_a_question_that_means_nothing_is_refused(api: Api, path: str) -> None:
    assert api.call("GET", path)[0] in (400, 422)


def test_nobody_but_an_operator_reads_or_silences(api: Api) -> None:
    silence = {"about": "pi-1", "seconds": 60}
    for who, status in (("", 401), ("operator:guess", 401), (api.device, 403)):
        assert api.call("GET", who=who)[0] == status
        assert api.call("POST", "/silence", silence, who=who)[0] == status
    keys = api.services.registry.keys
    secrets = {scope: keys.create((scope,))[1] for scope in ("infer", "operate")}
    assert api.call("GET", who=secrets["infer"])[0] == 403
    assert api.call("POST", "/silence", silence, who=secrets["operate"])[0] == 200
    (entry,) = api.services.registry.trail.entries(what="alert.silence")
    assert entry.detail == "pi-1: silent for 60 s"
    assert entry.who != "operator", "the key is named"


def test_a_silence_is_set_and_ended(api: Api) -> None:
    status, answer = api.call("POST", "/silence", {"about": "yard 2.toml", "seconds": 3600})
    assert status == 200
    (alert,) = answer["alerts"]
    assert alert["silenced_until"] > alert["opened_at"] + 3599
    assert api.kinds() == ["silent", "training"]  # it is shown all the same
    _, answer = api.call("POST", "/silence", {"about": "yard 2.toml", "seconds": 0})
    assert answer["alerts"][0]["silenced_until"] is None


@pytest.mark.parametrize(
    "body",
    [
        {"about": "pi-2", "seconds": 60},  # no alert
        {"about": "pi-1", "kind": "drift", "seconds": 60},  # closed
        {"about": "pi-1", "seconds": -1},
        {"about": "pi-1", "seconds": 1e9},
        {"about": "", "seconds": 60},
        {"about": "pi-1\nforged", "seconds": 60},
        {"about": "pi-1"},
        {"about": "pi-1", "seconds": 60, "who": "me"},
    ],
)
def test_a_silence_of_nothing_is_refused(api: Api, body: dict[str, Any]) -> None:
    status, answer = api.call("POST", "/silence", body)
    assert status in (400, 422), answer
    assert api.call("GET")[1]["alerts"][0]["silenced_until"] is None
