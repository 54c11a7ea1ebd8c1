"""The management routes: who gets in, who reaches what, and that nothing sent is ever a 5xx."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_sdk.errors import SplitedgeError
from server.errors import AuthenticationError, NotReadyError, OverloadedError
from server.registry.credentials import is_secret, secret_sha256
from server.registry.database import Registry
from server.registry.records import Device
from server.routes import devices, errors, membership
from server.routes.authentication import Guard
from server.routes.rate_limit import MAX_SOURCES, RateLimit

ROOT = b'{"signed": {"_type": "root"}}'
OPERATOR_SECRET = "canary-operator-secret-0123456789"
PROFILE: dict[str, Any] = {
    "name": "pi-zero-2w",
    "arch": "aarch64",
    "cores": 4,
    "memory_total_bytes": 512_000_000,
    "memory_available_bytes": 300_000_000,
    "accelerator": None,
    "compute_score_gflops": 2.5,
    "link_latency_ms": None,
    "link_bandwidth_mbps": None,
}


class World:
    """A registry on disk, the routes over it, and what the broker was told."""

    def __init__(self, folder: Path) -> None:
        self.registry = Registry.open(f"sqlite:///{folder}/registry.db")
        self.operator_sha256 = secret_sha256(OPERATOR_SECRET)
        self.logins: list[str] = []
        self.bundle: str | None = "cnn/1/d3"
        self.broker_error: SplitedgeError | None = None
        self.approves_devices = False
        self.let_in: list[str] = []
        self.cut_off: list[str] = []
        self.told: list[tuple[str, Mapping[str, Any]]] = []
        self.app = FastAPI()
        errors.install(self.app)
        self.app.add_middleware(Guard, services=self)
        self.app.include_router(devices.router(self))
        self.app.include_router(membership.router(self))

    def logged_in(self, device: Device, credential: str) -> None:
        assert secret_sha256(credential) == device.credential_sha256
        self.logins.append(device.id)

    def root_bytes(self, fingerprint: str = "") -> bytes:
        return ROOT

    def broker_address(self) -> Mapping[str, Any]:
        return {"url": "mqtt://127.0.0.1:1883"}

    def seen(self, device_id: str) -> None:
        self.registry.touch(device_id)

    def admit(self, device: Device, credential: str) -> None:
        assert is_secret(credential, device.credential_sha256)
        if self.broker_error is not None:
            raise self.broker_error
        self.let_in.append(device.id)

    def expel(self, device: Device) -> None:
        if self.broker_error is not None:
            raise self.broker_error
        self.cut_off.append(device.id)

    def assign(self, device: Device) -> str | None:
        return self.bundle

    def command(self, device: Device, command: Mapping[str, Any]) -> bool:
        if self.broker_error is None:
            self.told.append((device.id, command))
        return self.broker_error is None

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        login: str | None = None,
        *,
        raw: bytes | None = None,
        address: str = "127.0.0.1",
    ) -> httpx.Response:
        headers = {b"Content-Type": b"application/json"}
        if login is not None:
            headers[b"Authorization"] = f"Bearer {login}".encode("latin-1")
        content = json.dumps(body).encode() if raw is None else raw

        async def once() -> httpx.Response:
            transport = httpx.ASGITransport(
                self.app, raise_app_exceptions=False, client=(address, 1)
            )
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.request(
                    method, f"/api/v1{path}", content=content, headers=headers
                )

        return asyncio.run(once())

    def enrol(self, name: str = "pi") -> str:
        """A device's login."""
        body = {"token": self.registry.create_token(), "name": name, "profile": PROFILE}
        reply = self.call("POST", "/enroll", body)
        assert reply.status_code == 201, reply.text
        return f"{reply.json()['device']}:{reply.json()['credential']}"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


OPERATOR = f"operator:{OPERATOR_SECRET}"


def refused(reply: httpx.Response, status: int) -> str:
    """The text of a refusal in the form that every refusal has."""
    assert reply.status_code == status, reply.text
    assert list(reply.json()) == ["error"]
    return str(reply.json()["error"])


