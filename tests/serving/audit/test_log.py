"""The audit log: what repeats is counted, what floods is bounded, and changes outlive refusals."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from server.audit.broker_events import read_broker_event
from server.audit.cli import show
from server.audit.log import AuditLog
from server.broker.mosquitto_log import MosquittoLog
from server.errors import RegistryError
from server.registry.database import Registry
from server.registry.trail.events import Event, Tally
from server.registry.transactions import acting_from
from tests.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock(1_000.0)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    registry = Registry.open(f"sqlite:///{tmp_path}/registry.db")
    yield registry
    registry.close()


@pytest.fixture
def log(registry: Registry, clock: Clock) -> AuditLog:
    return AuditLog(registry.trail, clock=clock)


def refusal(source: str, who: str = "pi-1") -> Event:
    return Event("mqtt.login", "refused", who, source, "wrong credential")


def test_refusals_of_one_source_are_one_row_a_minute(
    registry: Registry, log: AuditLog, clock: Clock
) -> None:
    for minute in range(2):
        for turn in range(60):
            for number in range(100):
                log.note(refusal("10.0.0.9", f"guess-{turn}-{number}"))
            log.write()
            clock.now += 1
        assert len(registry.trail.entries()) == minute + 1
    log.write(last=True)
    assert [entry.count for entry in registry.trail.entries()] == [6_000, 6_000]
    assert registry.trail.entries()[0].source == "10.0.0.9"


def test_networks_of_a_flood_are_bounded_and_what_is_left_out_is_counted(
    registry: Registry, log: AuditLog
) -> None:
    for number in range(20_000):
        log.note(refusal(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"))
    log.write()
    for number in range(20_000):
        log.note(refusal(f"11.{number >> 16}.{number >> 8 & 255}.{number & 255}"))
    log.write()
    log.write(last=True)
    log.write(last=True)
    entries = registry.trail.entries(10_000)
    assert len(entries) <= 4_096 + 1
    assert sum(entry.count for entry in entries) == 40_000
    (left_out,) = [entry for entry in entries if entry.what == "audit.dropped"]
    assert left_out.count == 40_000 - 4_096


def test_one_ipv6_customer_is_one_source() -> None:
    tally = Tally()
    for number in range(100):
        tally.note(refusal(f"2001:db8:1:2::{number:x}"))
    assert [event.count for event in tally.take()] == [100]


def test_logins_are_told_apart_by_device_and_refusals_are_not() -> None:
    tally = Tally()
    for who in ("pi-1", "pi-2", "pi-2"):
        tally.note(Event("mqtt.login", "done", who, "10.0.0.9"))
        tally.note(refusal("10.0.0.9", who))
    assert [event.count for event in tally.take()] == [1, 3, 2]


def test_refusals_of_who_had_logged_in_are_rows_of_their_own(
    registry: Registry, log: AuditLog
) -> None:
    refused = Event("http.request", "refused", "", "10.0.0.1", "GET /: no login")
    for who in ("", "pi-1", "somebody"):  # three names that anyone can give
        log.note(replace(refused, who=who))
    for who in ("reader:anna", "reader:anna", "reader:ben"):
        log.note(replace(refused, who=who, detail="POST /x: reading alone", proven=True))
    log.write(last=True)
    found = registry.trail.entries(9, outcome="refused")
    assert [(one.who, one.count) for one in found] == [
        ("reader:ben", 1),
        ("reader:anna", 2),
        ("", 3),
    ]


def test_topics_that_a_device_is_refused_are_told_of_that_device_alone() -> None:
    """Devices behind one address have logged in, so their names are known to be true."""
    tally = Tally()
    for who in ("pi-1", "pi-2", "pi-2"):
        for event in ("denied", "cut"):
            told = {"event": event, "client_id": who, "peer": ["10.0.0.7", 50_000], "why": "x"}
            event_read = read_broker_event(told)
            assert event_read is not None
            tally.note(event_read)
    assert [(one.what, one.who, one.count) for one in tally.take()] == [
        ("mqtt.topic", "pi-1", 1),
        ("mqtt.cut", "pi-1", 1),
        ("mqtt.topic", "pi-2", 2),
        ("mqtt.cut", "pi-2", 2),
    ]


def test_a_flood_of_refusals_pushes_out_no_change(registry: Registry, clock: Clock) -> None:
    log = AuditLog(registry.trail, rows=100, clock=clock)
    registry.redeem_token(registry.create_token(), "pi-1", {})
    before = registry.last_change()
    for number in range(500):
        log.note(refusal(f"10.0.{number >> 8}.{number & 255}"))
    log.write()
    log.prune()
    kinds = [entry.what for entry in registry.trail.entries(1_000)]
    assert kinds.count("mqtt.login") == 100
    assert {"token.create", "device.enrol"} <= set(kinds)
    assert registry.last_change() == before  # followers of the registry need not look


def test_old_entries_are_dropped_but_the_newest_change_stays(tmp_path: Path) -> None:
    clock = Clock(1_000.0)
    registry = Registry.open(f"sqlite:///{tmp_path}/old.db", clock=clock)
    for _ in range(5):
        registry.create_token()
        clock.now += 86_400
    last = registry.last_change()
    assert registry.trail.prune(age_s=2.5 * 86_400) == 3
    clock.now += 100 * 86_400
    assert registry.trail.prune(age_s=2.5 * 86_400) == 1
    assert registry.last_change() == last
    assert registry.trail.prune() == 0
    registry.close()


def test_what_cannot_be_written_now_is_written_later(
    registry: Registry, log: AuditLog, tmp_path: Path, clock: Clock
) -> None:
    blocker = sqlite3.connect(tmp_path / "registry.db", isolation_level=None)
    blocker.execute("ALTER TABLE audit RENAME TO hidden")
    for _ in range(3):
        log.note(refusal("10.0.0.9"))
        with pytest.raises(RegistryError):
            log.write()
    blocker.execute("ALTER TABLE hidden RENAME TO audit")
    blocker.close()
    log.write()
    assert [entry.count for entry in registry.trail.entries()] == [3]


def test_text_of_a_peer_is_cut_and_forges_no_line(registry: Registry, log: AuditLog) -> None:
    log.note(Event("mqtt.login", "refused", "pi\n1\x1b[2J", "10.0.0.9", "x" * 10_000 + "\ud800"))
    log.write()
    (entry,) = registry.trail.entries()
    assert entry.who == "pi 1 [2J"
    assert len(entry.detail) == 300


def test_words_of_a_peer_that_look_like_markup_are_shown_as_they_are(
    registry: Registry, log: AuditLog, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name such as [/red] would end the command, and hide all other entries."""
    log.note(Event("http.request", "refused", "[/red]", "10.0.0.9", "GET /[bold]x :skull:"))
    log.write()
    show(registry.trail.entries(), as_json=False)
    shown = capsys.readouterr().out
    assert "[/red]" in shown
    assert "GET /[bold]x :skull:" in shown


