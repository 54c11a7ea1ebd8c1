"""API keys in the registry, on each kind of database."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from server.errors import AuthenticationError, BadRequestError, ConflictError, UnknownKeyError
from server.registry.database import Registry
from tests.clock import Clock

DAY_S = 86_400.0


@pytest.fixture
def clock() -> Clock:
    return Clock(1_000_000.0)


@pytest.fixture
def registry(registry_url: str, clock: Clock) -> Iterator[Registry]:
    opened = Registry.open(registry_url, clock=clock)
    yield opened
    opened.close()


def test_a_key_opens_what_it_was_made_for_until_it_is_revoked(registry: Registry) -> None:
    made, key = registry.keys.create(
        ["train", "infer"], name="app", models=["digits"], fleets=["yard"], requests=5.0
    )
    assert (made.scopes, made.models, made.fleets) == (("infer", "train"), ("digits",), ("yard",))
    assert registry.keys.authenticate(key) == made
    registry.keys.revoke("app")
    with pytest.raises(AuthenticationError, match="app: revoked"):
        registry.keys.authenticate(key)
    with pytest.raises(UnknownKeyError, match="app"):
        registry.keys.revoke("app")
    # the name is free again, and the old key stays shut out
    _, other = registry.keys.create(["infer"], name="app")
    assert registry.keys.authenticate(other).models == ()
    with pytest.raises(AuthenticationError):
        registry.keys.authenticate(key)
    whats = [(one.who, one.what, one.detail) for one in registry.trail.entries()]
    assert whats[-2:] == [
        ("operator", "key.revoke", "app"),
        ("operator", "key.create", "app scopes=infer,train models=digits fleets=yard"),
    ]


def test_a_key_dies_at_its_expiry(registry: Registry, clock: Clock) -> None:
    _, key = registry.keys.create(["infer"], name="app", ttl_s=90 * DAY_S)
    clock.now += 90 * DAY_S - 1
    registry.keys.authenticate(key)
    clock.now += 1
    with pytest.raises(AuthenticationError, match="app: expired"):
        registry.keys.authenticate(key)


def test_of_twenty_keys_of_one_name_made_at_once_one_is_made(registry: Registry) -> None:
    def create(_: int) -> str | None:
        try:
            return registry.keys.create(["infer"], name="app")[1]
        except ConflictError:
            return None

    with ThreadPoolExecutor(20) as threads:
        made = [key for key in threads.map(create, range(20)) if key is not None]
    assert len(made) == 1
    assert registry.keys.authenticate(made[0]).name == "app"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"scopes": []}, "scopes"),
        ({"scopes": ["root"]}, "root"),
        ({"scopes": ["operate"], "models": ["digits"]}, "infer"),
        ({"models": ["../digits"]}, "model"),
        ({"fleets": ["Yard"]}, "fleet"),
        ({"models": [f"m{n}" for n in range(33)]}, "32"),
        ({"name": "A key"}, "name"),
        ({"ttl_s": 0.0}, "ttl_s"),
        ({"requests": float("nan")}, "requests"),
        ({"bytes": float("inf")}, "bytes"),
    ],
)
def test_what_makes_no_key_is_refused(registry: Registry, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequestError, match=said):
        registry.keys.create(**{"scopes": ["infer"], **wrong})
    assert registry.keys.all() == ()


def test_uses_are_counted_and_written_together(registry: Registry, clock: Clock) -> None:
    _, key = registry.keys.create(["infer"], name="app")
    for _ in range(3):
        registry.keys.authenticate(key)
    assert registry.keys.all()[0].uses == 0
    registry.keys.write_uses()
    clock.now += 60
    registry.keys.authenticate(key)
    registry.keys.write_uses()
    registry.keys.write_uses()
    kept = registry.keys.all()[0]
    assert (kept.uses, kept.used_at) == (4, clock.now)


def test_no_key_is_stored_or_shown(tmp_path: Path) -> None:
    registry = Registry.open(f"sqlite:///{tmp_path}/registry.db")
    made, key = registry.keys.create(["infer"], name="app")
    assert key.startswith("sek_")
    assert len(key) == 4 + 43  # 256 bits
    assert made.key_sha256 not in repr(made)
    registry.close()
    for file in tmp_path.iterdir():
        assert key.removeprefix("sek_").encode() not in file.read_bytes()