def test_a_device_is_enrolled_from_token_to_bundle(world: World) -> None:
    reply = world.call("POST", "/tokens", {"fleet": "garden", "ttl_s": 60}, OPERATOR)
    assert reply.status_code == 201
    token = reply.json()["token"]
    assert token.partition(".")[2] == hashlib.sha256(ROOT).hexdigest()[:32]

    reply = world.call("POST", "/enroll", {"token": token, "name": "pi", "profile": PROFILE})
    assert reply.status_code == 201
    identity = reply.json()
    assert identity == {
        "device": "pi",
        "fleet": "garden",
        "credential": identity["credential"],
        "broker": {"url": "mqtt://127.0.0.1:1883"},
        "root": ROOT.decode(),
        "bundle": "cnn/1/d3",
        "approved": True,
    }
    assert world.let_in == ["pi"]

    login = f"pi:{identity['credential']}"
    shown = world.call("GET", "/devices/pi", login=login).json()
    assert (shown["device"], shown["fleet"], shown["profile"]) == ("pi", "garden", PROFILE)
    assert shown["last_seen"] >= shown["enrolled_at"]
    assert set(shown) == {
        *("device", "fleet", "profile", "depth", "bundle"),
        *("enrolled_at", "revoked_at", "approved_at", "last_seen"),
        *("runs", "wants", "refused", "why", "tags", "title", "presence"),
    }
    reply = world.call("GET", "/devices/pi/connection", login=login)
    assert reply.json() == {"broker": {"url": "mqtt://127.0.0.1:1883"}}
    reply = world.call("GET", "/devices/pi/assignment", login=login)
    assert reply.json() == {"bundle": "cnn/1/d3"}


def test_a_device_reports_what_its_update_ended_in(world: World) -> None:
    login = world.enrol()
    url = "/devices/pi/update"
    report = {"running": "cnn/1/d3", "bundle": "cnn/2/d3", "status": "no_space", "reason": "full"}
    assert world.call("PUT", url, report, login=login).status_code == 204
    shown = world.call("GET", "/devices/pi", login=login).json()
    assert (shown["runs"], shown["refused"], shown["why"]) == ("cnn/1/d3", "cnn/2/d3", "full")
    # a release to come may say more, and may have other statuses
    report = {"running": "cnn/2/d3", "status": "installed", "bundle": "cnn/2/d3"}
    assert world.call("PUT", url, report | {"seconds": "3"}, login=login).status_code == 204
    shown = world.call("GET", "/devices/pi", login=login).json()
    assert (shown["runs"], shown["refused"], shown["why"]) == ("cnn/2/d3", None, None)
    text = refused(world.call("PUT", url, report | {"running": "../x"}, login=login), 400)
    assert "expected MODEL/VERSION/d{DEPTH}" in text
    # a terminal that lists devices must not follow what a device writes
    report |= {"bundle": "cnn/3/d3", "status": "refused", "reason": "red \x1b[31m\n" + "x" * 900}
    assert world.call("PUT", url, report, login=login).status_code == 204
    why = world.call("GET", "/devices/pi", login=login).json()["why"]
    assert why.startswith("red [31m xxx")
    assert len(why) == 500
    assert world.call("PUT", url, report).status_code == 401


def test_a_device_that_runs_a_bundle_does_not_refuse_it_when_its_disk_is_full(world: World) -> None:
    """A roll-out takes a refusal for a reason to go back."""
    login = world.enrol()
    report = {"running": "cnn/2/d3", "bundle": "cnn/2/d3", "status": "no_space", "reason": "full"}
    assert world.call("PUT", "/devices/pi/update", report, login=login).status_code == 204
    shown = world.call("GET", "/devices/pi", login=login).json()
    assert (shown["runs"], shown["refused"]) == ("cnn/2/d3", None)


