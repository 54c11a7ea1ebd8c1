"""The table of who may use which route: complete, unambiguous, and obeyed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest
from fastapi.routing import iter_route_contexts
from starlette.responses import PlainTextResponse

from edge_sdk.wire.address import Address
from server.access.table import TABLE, is_guarded, rule_of
from server.app import create_app
from server.registry.credentials import secret_sha256
from server.registry.database import Registry
from server.routes.authentication import Guard
from server.services import Services
from server.settings import ServerSettings

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

SECRET = "canary-operator-secret-0123456789"
WHO = ("nobody", "pi", "other", "waiting", "infer", "operate", "train", "operator")
DEVICE = "/api/v1/devices/pi"

# worked out by hand: who may, of WHO
EXPECTED = {
    ("GET", "/v2/health/live"): set(WHO),
    ("POST", "/api/v1/enroll"): set(WHO),
    ("GET", "/v2"): {"pi", "other", "infer", "operator"},
    ("POST", "/v2/models/digits/infer"): {"pi", "other", "infer", "operator"},
    ("POST", "/v2/models/digits/versions/1/infer"): {"pi", "other", "infer", "operator"},
    ("GET", "/openapi.json"): {"operate", "operator"},
    ("GET", "/tuf/metadata/timestamp.json"): {"pi", "other", "operate", "operator"},
    ("GET", DEVICE): {"pi", "operate", "train", "operator"},
    ("GET", f"{DEVICE}/approval"): {"pi"},
    ("GET", "/api/v1/devices/waiting/approval"): {"waiting"},
    ("GET", "/api/v1/devices/waiting/assignment"): set(),
    ("PUT", f"{DEVICE}/profile"): {"pi"},
    ("GET", "/api/v1/devices"): {"operate", "train", "operator"},
    ("POST", f"{DEVICE}/command"): {"operate", "train", "operator"},
    ("POST", f"{DEVICE}/revoke"): {"operate", "operator"},
    ("POST", "/api/v1/tokens"): {"operate", "operator"},
    ("DELETE", "/api/v1/models/digits"): {"operate", "operator"},
    ("GET", "/api/v1/audit"): {"operate", "operator"},
}


class World:
    """A guard in front of an application that answers everything, and logins of all kinds."""

    def __init__(self, folder: Path, *, loopback: bool = False) -> None:
        registry = Registry.open(f"sqlite:///{folder}/registry.db")
        services = SimpleNamespace(
            registry=registry,
            operator_sha256=secret_sha256(SECRET),
            logged_in=lambda *_: None,
            seen=lambda _: None,
        )
        self.guard = Guard(_anything, cast("Any", services), loopback=loopback)
        self.registry = registry
        self.logins = {"nobody": "", "operator": f"operator:{SECRET}"}
        for name in ("pi", "other", "waiting"):
            token = registry.create_token(approve=name == "waiting")
            _, credential = registry.redeem_token(token, name, {})
            self.logins[name] = f"{name}:{credential}"
        for scope in ("infer", "operate", "train"):
            self.logins[scope] = registry.keys.create([cast("Any", scope)])[1]

    def ask(self, method: str, path: str, who: str, more: dict[str, str] | None = None) -> int:
        """Status of the answer; `more` are headers."""
        login = self.logins.get(who, who)
        headers = {"Authorization": f"Bearer {login}"} if login else {}
        headers |= more or {}

        async def once() -> int:
            transport = httpx.ASGITransport(self.guard)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return (await client.request(method, path, headers=headers)).status_code

        return asyncio.run(once())


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.registry.close()


def test_table_names_every_route_of_the_application(tmp_path: Path) -> None:
    free = Address("127.0.0.1", 0)
    services = Services(ServerSettings(tmp_path, free, free))
    try:
        routes = list(iter_route_contexts(create_app(services).routes))
    finally:
        services.stop()
    found = {f"{method} {one.path}" for one in routes for method in one.methods or {"ANY"}}
    guarded = {one for one in found if is_guarded(one.partition(" ")[2])}
    assert guarded == set(TABLE)
    # public files, and routes that ask for a session themselves
    own = {one for one in found - guarded if not one.startswith("GET /dashboard/facts/")}
    assert {one for one in own if not one.startswith("POST /dashboard/actions/")} == {
        "GET /",
        "GET /favicon.ico",
        "GET /dashboard/assets/{version}/{name:path}",
        "DELETE /dashboard/session",
        "GET /dashboard/session",
        "POST /dashboard/session",
    }


@pytest.mark.parametrize("path", ["/metrics%0A", "/v2%0A", "/", "/anything", "/dashboard", "/%0A"])
def test_a_path_outside_the_table_is_not_there(world: World, path: str) -> None:
    """Starlette finds a route also where a newline follows its path."""
    assert world.ask("GET", path, "operator") == (200 if path == "/" else 404)


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "Via", "X-Real-IP"])
def test_a_proxy_in_front_of_loopback_brings_strangers(tmp_path: Path, header: str) -> None:
    world = World(tmp_path, loopback=True)
    assert world.ask("GET", "/v2", "nobody") == 200
    assert world.ask("GET", "/v2", "nobody", {header: "203.0.113.7"}) == 401
    assert world.ask("GET", "/v2", "infer", {header: "203.0.113.7"}) == 200
    world.registry.close()


def test_no_two_paths_of_the_table_match_one_request() -> None:
    """Else a request could be judged by the rule of another route than the one that serves it.

    Two that have one rule may.
    """

    def overlap(one: str, other: str) -> bool:
        pairs = list(zip(one.split("/"), other.split("/"), strict=False))
        if ":path}" not in one + other and one.count("/") != other.count("/"):
            return False
        return all(a == b or "{" in a + b for a, b in pairs)

    alike = [
        (one, other)
        for one, other in combinations(TABLE, 2)
        if one.partition(" ")[0] == other.partition(" ")[0]
        and TABLE[one] != TABLE[other]
        and overlap(one, other)
    ]
    assert alike == []


def test_each_path_is_found_with_its_names() -> None:
    for entry, rule in TABLE.items():
        method, _, template = entry.partition(" ")
        path = re.sub(r"\{(\w+)(:path)?\}", r"<\1>", template)
        names = {name: f"<{name}>" for name in re.findall(r"\{(\w+)", template)}
        assert rule_of(method, path) == (rule, names)


@pytest.mark.parametrize(("method", "path"), EXPECTED)
def test_only_those_of_the_table_get_through(world: World, method: str, path: str) -> None:
    expected = EXPECTED[method, path]
    answers = {who: world.ask(method, path, who) for who in WHO}
    assert {who for who, status in answers.items() if status == 200} == expected
    refused = {who: status for who, status in answers.items() if status != 200}
    assert all(status == (401 if who == "nobody" else 403) for who, status in refused.items())


@pytest.mark.parametrize("login", ["sek_", "sek_guess", "operator:", "nocolon"])
def test_a_wrong_login_is_refused(world: World, login: str) -> None:
    assert world.ask("POST", "/v2/models/digits/infer", login) == 401


def test_routes_that_the_table_lacks_are_not_there(world: World) -> None:
    for path in ("/api/v1/secret", "/api", "/v2/models/a/b", "/metrics/x", "/tuf/metadata"):
        assert world.ask("GET", path, "operator") == 404
    assert world.ask("PATCH", DEVICE, "operator") == 405
    assert world.ask("GET", "/", "nobody") == 200  # what lies elsewhere has a sign-in of its own
    assert world.ask("GET", "/apis", "nobody") == 404


def test_on_loopback_inference_asks_for_no_login_but_keeps_keys_to_their_scopes(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, loopback=True)
    for who, status in {"nobody": 200, "infer": 200, "operate": 403, "sek_wrong": 200}.items():
        assert world.ask("POST", "/v2/models/digits/infer", who) == status
    assert world.ask("GET", "/openapi.json", "nobody") == 200
    assert world.ask("GET", "/api/v1/devices", "nobody") == 401
    world.registry.close()


async def _anything(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("served")(scope, receive, send)
