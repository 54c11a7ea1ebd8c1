"""Titles of devices: on each kind of database, by command."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import Connection, event
from typer.testing import CliRunner

from server.cli import app
from server.errors import BadRequestError, ConflictError, UnknownDeviceError
from server.registry.database import Registry

if TYPE_CHECKING:
    from tests.serving.postgresql import PostgreSql


@pytest.fixture
def registry(registry_url: str) -> Iterator[Registry]:
    """With two devices."""
    registry = Registry.open(registry_url)
    for name in ("pi-1", "pi-2"):
        registry.redeem_token(registry.create_token(), name, {})
    yield registry
    registry.close()


def test_a_title_stays_with_its_device_and_is_audited(registry: Registry) -> None:
    assert registry.device("pi-1").title is None
    assert registry.titles.give("pi-1", "  Küche, Fenster ") == "Küche, Fenster"
    assert registry.titles.give("pi-1", "Küche, Fenster") == "Küche, Fenster"
    registry.titles.give("pi-2", "Hof")
    (token,) = registry.create_tokens(1, device="pi-1")
    back, _ = registry.redeem_token(token, "another", {})
    assert (back.id, back.title) == ("pi-1", "Küche, Fenster")
    assert [one.title for one in registry.devices()] == ["Küche, Fenster", "Hof"]
    assert registry.titles.give("pi-1", "") is None
    registry.membership.remove("pi-2")
    assert registry.titles.give("pi-1", "Hof") == "Hof"  # free with its device
    entries = registry.trail.entries(what="device.rename")
    assert [(one.who, one.detail) for one in reversed(entries)] == [
        ("operator", "pi-1 title=Küche, Fenster"),
        ("operator", "pi-2 title=Hof"),
        ("operator", "pi-1 title=none"),
        ("operator", "pi-1 title=Hof"),
    ]


@pytest.mark.parametrize("taken", ["Hof", "hof", "ＨＯＦ", "pi-2", "PI-2"])
def test_the_title_or_the_name_of_another_device_is_refused(registry: Registry, taken: str) -> None:
    registry.titles.give("pi-2", "Hof")
    with pytest.raises(ConflictError, match="the device pi-2 is called so"):
        registry.titles.give("pi-1", taken)
    assert registry.device("pi-1").title is None


@pytest.mark.parametrize(
    "malformed", ["two\nlines", "a\x1b[2Jb", "nul\0", "right\u202eleft", "half\ud800", "x" * 64]
)
def test_a_title_that_cannot_be_shown_is_refused(registry: Registry, malformed: str) -> None:
    with pytest.raises(BadRequestError, match="at most 63 characters that can be shown"):
        registry.titles.give("pi-1", malformed)
    assert registry.device("pi-1").title is None


def test_a_title_in_place_of_a_name_is_told_apart(registry: Registry) -> None:
    registry.titles.give("pi-2", "Hof")
    with pytest.raises(UnknownDeviceError, match="'Hof': not enrolled here; that is the title of"):
        registry.revoke("Hof")
    with pytest.raises(UnknownDeviceError, match="pi-9"):
        registry.titles.give("pi-9", "Gate")
    for odd in ("", "\0", "half\ud800"):
        with pytest.raises(UnknownDeviceError, match="not enrolled here"):
            registry.membership.remove(odd)


def test_a_new_device_gets_no_name_that_is_a_title(registry: Registry) -> None:
    registry.titles.give("pi-2", "gate")
    device, _ = registry.redeem_token(registry.create_token(), "gate", {})
    assert device.id == "gate-2"
    registry.titles.give("pi-2", "Ｈof")  # titles that only their letters' forms tell apart
    device, _ = registry.redeem_token(registry.create_token(), "hof", {})
    assert device.id == "hof-2"


@pytest.mark.deadline
def test_a_device_that_enrols_while_its_name_becomes_a_title_gets_another(
    postgresql: PostgreSql,
) -> None:
    """Two processes on one PostgreSQL: neither sees what the other has not committed yet."""
    url = postgresql.url(postgresql.new_database())
    given, go_on = threading.Event(), threading.Event()
    with (
        contextlib.closing(Registry.open(url)) as first,
        contextlib.closing(Registry.open(url)) as second,
        ThreadPoolExecutor(2) as threads,
    ):
        first.redeem_token(first.create_token(), "pi-1", {})
        token = second.create_token()

        def pause(_: Connection) -> None:
            given.set()
            assert go_on.wait(20)

        event.listen(first._transactions._writer, "commit", pause, once=True)
        renaming = threads.submit(first.titles.give, "pi-1", "pi-2")
        assert given.wait(20)
        enrolling = threads.submit(second.redeem_token, token, "pi-2", {})
        wait([enrolling], timeout=0.5)  # it must not go on, so this ends by the clock
        go_on.set()
        assert renaming.result() == "pi-2"
        assert enrolling.result()[0].id == "pi-2-2"


def test_the_command_renames_and_lists(tmp_path: Path) -> None:
    state = tmp_path / "server"
    state.mkdir()
    registry = Registry.open(f"sqlite:///{state}/registry.db")
    registry.redeem_token(registry.create_token(), "pi-1", {})
    registry.close()

    def devices(*words: str) -> str:
        done = CliRunner(env={"COLUMNS": "160"}).invoke(
            app, ["devices", *words, "--state", str(state)]
        )
        assert done.exit_code == 0, done.output
        return done.stdout

    renamed = {"device": "pi-1", "title": "Hall [red]"}
    assert json.loads(devices("rename", "pi-1", "Hall [red]", "--json")) == renamed
    assert "Hall [red]" in devices()
    assert json.loads(devices("--json"))[0]["title"] == "Hall [red]"
    assert devices("rename", "pi-1", "") == "pi-1 has no title\n"
