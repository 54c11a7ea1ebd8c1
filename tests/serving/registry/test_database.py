"""What the registry promises, on SQLite and on a real PostgreSQL."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, event

from edge_sdk.errors import ConfigurationError
from server.errors import (
    AuthenticationError,
    BadRequestError,
    RegistryError,
    ServerError,
    TokenError,
    UnknownDeviceError,
    UnknownModelError,
)
from server.registry.credentials import is_secret, secret_sha256
from server.registry.database import Registry
from tests.clock import Clock

if TYPE_CHECKING:
    from tests.serving.postgresql import PostgreSql

PROFILE = {"memory_mb": 512, "name": "Raspberry Pi Zero 2 W"}


@pytest.fixture
def clock() -> Clock:
    return Clock(1_000_000.0)


@pytest.fixture
def registry(registry_url: str, clock: Clock) -> Iterator[Registry]:
    registry = Registry.open(registry_url, clock=clock)
    yield registry
    registry.close()


def enrol(registry: Registry, wanted: str | None = "pi", fleet: str = "default") -> tuple[str, str]:
    device, credential = registry.redeem_token(registry.create_token(fleet), wanted, PROFILE)
    return device.id, credential


def test_a_token_makes_a_device_that_can_authenticate(registry: Registry, clock: Clock) -> None:
    token = registry.create_token("garden", ttl_s=60, note="for the shed")
    clock.now += 59
    device, credential = registry.redeem_token(token, "pi", PROFILE)
    assert dataclasses.asdict(device) == {
        "id": "pi",
        "fleet": "garden",
        "credential_sha256": secret_sha256(credential),
        "mosquitto_hash": device.mosquitto_hash,
        "profile": PROFILE,
        "depth": None,
        "bundle": None,
        "enrolled_at": 1_000_059.0,
        "revoked_at": None,
        "last_seen": None,
        "approved_at": 1_000_059.0,
        "next_sha256": None,
        "next_until": None,
        "tags": (),
        "title": None,
        "gone_at": None,
    }
    assert registry.authenticate("pi", credential) == device == registry.device("pi")
    (kept,) = registry.tokens()
    assert (kept.used_at, kept.used_by, kept.note) == (1_000_059.0, "pi", "for the shed")
    assert (kept.created_at, kept.expires_at) == (1_000_000.0, 1_000_060.0)


def test_a_token_works_once(registry: Registry) -> None:
    """FAULTS row 25."""
    token = registry.create_token()
    registry.redeem_token(token, "pi", PROFILE)
    with pytest.raises(TokenError, match="used"):
        registry.redeem_token(token, "pi", PROFILE)
    assert len(registry.devices()) == 1


def test_a_token_dies_at_its_expiry(registry: Registry, clock: Clock) -> None:
    """FAULTS row 25."""
    token = registry.create_token(ttl_s=60)
    clock.now += 60
    with pytest.raises(TokenError, match="expired"):
        registry.redeem_token(token, "pi", PROFILE)
    assert registry.devices() == ()


@pytest.mark.parametrize("token", ["", "x" * 43, "\ud800", "\x00"])
def test_an_unknown_token_is_refused_like_any_other(registry: Registry, token: str) -> None:
    registry.create_token()
    with pytest.raises(TokenError):
        registry.redeem_token(token, "pi", PROFILE)


def test_twenty_at_once_redeem_one_token_and_one_wins(registry: Registry) -> None:
    """FAULTS row 25."""
    token = registry.create_token()
    together = threading.Barrier(20)

    def redeem(number: int) -> str | None:
        together.wait()
        try:
            return registry.redeem_token(token, f"pi-{number}", PROFILE)[0].id
        except TokenError:
            return None

    with ThreadPoolExecutor(20) as pool:
        winners = [device for device in pool.map(redeem, range(20)) if device]
    assert len(winners) == 1
    assert [device.id for device in registry.devices()] == winners


def test_twenty_at_once_want_one_name_and_each_gets_its_own(registry: Registry) -> None:
    tokens = [registry.create_token() for _ in range(20)]
    together = threading.Barrier(20)

    def redeem(token: str) -> str:
        together.wait()
        return registry.redeem_token(token, "pi", PROFILE)[0].id

    with ThreadPoolExecutor(20) as pool:
        ids = set(pool.map(redeem, tokens))
    assert ids == {"pi"} | {f"pi-{number}" for number in range(2, 21)}


def test_a_taken_name_gets_the_first_free_suffix(registry: Registry) -> None:
    assert [enrol(registry)[0] for _ in range(3)] == ["pi", "pi-2", "pi-3"]
    assert enrol(registry, "pi-2")[0] == "pi-2-2"
    longest = "a" * 63
    assert [enrol(registry, longest)[0] for _ in range(2)] == [longest, "a" * 61 + "-2"]


@pytest.mark.parametrize("name", ["backend", "operator", "server"])
def test_a_reserved_name_is_never_a_device(registry: Registry, name: str) -> None:
    assert enrol(registry, name)[0] == f"{name}-2"


def test_a_device_without_a_wish_gets_a_name(registry: Registry) -> None:
    first, second = enrol(registry, None)[0], enrol(registry, None)[0]
    assert first != second
    assert first.startswith("device-")


@pytest.mark.parametrize("name", ["", "Pi", "a" * 64, "pi_1", "pi\n", "ä", "\x00"])
def test_a_name_that_is_no_id_is_refused_and_the_token_stays(registry: Registry, name: str) -> None:
    token = registry.create_token()
    with pytest.raises(BadRequestError, match="device: expected 1 to 63"):
        registry.redeem_token(token, name, PROFILE)
    registry.redeem_token(token, "pi", PROFILE)


@pytest.mark.parametrize(
    "profile",
    [{"x": float("nan")}, {"x": float("inf")}, {"x": "\ud800"}, {"x": b""}, {"x": "y" * 16_400}],
)
def test_a_profile_that_cannot_be_kept_is_refused(
    registry: Registry, profile: dict[str, Any]
) -> None:
    device, _ = enrol(registry)
    with pytest.raises(BadRequestError, match="profile"):
        registry.update_profile(device, profile)
    assert registry.device(device).profile == PROFILE


@pytest.mark.parametrize(
    ("fleet", "ttl_s", "note"),
    [
        ("A", 60, ""),
        ("a", 0, ""),
        ("a", -1, ""),
        ("a", float("nan"), ""),
        ("a", 31 * 86_400, ""),
        ("a", 60, "n" * 201),
        ("a", 60, "two\nlines"),
    ],
)
def test_a_token_that_makes_no_sense_is_not_made(
    registry: Registry, fleet: str, ttl_s: float, note: str
) -> None:
    with pytest.raises(BadRequestError):
        registry.create_token(fleet, ttl_s, note)
    assert registry.tokens() == ()


def test_a_wrong_credential_and_an_unknown_device_read_alike(registry: Registry) -> None:
    device, credential = enrol(registry)
    texts = set()
    for name, secret in [(device, credential[:-1]), (device, ""), ("pi-9", credential), ("\0", "")]:
        with pytest.raises(AuthenticationError) as caught:
            registry.authenticate(name, secret)
        texts.add(str(caught.value))
    assert len(texts) == 1


def test_a_revoked_device_is_refused_from_then_on(registry: Registry, clock: Clock) -> None:
    device, credential = enrol(registry)
    clock.now += 5
    assert registry.revoke(device).revoked_at == 1_000_005.0
    clock.now += 5
    assert registry.revoke(device).revoked_at == 1_000_005.0
    with pytest.raises(AuthenticationError, match="revoked"):
        registry.authenticate(device, credential)
    with pytest.raises(AuthenticationError, match="wrong credential"):
        registry.authenticate(device, "guess")
    assert [entry.what for entry in registry.trail.entries()].count("device.revoke") == 1


def test_devices_are_listed_by_fleet_and_id(registry: Registry) -> None:
    for name, fleet in [("c", "one"), ("a", "two"), ("b", "one")]:
        enrol(registry, name, fleet)
    assert [device.id for device in registry.devices()] == ["a", "b", "c"]
    assert [device.id for device in registry.devices("one")] == ["b", "c"]
    assert registry.devices("three") == ()
    with pytest.raises(BadRequestError, match="fleet"):
        registry.devices("\x00")


def test_an_assignment_is_kept_and_taken_back(registry: Registry) -> None:
    device, _ = enrol(registry)
    assigned = registry.assign(device, 3, "cnn/7/d3-int8")
    assert (assigned.depth, assigned.bundle) == (3, "cnn/7/d3-int8")
    assert registry.assign(device, 3, "cnn/7/d3-int8") == assigned == registry.device(device)
    cleared = registry.assign(device, None, None)
    assert (cleared.depth, cleared.bundle) == (None, None)
    assert [entry.what for entry in registry.trail.entries()].count("device.assign") == 2


@pytest.mark.parametrize(("depth", "bundle"), [(-1, None), (1000, None), (1, "b" * 161)])
def test_an_assignment_that_cannot_be_kept_is_refused(
    registry: Registry, depth: int, bundle: str | None
) -> None:
    device, _ = enrol(registry)
    with pytest.raises(BadRequestError):
        registry.assign(device, depth, bundle)


def test_last_seen_follows_the_clock_to_within_ten_seconds(
    registry: Registry, clock: Clock
) -> None:
    first, second = enrol(registry)[0], enrol(registry)[0]
    seen = []
    for step in (0.0, 9.0, 2.0, -500.0):  # 11 s after the first; then the clock is set back
        clock.now += step
        registry.touch(first, "unknown")
        seen.append(registry.device(first).last_seen)
    assert seen == [1_000_000.0, 1_000_000.0, 1_000_011.0, 999_511.0]
    assert registry.device(second).last_seen is None
    registry.touch()


def test_a_device_that_went_away_is_away_until_it_is_heard_again(
    registry: Registry, clock: Clock
) -> None:
    device = enrol(registry)[0]
    registry.touch(device)
    for step in (1.0, 2.0):  # the first goodbye counts: its time is that of the absence
        clock.now += step
        registry.depart(device, "unknown")
        assert registry.device(device).gone_at == 1_000_001.0
    registry.touch(device)  # within the ten seconds in which nothing else is written
    assert (registry.device(device).gone_at, registry.device(device).last_seen) == (None, clock.now)
    registry.depart()


@pytest.mark.parametrize("device", ["pi", "Not An Id", "\x00"])
def test_what_concerns_an_unknown_device_says_so(registry: Registry, device: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: registry.device(device),
        lambda: registry.revoke(device),
        lambda: registry.assign(device, 1, None),
        lambda: registry.update_profile(device, PROFILE),
    ]
    for call in calls:
        with pytest.raises(UnknownDeviceError, match="not enrolled"):
            call()


def test_one_version_of_a_model_is_active(registry: Registry) -> None:
    for name, version in [("cnn", 1), ("cnn", 2), ("vit", 1)]:
        assert registry.catalogue.publish(name, version).active
    assert registry.catalogue.activate("cnn", 1).active
    assert registry.catalogue.activate("cnn", 1).active
    found = [(model.name, model.version, model.active) for model in registry.catalogue.versions()]
    assert found == [("cnn", 1, True), ("cnn", 2, False), ("vit", 1, True)]


def test_a_version_is_published_once_in_repeated_calls(registry: Registry, clock: Clock) -> None:
    registry.catalogue.publish("cnn", 1)
    registry.catalogue.activate("cnn", 1)
    clock.now += 5
    again = registry.catalogue.publish("cnn", 1)
    assert (again.active, again.published_at) == (True, 1_000_000.0)
    assert [entry.what for entry in registry.trail.entries()].count("model.publish") == 1


def test_two_activations_at_once_leave_one_active(registry: Registry) -> None:
    versions = range(1, 9)
    for version in versions:
        registry.catalogue.publish("cnn", version)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda version: registry.catalogue.activate("cnn", version), versions))
    assert sum(model.active for model in registry.catalogue.versions()) == 1


def test_an_unknown_model_names_those_there_are(registry: Registry) -> None:
    with pytest.raises(UnknownModelError, match="available: none"):
        registry.catalogue.activate("cnn", 1)
    registry.catalogue.publish("cnn", 1)
    with pytest.raises(UnknownModelError, match="cnn/2: not published; available: cnn/1"):
        registry.catalogue.activate("cnn", 2)


@pytest.mark.parametrize(("name", "version"), [("CNN", 1), ("cnn", 0), ("cnn", 10**9)])
def test_a_model_that_has_no_place_is_refused(registry: Registry, name: str, version: int) -> None:
    with pytest.raises(BadRequestError):
        registry.catalogue.publish(name, version)


def test_the_trail_says_who_did_what(registry: Registry, clock: Clock) -> None:
    device, _ = enrol(registry)
    clock.now += 1
    registry.revoke(device, who="ann")
    newest = registry.trail.entries()[0]
    assert (newest.at, newest.who, newest.what, newest.detail) == (
        1_000_001.0,
        "ann",
        "device.revoke",
        "pi",
    )
    assert [entry.what for entry in registry.trail.entries(2)] == ["device.revoke", "device.enrol"]


def test_what_was_committed_is_there_after_closing(registry_url: str) -> None:
    registry = Registry.open(registry_url)
    device, credential = enrol(registry)
    registry.close()
    registry = Registry.open(registry_url)
    assert registry.authenticate(device, credential).id == device
    registry.close()


def test_no_secret_is_kept_shown_or_logged(
    registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """FAULTS row 34."""
    with caplog.at_level(logging.DEBUG):
        token = registry.create_token()
        device, credential = registry.redeem_token(token, "pi", PROFILE)
        registry.authenticate("pi", credential)
        with pytest.raises(TokenError) as caught:
            registry.redeem_token(token, "pi", PROFILE)
        with pytest.raises(AuthenticationError) as wrong:
            registry.authenticate("pi", credential + "x")
    shown = f"{device!r} {registry!r} {registry.tokens()!r} {registry.trail.entries()!r}"
    shown += f"{caught.value!r} {wrong.value!r} {caplog.text}"
    for secret in (token, credential, secret_sha256(token), secret_sha256(credential)):
        assert secret not in shown
    for file in tmp_path.iterdir():
        assert token.encode() not in file.read_bytes()
        assert credential.encode() not in file.read_bytes()


def test_a_secret_matches_its_own_hash_only() -> None:
    # sha256 of "abc", from FIPS 180-2, appendix B.1
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert secret_sha256("abc") == digest
    assert is_secret("abc", digest)
    assert not is_secret("abd", digest)
    assert not is_secret("", digest)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.one_of(st.none(), st.text(max_size=70), st.from_regex(r"[a-z0-9-]{1,63}")),
    profile=st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
            lambda inner: st.lists(inner, max_size=3),
            max_leaves=5,
        ),
        max_size=3,
    ),
)
def test_any_profile_reads_back_or_is_refused(
    registry: Registry, name: str | None, profile: dict[str, Any]
) -> None:
    try:
        device, credential = registry.redeem_token(registry.create_token(), name, profile)
    except BadRequestError:
        return
    assert registry.authenticate(device.id, credential).profile == profile


@pytest.mark.parametrize(
    "bad",
    [
        *("", "registry.db", "sqlite://", "sqlite:///:memory:"),
        *("nosuch://x", "mysql://u:pw123@h/n"),
        *("postgresql://u:pw123@h", "postgresql://u:pw123@h:port/n"),
    ],
)
def test_a_database_we_do_not_serve_is_refused_in_our_words(bad: str) -> None:
    with pytest.raises(ConfigurationError, match="registry") as caught:
        Registry.open(bad)
    assert "pw123" not in str(caught.value)


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    file = tmp_path / "registry.db"
    file.write_bytes(b"this is a text file, and a long one " * 40)
    with pytest.raises(RegistryError, match=r"registry\.db: cannot be opened: file is not a data"):
        Registry.open(f"sqlite:///{file}")


def test_a_database_that_fails_later_is_a_503_and_tells_peers_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry.open(f"sqlite:///{tmp_path}/registry.db")
    registry.close()
    for file in tmp_path.iterdir():
        file.write_bytes(b"damaged beyond repair " * 400)
    with pytest.raises(ServerError) as caught:
        registry.devices()
    registry.close()
    assert caught.value.status == 503
    assert str(tmp_path) not in str(caught.value)
    assert "file is not a database" in caplog.text


def test_the_database_and_its_folder_are_for_their_owner_only(tmp_path: Path) -> None:
    registry = Registry.open(f"sqlite:///{tmp_path}/state/registry.db")
    enrol(registry)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "state").iterdir()}
    registry.close()
    assert modes["registry.db"] == modes["registry.db-wal"] == 0o600
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def test_a_checkpoint_empties_the_log_while_another_program_has_the_database_open(
    tmp_path: Path,
) -> None:
    registry, other = (Registry.open(f"sqlite:///{tmp_path}/registry.db") for _ in range(2))
    enrol(registry)
    assert other.device("pi").id == "pi"
    log = tmp_path / "registry.db-wal"
    assert log.stat().st_size > 0
    registry.checkpoint()
    assert log.stat().st_size == 0
    enrol(registry, "pi-b")
    assert [device.id for device in other.devices()] == ["pi", "pi-b"]
    registry.close()
    other.close()


def test_an_enrolment_that_is_undone_leaves_the_token_good(registry: Registry) -> None:
    token = registry.create_token("lab")
    other, _ = registry.redeem_token(registry.create_token("lab"), "pi", PROFILE)
    device, _ = registry.redeem_token(token, "pi", PROFILE)
    registry.undo_enrolment(device, token)
    assert [kept.id for kept in registry.devices()] == [other.id]
    again, _ = registry.redeem_token(token, "pi", PROFILE)
    assert (again.id, again.fleet) == ("pi-2", "lab")
    with pytest.raises(TokenError):
        registry.redeem_token(token, "pi", PROFILE)


def test_the_last_change_grows_with_what_a_server_follows(registry: Registry) -> None:
    marks = [registry.last_change()]
    device, _ = registry.redeem_token(registry.create_token(), "pi", PROFILE)
    marks.append(registry.last_change())
    registry.revoke(device.id)
    marks.append(registry.last_change())
    registry.catalogue.publish("digits", 1)
    registry.catalogue.publish("digits", 2)
    marks.append(registry.last_change())
    registry.catalogue.activate("digits", 1)
    marks.append(registry.last_change())
    registry.catalogue.assign("default", "digits", 2)
    marks.append(registry.last_change())
    assert marks == sorted(set(marks))
    registry.touch(device.id)  # heartbeats are not followed
    registry.depart(device.id)
    assert registry.last_change() == marks[-1]


@pytest.mark.deadline
def test_a_follower_misses_no_change_of_transactions_that_interleave(
    postgresql: PostgreSql,
) -> None:
    """FAULTS row 24: a revocation is numbered, and another change commits before it does."""
    url = postgresql.url(postgresql.new_database())
    numbered, go_on = threading.Event(), threading.Event()
    with (
        contextlib.closing(Registry.open(url)) as first,
        contextlib.closing(Registry.open(url)) as second,
        contextlib.closing(Registry.open(url)) as follower,
        ThreadPoolExecutor(2) as threads,
    ):
        enrol(second)

        def pause(_: Connection) -> None:
            numbered.set()
            assert go_on.wait(20)

        event.listen(first._transactions._writer, "commit", pause)
        revoking = threads.submit(first.revoke, "pi")
        assert numbered.wait(20)
        other = threads.submit(second.create_token)
        wait([other], timeout=0.5)  # it must not overtake, so this ends by the clock
        seen = follower.last_change()
        assert not follower.device("pi").revoked_at
        go_on.set()
        revoking.result()
        other.result()
        assert follower.last_change() > seen
