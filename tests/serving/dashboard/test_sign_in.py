"""Signing in: a link works once, a session ends, and requests of other sites are refused."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import pytest
from fastapi.routing import iter_route_contexts

from server.errors import AuthenticationError, BadRequestError
from server.registry.database import Registry
from server.registry.sign_in.sign_ins import LINK_S, SESSION_S
from server.routes import devices
from server.routes.authentication import Guard

if TYPE_CHECKING:
    from tests.serving.dashboard.conftest import World

ATTACKER = "http://attacker.example"
ACTIONS = "/dashboard/actions/"


class Clock:
    """A clock that stands."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(registry_url: str, clock: Clock) -> Iterator[Registry]:
    """On each kind of database."""
    opened = Registry.open(registry_url, clock=clock)
    yield opened
    opened.close()


def test_a_link_signs_in_once_and_the_session_ends(registry: Registry, clock: Clock) -> None:
    sign_ins = registry.sign_ins
    link = sign_ins.new_link("anna")
    assert sign_ins.find(link) is None, "a link is no session"
    session, secret = sign_ins.redeem(link)
    assert session.who == "operator:anna"
    assert sign_ins.find(secret) == session
    for spent in (link, secret, "", "x" * 43):
        with pytest.raises(AuthenticationError, match="dashboard-link"):
            sign_ins.redeem(spent)
    clock.now += SESSION_S
    assert sign_ins.find(secret) is None


def test_a_link_expires_and_leaves_no_row(registry: Registry, clock: Clock) -> None:
    link = registry.sign_ins.new_link()
    clock.now += LINK_S
    with pytest.raises(AuthenticationError):
        registry.sign_ins.redeem(link)
    registry.sign_ins.new_link()
    assert registry.sign_ins.end_all() == 0
    with pytest.raises(BadRequestError):
        registry.sign_ins.new_link(ttl_s=0)
    with pytest.raises(BadRequestError):
        registry.sign_ins.new_link("Anna Smith")


def test_of_many_at_once_one_uses_the_link(registry: Registry) -> None:
    link = registry.sign_ins.new_link()

    def redeem(_: int) -> bool:
        try:
            registry.sign_ins.redeem(link)
        except AuthenticationError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(redeem, range(8))) == 1


def test_sign_out_of_all_ends_every_session(registry: Registry) -> None:
    secrets = [registry.sign_ins.redeem(registry.sign_ins.new_link())[1] for _ in range(2)]
    unused = registry.sign_ins.new_link()
    assert registry.sign_ins.end_all() == 2
    assert [registry.sign_ins.find(secret) for secret in secrets] == [None, None]
    with pytest.raises(AuthenticationError):
        registry.sign_ins.redeem(unused)


def test_the_cookie_is_for_this_page_alone(world: World) -> None:
    cookie = world.sign_in().headers["set-cookie"]
    assert cookie.startswith("splitedge-")
    for part in ("HttpOnly", "SameSite=strict", "Path=/", f"Max-Age={SESSION_S:.0f}"):
        assert part in cookie
    assert "Secure" not in cookie, "over http the browser would not send it back"
    secure = world.sign_in(base="https://pi.local:8000").headers["set-cookie"]
    assert secure.startswith("__Host-splitedge-")
    assert "Secure" in secure
    assert "Domain" not in secure


def test_nothing_is_read_or_done_without_a_session(world: World) -> None:
    world.enrol("pi-1")
    for path in ("fleet", "devices/pi-1", "models", "training", "audit"):
        assert world.ask("GET", f"/dashboard/facts/{path}").status_code == 401
    assert world.act("devices/pi-1/revoke").status_code == 401
    assert world.registry.device("pi-1").active
    assert world.ask("GET", "/dashboard/session").json()["who"] is None
    world.sign_in()
    assert world.ask("GET", "/dashboard/session").json()["who"] == "operator"
    assert world.ask("DELETE", "/dashboard/session").status_code == 204
    assert world.ask("GET", "/dashboard/facts/fleet").status_code == 401


