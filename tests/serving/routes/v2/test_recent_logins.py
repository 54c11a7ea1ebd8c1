"""Queries with a login: read once from the registry, then answered from their connection."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from server.access import recent_logins
from server.access.recent_logins import KNOWN_MOST, RecentLogins
from server.access.rules import INFER as RULE
from server.access.rules import OPERATE, Login
from tests.clock import Clock
from tests.serving.routes.v2.direct_site import (
    DirectSite,
    ask,
    body_of,
    outputs_of,
    request_of,
    undated,
)
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Exported

pytestmark = pytest.mark.broker  # the services start the embedded broker


@pytest.fixture
def site(exported: Exported, tmp_path: Path) -> Iterator[DirectSite]:
    exported.install(tmp_path / "models")
    site = DirectSite(tmp_path)
    with site.stack:
        yield site


@pytest.fixture
def fresh_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take a second between two requests."""
    monkeypatch.setattr(recent_logins, "FRESH_S", 60.0)


def with_key(key: str, body: bytes) -> bytes:
    return request_of(body, {"Authorization": f"Bearer {key}"})


@pytest.mark.usefixtures("fresh_for_long")
def test_the_second_query_of_a_key_goes_from_its_connection(
    site: DirectSite, exported: Exported
) -> None:
    keys = site.services.registry.keys
    _, key = keys.create(["infer"], name="app", models=["digits"])
    raw = with_key(key, body_of(exported.x[:2]))
    first, direct = site.went_direct(raw)
    assert not direct
    second, direct = site.went_direct(raw)
    assert direct
    assert undated(second) == undated(first)
    assert outputs_of(second)
    # it counts as its own sender, and each use counts
    assert site.services.inference.senders.counts()["key:app"].answered == 2
    keys.write_uses()
    assert [one.uses for one in keys.all()] == [2]


@pytest.mark.usefixtures("fresh_for_long")
def test_a_login_from_another_address_is_read_and_noted(
    site: DirectSite, exported: Exported
) -> None:
    _, key = site.services.registry.keys.create(["infer"], name="app")
    raw = with_key(key, body_of(exported.x[:1]))
    for source in ("127.0.0.1", "127.0.0.2"):
        assert [site.went_direct(raw, source)[1] for _ in range(2)] == [False, True]
    site.services.audit.write()
    logins = [one.source for one in site.services.registry.trail.entries() if one.who == "key:app"]
    assert sorted(logins) == ["127.0.0.1", "127.0.0.2"]


@pytest.mark.usefixtures("fresh_for_long")
def test_what_a_key_may_not_ask_is_refused_by_the_application(
    site: DirectSite, exported: Exported
) -> None:
    keys = site.services.registry.keys
    body = body_of(exported.x[:1])
    _, other = keys.create(["infer"], models=["other"])
    _, trains = keys.create(["train"])
    for key in (other, trains, "sek_unknown"):
        for _ in range(2):
            raw = with_key(key, body)
            answer, direct = site.went_direct(raw)
            assert not direct
            assert undated(answer) == undated(ask(site.other, raw))
    assert ask(site.direct, with_key(other, body)).startswith(b"HTTP/1.1 403 ")


@pytest.mark.usefixtures("fresh_for_long")
def test_the_limits_of_a_key_hold_on_its_connection(site: DirectSite, exported: Exported) -> None:
    _, key = site.services.registry.keys.create(["infer"], requests=2.0)
    raw = with_key(key, body_of(exported.x[:1]))
    answers = [site.went_direct(raw) for _ in range(12)]
    assert [direct for _, direct in answers] == [False] + 11 * [True]
    assert sum(answer.startswith(b"HTTP/1.1 429 ") for answer, _ in answers) >= 1


@pytest.mark.deadline
def test_a_revoked_key_is_refused_within_a_second(site: DirectSite, exported: Exported) -> None:
    keys = site.services.registry.keys
    _, key = keys.create(["infer"], name="app")
    # brought by a proxy, a query on loopback needs a login too
    fields = {"Authorization": f"Bearer {key}", "X-Forwarded-For": "10.0.0.1"}
    raw = request_of(body_of(exported.x[:1]), fields)
    assert ask(site.direct, raw).startswith(b"HTTP/1.1 200 ")
    keys.revoke("app")
    begin = time.monotonic()
    # queries do not make it last longer
    wait_until(lambda: b" 401 " in ask(site.direct, raw)[:14], "the key still works")
    assert time.monotonic() - begin < 3.0  # of which two are a busy machine's


# the table

QUERY = RULE, "digits"


@dataclass
class Table:
    """Recent logins, and what they counted."""

    clock: Clock = field(default_factory=lambda: Clock(100.0))
    used: list[str] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known = RecentLogins(
            lambda key: self.used.append(key.name), self.heard.append, self.clock
        )


def test_a_login_is_known_for_a_second_by_its_header_and_its_address() -> None:
    table = Table()
    known, login = table.known, Login()
    known.keep(b"Bearer a", "10.0.0.1", login)
    assert known.find(b"Bearer a", "10.0.0.1", *QUERY) is login
    assert known.find(b"Bearer b", "10.0.0.1", *QUERY) is None
    assert known.find(b"Bearer a", "10.0.0.2", *QUERY) is None
    table.clock.now += 0.99
    assert known.find(b"Bearer a", "10.0.0.1", *QUERY) is login
    table.clock.now += 0.02  # being found has not made it last longer
    assert known.find(b"Bearer a", "10.0.0.1", *QUERY) is None
    known.keep(b"Bearer a", "10.0.0.1", login)
    assert known.find(b"Bearer a", "10.0.0.1", *QUERY) is login


def test_each_query_counts_as_a_use_of_its_key_and_a_sign_of_its_device(site: DirectSite) -> None:
    registry = site.services.registry
    made, _ = registry.keys.create(["infer"], name="app", models=["digits"])
    device, _ = registry.redeem_token(registry.create_token(), "pi-4", {})
    table = Table()
    table.known.keep(b"Bearer k", "", Login(key=made, models=frozenset({"digits"})))
    table.known.keep(b"Bearer d", "", Login(device=device))
    for header in (b"Bearer k", b"Bearer k", b"Bearer d"):
        assert table.known.find(header, "", *QUERY) is not None
    # what it may not ask is read again, and counted there
    assert table.known.find(b"Bearer k", "", RULE, "other") is None
    assert table.known.find(b"Bearer d", "", OPERATE, "digits") is None
    assert (table.used, table.heard) == (["app", "app"], ["pi-4"])


def test_of_too_many_logins_the_oldest_are_forgotten() -> None:
    known = Table().known
    for number in range(KNOWN_MOST + 5):
        known.keep(b"Bearer %d" % number, "", Login())
    found = [
        known.find(b"Bearer %d" % number, "", *QUERY) is not None
        for number in range(KNOWN_MOST + 5)
    ]
    assert found == 5 * [False] + KNOWN_MOST * [True]