def test_the_operator_tags_devices_and_lists_them_by_tag(world: World) -> None:
    login = world.enrol()
    world.enrol("pi-2")
    tags = {"tags": ["outdoors", "canary"]}
    assert world.call("PUT", "/devices/pi/tags", tags, login=login).status_code == 403
    reply = world.call("PUT", "/devices/pi/tags", tags, login=OPERATOR)
    assert reply.json() == {"tags": ["canary", "outdoors"]}
    listed = world.call("GET", "/devices?tag=canary", login=OPERATOR).json()["devices"]
    assert [(one["device"], one["tags"]) for one in listed] == [("pi", ["canary", "outdoors"])]
    refused(world.call("PUT", "/devices/pi/tags", {"tags": ["a b"]}, login=OPERATOR), 400)
    refused(world.call("GET", "/devices?tag=A%20b", login=OPERATOR), 400)


def test_the_operator_gives_a_device_a_title(world: World) -> None:
    login = world.enrol()
    title = {"title": "Gate"}
    assert world.call("PUT", "/devices/pi/title", title, login=login).status_code == 403
    assert world.call("PUT", "/devices/pi/title", title, login=OPERATOR).json() == title
    assert world.call("GET", "/devices/pi", login=OPERATOR).json()["title"] == "Gate"
    refused(world.call("PUT", "/devices/pi/title", {"title": "a\nb"}, login=OPERATOR), 400)
    refused(world.call("PUT", "/devices/pi/title", {"title": "x" * 64}, login=OPERATOR), 400)
    none = world.call("PUT", "/devices/pi/title", {"title": None}, login=OPERATOR)
    assert none.json() == {"title": None}


def test_a_secret_without_the_fingerprint_enrols_too(world: World) -> None:
    assert world.enrol().startswith("pi:")


def test_a_used_token_is_a_403(world: World) -> None:
    """FAULTS row 25."""
    body = {"token": world.registry.create_token(), "profile": PROFILE}
    assert world.call("POST", "/enroll", body).status_code == 201
    assert "used" in refused(world.call("POST", "/enroll", body), 403)


