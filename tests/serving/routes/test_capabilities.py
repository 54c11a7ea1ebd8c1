"""Reports of a device over the public API move it, once; the operator's pin comes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fastapi.testclient import TestClient

from edge_sdk.wire.address import Address
from edge_sdk.wire.broker_address import BrokerAddress
from profiles import load_reference
from server.app import create_app
from server.registry.database import Registry
from server.registry.operator import load_or_create_operator_secret
from server.registry.records import Pin
from server.services import Services
from server.settings import ServerSettings

if TYPE_CHECKING:
    from tests.serving.conftest import Device, Exported

FREE = Address("127.0.0.1", 0)
UPDATE = {"op": "update"}

pytestmark = pytest.mark.broker


class World:
    """A running server with `digits/1` (depths 1, 2, 4), its API, and its devices."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.services = Services(ServerSettings(state, FREE, FREE, threads=1))
        self.services.start()
        self.client = TestClient(create_app(self.services))
        self.credentials: dict[str, str] = {}
        self.name = ""  # of the present test's device

    def enrol(self, name: str) -> str:
        registry = self.services.registry
        profile = load_reference("jetson-orin-nano").to_dict()
        device, secret = registry.redeem_token(registry.create_token(), name, profile)
        self.services.admit(device, secret)
        self.credentials[name] = secret
        self.services.assign(device)
        return secret

    def call(self, method: str, path: str, body: Any = None, *, who: str = "") -> Any:
        who = who or self.name
        secret = self.credentials.get(who) or load_or_create_operator_secret(self.state)
        return self.client.request(
            method,
            f"/api/v1/devices/{self.name}/{path}",
            json=body,
            headers={"Authorization": f"Bearer {who}:{secret}"},
        )

    def told(self, method: str, path: str, body: Any = None, *, who: str = "") -> Any:
        answer = self.call(method, path, body, who=who)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def world(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    state = tmp_path_factory.mktemp("capabilities") / "server"
    exported.install(state / "models")
    made = World(state)
    yield made
    made.services.stop()


@pytest.fixture
def pi(world: World, device: Callable[..., Device]) -> Device:
    """A new device, at the depth that its estimate gives it: 4."""
    name = world.name = f"pi-{len(world.credentials)}"
    secret = world.enrol(name)
    assert world.services.registry.device(name).bundle == "digits/1/d4"
    broker = BrokerAddress.parse(world.services.broker_address()["url"])
    return device(broker, name, secret)


def measurement(bundle: str, latency_ms: float) -> dict[str, Any]:
    graph = {"latency_ms": latency_ms, "memory_bytes": 10_000_000, "runs": 9}
    return {
        "bundle": bundle, "graphs": {"exit": graph}, "score_gflops": 4.0,
        "memory_bytes": 10_000_000,
    }  # fmt: skip


def test_a_measured_depth_that_is_too_slow_is_left_at_once(world: World, pi: Device) -> None:
    assert world.told("PUT", "measurements", measurement("digits/1/d2", 10.0)) == {
        "bundle": "digits/1/d4"
    }
    moved = world.told("PUT", "measurements", measurement("digits/1/d4", 70.0))
    assert moved == {"bundle": "digits/1/d2"}
    pi.wait(lambda: pi.commands)
    assert pi.commands == [UPDATE]  # told once: the first report changed nothing
    known = world.told("GET", "capability", who="operator")
    assert [each["bundle"] for each in known["measurements"]] == ["digits/1/d2", "digits/1/d4"]
    assert world.told("GET", "assignment") == {"bundle": "digits/1/d2"}


def test_conditions_move_a_device_and_do_not_make_it_flap(world: World, pi: Device) -> None:
    for depth, milliseconds in ((1, 5.0), (2, 10.0), (4, 20.0)):
        world.told("PUT", "measurements", measurement(f"digits/1/d{depth}", milliseconds))
    gone: list[str] = []
    # the present depth's own latency, as an agent reports it while its processor gets slower and
    # faster: 2.5 and 2.6 times, 2.2 times, as measured
    for bundle, latency_ms in (
        ("digits/1/d4", 49.0),
        ("digits/1/d4", 52.0),
        ("digits/1/d2", 26.0),
        ("digits/1/d2", 22.0),
        ("digits/1/d2", 26.0),
        ("digits/1/d2", 10.0),
    ):
        found = {"bundle": bundle, "latency_ms": latency_ms}
        gone.append(world.told("PUT", "conditions", found)["bundle"][-2:])
    # fast enough for depth 4 at the end, which it has just left
    assert gone == ["d4", "d2", "d2", "d2", "d2", "d2"]
    (left,) = world.told("GET", "capability")["failures"]
    assert (left["kind"], left["held_until"]) == ("conditions", left["failed_at"] + 600)
    with world.services.registry._transactions.writing() as connection:
        connection.exec_driver_sql("UPDATE failures SET failed_at = failed_at - 600")
    assert world.told("PUT", "conditions", found) == {"bundle": "digits/1/d4"}
    pi.wait(lambda: pi.commands[1:])
    assert pi.commands == [UPDATE, UPDATE]


def test_a_failure_holds_its_depth(world: World, pi: Device) -> None:
    failure = {"bundle": "digits/1/d4", "why": "bad_alloc", "later": "ignored"}
    assert world.told("POST", "failures", failure) == {"bundle": "digits/1/d2"}
    (listed,) = world.told("GET", "capability")["failures"]
    assert listed["held_until"] == listed["failed_at"] + 3600
    world.told("PUT", "measurements", measurement("digits/1/d4", 0.1))
    assert world.told("GET", "assignment") == {"bundle": "digits/1/d2"}


def test_a_pin_comes_first_until_it_is_taken_back(world: World, pi: Device) -> None:
    for depth in (2, 4):
        world.told("PUT", "measurements", measurement(f"digits/1/d{depth}", 1.0))
    assert world.told("PUT", "pin", {"depth": 1}, who="operator") == {"bundle": "digits/1/d1"}
    world.told("PUT", "measurements", measurement("digits/1/d1", 500.0))
    assert world.told("GET", "assignment") == {"bundle": "digits/1/d1"}
    pinned = world.told("PUT", "pin", {"bundle": "digits/1/d2"}, who="operator")
    assert pinned == {"bundle": "digits/1/d2"}
    assert world.told("GET", "capability")["pin"] == {"depth": None, "bundle": "digits/1/d2"}
    assert world.told("DELETE", "pin", who="operator") == {"bundle": "digits/1/d4"}
    for body, status, text in (
        ({"depth": 3}, 400, "depths 1, 2, 4"),
        ({"bundle": "digits/1/d3"}, 404, "not published"),
        ({"bundle": "digits/9/d2"}, 404, "not published"),
        ({"bundle": "../x"}, 404, "not published"),
        ({}, 400, "only one"),
        ({"depth": 1, "bundle": "digits/1/d2"}, 400, "only one"),
        ({"depth": 0}, 400, "depth"),
    ):
        answer = world.call("PUT", "pin", body, who="operator")
        assert (answer.status_code, text in answer.text) == (status, True), answer.text


def test_a_running_server_follows_pins_of_the_command_line(world: World, pi: Device) -> None:
    other = Registry.open(f"sqlite:///{world.state / 'registry.db'}")
    try:
        registry = world.services.registry
        for change, bundle in (
            (lambda: other.capabilities.pin(world.name, depth=1), "digits/1/d1"),
            (lambda: other.capabilities.unpin(world.name), "digits/1/d4"),
        ):
            pi.commands.clear()
            change()
            pi.wait(lambda: pi.commands, 5)
            assert registry.device(world.name).bundle == bundle
    finally:
        other.close()


def test_a_depth_is_not_noted_as_left_when_the_operator_took_it_away(
    world: World, pi: Device
) -> None:
    capabilities = world.services.registry.capabilities
    for pin in (Pin(1, None), Pin(None, "digits/1/d2")):
        # the report comes before the running server has followed the pin of the command line
        capabilities.pin(world.name, depth=pin.depth, bundle=pin.bundle)
        told = world.told("PUT", "conditions", {"bundle": "digits/1/d4", "latency_ms": 1.0})
        assert told == {"bundle": pin.bundle or "digits/1/d1"}
        assert world.told("GET", "capability")["failures"] == []
        assert world.told("DELETE", "pin", who="operator") == {"bundle": "digits/1/d4"}


def test_another_variant_is_to_be_measured_once(world: World, pi: Device) -> None:
    assert world.told("GET", "unmeasured") == {"bundles": []}  # no depth has two variants here


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "measurements", measurement("digits/1/d4", 1.0)),
        ("PUT", "conditions", {"bundle": "digits/1/d4"}),
        ("POST", "failures", {"bundle": "digits/1/d4"}),
        ("GET", "unmeasured", None),
        ("GET", "capability", None),
        ("PUT", "pin", {"depth": 1}),
        ("DELETE", "pin", None),
    ],
)
def test_others_may_neither_report_nor_pin(
    world: World, pi: Device, method: str, path: str, body: Any
) -> None:
    if "stranger" not in world.credentials:
        world.enrol("stranger")
    refused = {"stranger", "operator"} if path not in ("capability", "pin") else {"stranger"}
    for who in refused:
        assert world.call(method, path, body, who=who).status_code == 403
    if path == "pin":
        assert world.call(method, path, body).status_code == 403


@pytest.mark.parametrize("path", ["measurements", "conditions"])
@pytest.mark.parametrize(
    "body",
    [{}, {"bundle": 7}, {"bundle": "x"}, {"bundle": "digits/1/d4", "latency_ms": "fast"}, []],
)
def test_a_report_that_cannot_be_is_refused(world: World, pi: Device, path: str, body: Any) -> None:
    assert world.call("PUT", path, body).status_code in (400, 422)