def test_who_reads_sees_every_page_and_is_refused_every_action(world: World) -> None:
    world.enrol("pi-1")
    world.enrol("pi-2", approve=True)
    world.registry.catalogue.publish("digits", 1)
    link = world.registry.sign_ins.new_link("anna", reads_only=True)
    answer = world.ask("POST", "/dashboard/session", {"link": link}).json()
    assert (answer["who"], answer["reads_only"]) == ("reader:anna", True)
    assert world.ask("GET", "/dashboard/session").json()["reads_only"]
    for path in ("fleet", "history", "devices/pi-1", "models", "rollouts", "training", "alerts"):
        assert world.facts(path) is not None
    newest = world.registry.trail.entries(1)
    assert world.facts("audit")["entries"][0]["what"] == newest[0].what == "dashboard.sign-in"
    actions = [path for path, methods in paths_of(world) if "POST" in methods]
    assert len(actions) > 15
    for path in actions:
        filled = path.replace("{device_id}", "pi-1").replace("{fleet}", "default")
        filled = filled.replace("{name}", "digits").replace("{rollout_id}", "1")
        refused = world.ask("POST", filled, {})
        assert (refused.status_code, "reading alone" in refused.text) == (403, True), path
    assert world.registry.trail.entries(1) == newest, "something was changed"
    assert world.ask("DELETE", "/dashboard/session").status_code == 204
    assert world.sign_in("anna").json()["reads_only"] is False
    assert world.act("devices/pi-1/revoke").status_code == 200


def paths_of(world: World) -> list[tuple[str, set[str]]]:
    """The actions of the dashboard, and their methods."""
    routes = iter_route_contexts(world.app.routes)
    found = [(one.path or "", set(one.methods or ())) for one in routes]
    return [(path, methods) for path, methods in found if path.startswith(ACTIONS)]


def test_no_device_gets_the_name_of_a_reader(world: World) -> None:
    assert world.enrol("reader").id != "reader"


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": ATTACKER},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "http://pi.local:8001"},
        {"Origin": "http://pi.local"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_request_of_another_site_changes_nothing(world: World, headers: dict[str, str]) -> None:
    world.enrol("pi-1")
    world.sign_in()
    assert world.act("devices/pi-1/revoke", headers=headers).status_code == 403
    assert world.registry.device("pi-1").active
    link = world.registry.sign_ins.new_link()
    body = {"link": link}
    if "Origin" in headers:
        assert world.ask("POST", "/dashboard/session", body, headers=headers).status_code == 403
        assert world.registry.sign_ins.redeem(link), "the link was not used up"
    assert (
        world.ask("DELETE", "/dashboard/session", headers={"Origin": ATTACKER}).status_code == 403
    )
    assert world.facts("fleet")["devices"]


def test_a_page_of_another_site_reads_nothing(world: World) -> None:
    world.sign_in()
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": ATTACKER}):
        assert world.ask("GET", "/dashboard/facts/fleet", headers=headers).status_code == 403


def test_many_wrong_links_are_slowed_down(world: World) -> None:
    answers = [
        world.ask("POST", "/dashboard/session", {"link": f"wrong-{number}"}).status_code
        for number in range(21)
    ]
    assert answers == [401] * 20 + [429]


def test_a_session_opens_nothing_but_the_dashboard(world: World) -> None:
    """The API knows its own credentials only, so a browser cannot be made to use it."""
    services = cast("Any", world)
    world.app.add_middleware(Guard, services=services)
    world.app.include_router(devices.router(services))
    world.sign_in()
    assert world.ask("GET", "/dashboard/facts/fleet").status_code == 200
    assert world.ask("GET", "/api/v1/devices").status_code == 401


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "http://]"])
def test_an_origin_that_is_no_url_is_refused(world: World, origin: str) -> None:
    answer = world.ask("GET", "/dashboard/session", headers={"Origin": origin})
    assert answer.status_code == 403