def test_a_broker_that_is_away_costs_no_token(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the credential's hash is kept: a broker that was not told it could never be."""
    world.broker_error = NotReadyError("broker: away")
    body = {"token": world.registry.create_token(), "name": "pi", "profile": PROFILE}
    assert "token is still valid" in refused(world.call("POST", "/enroll", body), 503)
    assert "device=pi not enrolled" in caplog.text
    assert world.registry.devices() == ()
    assert world.registry.tokens()[0].used_by is None

    world.broker_error = None
    reply = world.call("POST", "/enroll", body)
    assert (reply.status_code, reply.json()["device"]) == (201, "pi")
    login = f"pi:{reply.json()['credential']}"
    assert world.call("GET", "/devices/pi", login=login).status_code == 200
    refused(world.call("POST", "/enroll", body), 403)  # once is once


def test_a_device_that_comes_back_while_the_broker_is_away_comes_back_later(world: World) -> None:
    """Until then it is as it was: its token is not used, and its old credential is right."""
    _, old = world.registry.redeem_token(world.registry.create_token(), "pi", PROFILE)
    world.registry.touch("pi")
    (token,) = world.registry.create_tokens(1, device="pi")
    body = {"token": token, "profile": PROFILE}
    world.broker_error = NotReadyError("broker: away")
    assert "token is still valid" in refused(world.call("POST", "/enroll", body), 503)
    assert world.registry.authenticate("pi", old).id == "pi"

    world.broker_error = None
    reply = world.call("POST", "/enroll", body)
    assert (reply.status_code, reply.json()["device"]) == (201, "pi")
    assert world.cut_off == ["pi"]
    with pytest.raises(AuthenticationError):
        world.registry.authenticate("pi", old)


def test_the_credential_goes_out_even_if_no_bundle_can_be_chosen(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(device: Device) -> str | None:
        raise NotReadyError(f"no bundle for {device.id}")

    monkeypatch.setattr(world, "assign", fails)
    login = world.enrol()
    assert world.call("GET", "/devices/pi", login=login).status_code == 200
    assert "device=pi enrolled, but" in caplog.text


def test_guessing_tokens_soon_has_to_wait(world: World) -> None:
    """FAULTS row 25."""
    guess = {"token": "guess", "profile": PROFILE}
    for _ in range(20):
        refused(world.call("POST", "/enroll", guess), 403)
    reply = world.call("POST", "/enroll", guess)
    assert "20 failures" in refused(reply, 429)
    assert 0 < int(reply.headers["Retry-After"]) <= 60
    assert world.call("POST", "/enroll", guess, address="10.0.0.9").status_code == 403


def test_right_token_works_at_an_address_that_has_guessed(world: World) -> None:
    """FAULTS row 25: honest devices and a guesser behind one address."""
    for _ in range(25):
        world.call("POST", "/enroll", {"token": "guess", "profile": PROFILE})
    good = {"token": world.registry.create_token(), "profile": PROFILE}
    assert world.call("POST", "/enroll", good).status_code == 201
    refused(world.call("POST", "/enroll", good), 429)  # used now, so it is a guess like others


def test_twenty_requests_at_once_with_one_token_enrol_one_device(world: World) -> None:
    body = {"token": world.registry.create_token(), "profile": PROFILE}
    with ThreadPoolExecutor(20) as pool:
        replies = list(pool.map(lambda _: world.call("POST", "/enroll", body), range(20)))
    assert sorted(reply.status_code for reply in replies) == [201, *[403] * 19]
    assert len(world.registry.devices()) == 1


@pytest.mark.parametrize(
    "profile",
    [
        {},
        {**PROFILE, "cores": 0},
        {**PROFILE, "extra": 1},
        {**PROFILE, "memory_total_bytes": 10**300},
        {**PROFILE, "name": "x\ud800"},
        {**PROFILE, "name": "pi\n\x1b[2J"},
        {**PROFILE, "accelerator": "gpu\u202e"},
        {**PROFILE, "compute_score_gflops": float("nan")},
    ],
)
def test_a_profile_that_cannot_be_right_is_a_400_and_the_token_stays(
    world: World, profile: dict[str, Any]
) -> None:
    token = world.registry.create_token()
    body = {"token": token, "name": "pi", "profile": profile}
    assert "profile" in refused(world.call("POST", "/enroll", body), 400)
    assert world.call("POST", "/enroll", {**body, "profile": PROFILE}).status_code == 201


def test_a_device_replaces_its_profile(world: World) -> None:
    login = world.enrol()
    newer = {**PROFILE, "link_latency_ms": 12.5, "link_bandwidth_mbps": 20.0}
    reply = world.call("PUT", "/devices/pi/profile", newer, login)
    assert (reply.status_code, reply.json()["profile"]) == (200, newer)
    refused(world.call("PUT", "/devices/pi/profile", {**newer, "cores": -1}, login), 400)
    assert world.registry.device("pi").profile == newer


def test_without_a_bundle_the_assignment_is_a_404(world: World) -> None:
    login = world.enrol()
    world.bundle = None
    assert "no bundle" in refused(world.call("GET", "/devices/pi/assignment", login=login), 404)


def test_a_revoked_device_is_out_and_the_broker_is_told(world: World) -> None:
    login = world.enrol()
    reply = world.call("POST", "/devices/pi/revoke", login=OPERATOR)
    assert (reply.status_code, reply.json()["device"]) == (200, "pi")
    assert reply.json()["revoked_at"] is not None
    assert world.cut_off == ["pi"]
    assert "revoked" in refused(world.call("GET", "/devices/pi", login=login), 401)
    # once more, should the broker have been away the first time
    assert world.call("POST", "/devices/pi/revoke", login=OPERATOR).status_code == 200
    assert world.cut_off == ["pi", "pi"]
    refused(world.call("POST", "/devices/none/revoke", login=OPERATOR), 404)


DEVICE_ROUTES = [
    ("GET", "/devices/pi"),
    ("GET", "/devices/pi/assignment"),
    ("GET", "/devices/pi/connection"),
    ("PUT", "/devices/pi/profile"),
]
OPERATOR_ROUTES = [("GET", "/devices"), ("POST", "/devices/pi/revoke"), ("POST", "/tokens")]


@pytest.mark.parametrize(
    ("method", "path"), [*DEVICE_ROUTES, *OPERATOR_ROUTES, ("POST", "/link/echo")]
)
def test_without_a_good_login_every_route_is_a_401(world: World, method: str, path: str) -> None:
    login = world.enrol()
    logins = (None, "", "pi", "pi:", f"{login}x", "pi-2:x", "operator:", "operator:guess", "é:x")
    for wrong in logins:
        refused(world.call(method, path, {}, login=wrong), 401)


@pytest.mark.parametrize(("method", "path"), DEVICE_ROUTES)
def test_a_device_does_not_reach_another(world: World, method: str, path: str) -> None:
    world.enrol()
    other = world.enrol("other")
    refused(world.call(method, path, PROFILE, login=other), 403)
    refused(world.call(method, path.replace("/pi", "/unknown"), PROFILE, login=other), 403)


@pytest.mark.parametrize(("method", "path"), OPERATOR_ROUTES)
def test_a_device_is_no_operator(world: World, method: str, path: str) -> None:
    login = world.enrol()
    refused(world.call(method, path, {}, login=login), 403)
    assert world.cut_off == []


def test_the_operator_is_no_device(world: World) -> None:
    world.enrol()
    assert world.call("GET", "/devices/pi", login=OPERATOR).json()["device"] == "pi"
    for method, path in DEVICE_ROUTES[1:]:
        refused(world.call(method, path, PROFILE, login=OPERATOR), 403)
    refused(world.call("GET", "/devices/none", login=OPERATOR), 404)


def test_the_operator_lists_devices_by_fleet(world: World) -> None:
    for name in ("b", "a"):
        world.enrol(name)
    listed = world.call("GET", "/devices", login=OPERATOR).json()["devices"]
    assert [device["device"] for device in listed] == ["a", "b"]
    assert world.call("GET", "/devices?fleet=x", login=OPERATOR).json() == {"devices": []}
    refused(world.call("GET", "/devices?fleet=%00", login=OPERATOR), 400)


def test_echo_gives_the_same_bytes_back_up_to_a_megabyte(world: World) -> None:
    login = world.enrol()
    payload = bytes(range(250)) * 4000
    reply = world.call("POST", "/link/echo", login=login, raw=payload)
    assert (reply.status_code, reply.content) == (200, payload)
    refused(world.call("POST", "/link/echo", login=login, raw=payload + b"x"), 413)
    refused(world.call("POST", "/link/echo", raw=payload + b"x"), 401)


def test_a_body_above_64_kib_is_not_read(world: World) -> None:
    big = json.dumps({"token": "t", "profile": {"x": "y" * 70_000}}).encode()
    refused(world.call("POST", "/enroll", raw=big), 413)


def test_no_secret_reaches_a_log_or_an_error(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """FAULTS row 34."""
    with caplog.at_level(logging.DEBUG):
        token = world.registry.create_token()
        body = {"token": token, "name": "pi", "profile": PROFILE}
        login = f"pi:{world.call('POST', '/enroll', body).json()['credential']}"
        errors_seen = [
            world.call("POST", "/enroll", body),
            world.call("POST", "/enroll", {**body, "token": token * 9}),
            world.call("POST", "/enroll", {**body, "name": token}),
            world.call("GET", "/devices", login=login),
            world.call("GET", "/devices/pi", login=login + "x"),
            world.call("GET", "/devices/pi", login=OPERATOR + "x"),
            world.call("POST", "/tokens", {"ttl_s": token}, OPERATOR),
        ]
    assert all(reply.status_code >= 400 for reply in errors_seen)
    texts = caplog.text + "".join(reply.text for reply in errors_seen)
    for secret in (token, login.partition(":")[2], OPERATOR_SECRET):
        assert secret not in texts


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=8,
)
ALMOST_A_PROFILE = st.fixed_dictionaries(
    {}, optional={field: st.one_of(st.just(value), JSON) for field, value in PROFILE.items()}
)
BODIES = st.one_of(
    JSON,
    ALMOST_A_PROFILE,
    st.fixed_dictionaries(
        {"token": st.one_of(st.text(), JSON), "profile": st.one_of(ALMOST_A_PROFILE, JSON)},
        optional={"name": st.one_of(st.from_regex(r"[a-z0-9-]{1,63}"), JSON)},
    ),
    st.fixed_dictionaries(
        {}, optional={"fleet": JSON, "ttl_s": st.one_of(st.floats(), JSON), "note": JSON}
    ),
)


@pytest.fixture(scope="module")
def shared_world(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, str]:
    world = World(tmp_path_factory.mktemp("state"))
    return world, world.enrol()


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=BODIES, good_token=st.booleans())
def test_no_body_is_ever_a_server_error(
    shared_world: tuple[World, str], body: Any, good_token: bool
) -> None:
    """FAULTS row 26."""
    world, login = shared_world
    if good_token and isinstance(body, dict) and "token" in body:
        body = {**body, "token": world.registry.create_token()}
    raw = json.dumps(body).encode()
    for method, path, who in (
        ("POST", "/enroll", None),
        ("PUT", "/devices/pi/profile", login),
        ("POST", "/tokens", OPERATOR),
    ):
        reply = world.call(method, path, login=who, raw=raw)
        assert reply.status_code in {200, 201, 400, 403, 413, 429}, reply.text
        if reply.status_code >= 400:
            assert list(reply.json()) == ["error"]


@settings(max_examples=60, deadline=None)
@given(raw=st.one_of(st.binary(max_size=60), st.sampled_from([b"[" * 50_000, b"9" * 60_000])))
def test_no_bytes_are_ever_a_server_error(shared_world: tuple[World, str], raw: bytes) -> None:
    """FAULTS row 26."""
    world, _ = shared_world
    refused(world.call("POST", "/enroll", raw=raw), 400)


def test_the_limit_frees_one_attempt_as_each_failure_ages() -> None:
    now = 0.0
    limit = RateLimit(most=2, window_s=60, clock=lambda: now)
    limit.count("10.0.0.1")
    now = 10.0
    limit.count("10.0.0.1")
    with pytest.raises(OverloadedError) as caught:
        limit.check("10.0.0.1")
    assert caught.value.retry_after_s == 50.0  # until the first is 60 s old
    now = 60.0
    limit.check("10.0.0.1")
    limit.count("10.0.0.1")
    with pytest.raises(OverloadedError) as caught:
        limit.check("10.0.0.1")
    assert caught.value.retry_after_s == 10.0  # now until the second is


@pytest.mark.parametrize(
    ("address", "same", "other"),
    [
        ("10.0.0.1", "::ffff:10.0.0.1", "10.0.0.2"),
        ("2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1"),
        ("", "", "10.0.0.1"),
    ],
)
def test_a_source_is_an_ipv4_address_or_an_ipv6_network(
    address: str, same: str, other: str
) -> None:
    limit = RateLimit(most=1)
    limit.count(address)
    with pytest.raises(OverloadedError):
        limit.check(same)
    limit.check(other)


def test_the_limit_forgets_the_sources_longest_quiet() -> None:
    limit = RateLimit(most=1)
    for number in range(MAX_SOURCES + 1):
        limit.count(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    limit.check("10.0.0.0")
    with pytest.raises(OverloadedError):
        limit.check("10.0.0.1")


def test_operator_tells_a_device_what_to_do(world: World) -> None:
    login = world.enrol("pi")
    command = {"op": "train", "url": "http://127.0.0.1:8100"}
    reply = world.call("POST", "/devices/pi/command", command, OPERATOR)
    assert reply.status_code == 202, reply.text
    assert world.told == [("pi", command)]
    refused(world.call("POST", "/devices/pi/command", command, login), 403)
    refused(world.call("POST", "/devices/nobody/command", command, OPERATOR), 404)
    refused(world.call("POST", "/devices/pi/command", {"op": "Rm -rf"}, OPERATOR), 400)
    world.broker_error = NotReadyError("broker: away")
    assert "broker" in refused(world.call("POST", "/devices/pi/command", command, OPERATOR), 503)
    world.registry.revoke("pi")
    assert "revoked" in refused(world.call("POST", "/devices/pi/command", command, OPERATOR), 403)
    assert world.told == [("pi", command)]