def test_a_change_says_from_where(registry: Registry) -> None:
    with acting_from("10.0.0.7"):
        registry.create_token()
    registry.create_token()
    assert [entry.source for entry in registry.trail.entries()] == ["server", "10.0.0.7"]


def test_entries_are_found_by_time_who_kind_and_outcome(registry: Registry, log: AuditLog) -> None:
    device, _ = registry.redeem_token(registry.create_token(), "pi-1", {})
    registry.revoke(device.id)
    log.note(Event("mqtt.login", "refused", "pi-1", "10.0.0.9", at=5.0, until=6.0))
    log.write()
    trail = registry.trail
    assert [entry.what for entry in trail.entries(who="pi-1")] == ["mqtt.login", "device.enrol"]
    assert [entry.what for entry in trail.entries(what="device.")] == [
        "device.revoke",
        "device.enrol",
    ]
    assert [entry.at for entry in trail.entries(outcome="refused")] == [5.0]
    assert "mqtt.login" not in {entry.what for entry in trail.entries(since=7.0)}
    assert trail.entries(after=trail.entries(1)[0].id) == ()


def test_about_a_device_is_what_it_did_and_what_was_done_to_it(registry: Registry) -> None:
    for who, what, detail in (
        ("pi-4", "device.enrol", "fleet=default"),
        ("operator", "device.revoke", "pi-4"),
        ("operator", "quarantine.lift", "pi-4 digits/2/d1"),
        ("operator", "device.revoke", "pi-4-2"),
        ("operator", "device.revoke", "a-pi-4"),
        ("pi-42", "device.enrol", "fleet=default"),
    ):
        registry.trail.record(who, what, detail)
    about = [entry.what for entry in registry.trail.entries(about="pi-4")]
    assert about == ["quarantine.lift", "device.revoke", "device.enrol"]
    assert [entry.what for entry in registry.trail.entries(who="pi-4")] == ["device.enrol"]
    assert [entry.what for entry in registry.trail.entries(about="digits")] == ["quarantine.lift"]


def test_a_token_without_a_note_has_no_empty_fields(registry: Registry) -> None:
    registry.create_token()
    registry.create_token("garden", note="shed", approve=True)
    details = [entry.detail for entry in registry.trail.entries(what="token.create")]
    assert details == ["fleet=garden note=shed approve", "fleet=default"]


def test_a_cut_by_mosquitto_is_not_called_a_revocation() -> None:
    line = "Client pi-4 been disconnected by administrative action."
    event = read_broker_event(MosquittoLog().read(line) or {})
    assert event is not None
    assert (event.what, event.who) == ("mqtt.cut", "pi-4")
    assert event.detail == "revoked, or its login was changed"
