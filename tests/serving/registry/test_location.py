"""Where the registry is: noted in the state folder without a password, found by all commands."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from edge_sdk.errors import ConfigurationError
from profiles import load_reference
from server.errors import RegistryError
from server.registry.database import Registry, open_registry
from server.registry.location import LOCATION_NAME, RegistryLocation, settle

if TYPE_CHECKING:
    from tests.serving.conftest import ServerRun
    from tests.serving.postgresql import PostgreSql


@pytest.fixture
def database(postgresql: PostgreSql) -> Iterator[str]:
    name = postgresql.new_database()
    yield name
    postgresql.drop(name)


def test_a_state_folder_without_a_note_has_its_registry_in_a_file(tmp_path: Path) -> None:
    location = RegistryLocation.of(tmp_path)
    assert location.file == tmp_path / "registry.db"
    location.save(tmp_path)
    assert not (tmp_path / LOCATION_NAME).exists()


def test_the_note_has_no_password_and_the_file_with_it_is_found(
    postgresql: PostgreSql, database: str, tmp_path: Path
) -> None:
    url = postgresql.url_without_password(database)
    given = RegistryLocation.parse(url, postgresql.password_file)
    given.save(tmp_path)
    noted = (tmp_path / LOCATION_NAME).read_text()
    assert url in noted
    assert postgresql.password not in noted + repr(given) + str(given)
    assert (tmp_path / LOCATION_NAME).stat().st_mode & 0o777 == 0o600
    registry = open_registry(tmp_path)
    registry.create_token("barn")
    registry.close()


@pytest.mark.parametrize("form", ["in the login", "as a parameter"])
def test_a_password_in_the_url_is_used_and_not_noted(
    postgresql: PostgreSql, database: str, tmp_path: Path, form: str
) -> None:
    url = postgresql.url(database)
    if form == "as a parameter":
        url = f"{postgresql.url_without_password(database)}?password={postgresql.password}"
    location = RegistryLocation.parse(url)
    open_registry(tmp_path, location).close()
    location.save(tmp_path)
    assert postgresql.password not in (tmp_path / LOCATION_NAME).read_text() + str(location)


def test_a_password_of_the_environment_is_used(
    postgresql: PostgreSql, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = RegistryLocation.parse(postgresql.url_without_password(database))
    with pytest.raises(RegistryError, match=r"cannot be opened: .*no password supplied"):
        open_registry(tmp_path, location)
    monkeypatch.setenv("PGPASSWORD", postgresql.password)
    open_registry(tmp_path, location).close()


def test_a_wrong_password_is_refused_and_not_shown(
    postgresql: PostgreSql, database: str, tmp_path: Path
) -> None:
    url = postgresql.url(database).replace(postgresql.password, "hunter2")
    with pytest.raises(RegistryError, match="password authentication failed") as caught:
        open_registry(tmp_path, RegistryLocation.parse(url))
    assert "hunter2" not in str(caught.value)


def test_a_state_does_not_change_to_an_empty_database_unasked(
    postgresql: PostgreSql, tmp_path: Path
) -> None:
    open_registry(tmp_path).close()
    empty = postgresql.new_database("template0")
    location = RegistryLocation.parse(postgresql.url(empty))
    with pytest.raises(ConfigurationError, match=r"it is empty.*server backup.*server restore"):
        settle(tmp_path, location)
    Registry.open(postgresql.url(empty)).close()  # as one that its administrator copied
    assert settle(tmp_path, location) == location
    postgresql.drop(empty)


def test_a_registry_that_is_not_there_any_more_is_not_made_anew(tmp_path: Path) -> None:
    state, disk = tmp_path / "state", tmp_path / "disk"
    state.mkdir()
    location = RegistryLocation.parse(f"sqlite:///{disk}/r.db")
    open_registry(state, settle(state, location)).close()
    location.save(state)
    assert settle(state, None) == location
    disk.rename(tmp_path / "away")
    for start in (lambda: settle(state, None), lambda: open_registry(state)):
        with pytest.raises(ConfigurationError, match=r"not there.*mount its disk"):
            start()
    assert not disk.exists()
    (tmp_path / "away").rename(disk)
    open_registry(state).close()


@pytest.mark.parametrize(
    ("url", "file", "told"),
    [
        ("sqlite:///r.db", "f", "needs --registry postgresql://USER@HOST/NAME"),
        ("postgresql://u:pw123@h/n", "f", "without a password"),
        ("postgresql://u:pw123@h", None, "add /NAME"),
    ],
)
def test_options_that_cannot_work_are_refused(url: str, file: str | None, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told) as caught:
        RegistryLocation.parse(url, None if file is None else Path(file))
    assert "pw123" not in str(caught.value)


@pytest.mark.broker
@pytest.mark.deadline
def test_a_server_and_its_commands_use_the_database_that_it_was_started_with(
    run_server: Callable[..., ServerRun], postgresql: PostgreSql, tmp_path: Path
) -> None:
    database = postgresql.new_database("template0")
    state = tmp_path / "state"
    url = postgresql.url_without_password(database)
    place = ("--registry", url, "--registry-password-file", str(postgresql.password_file))
    free = ("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0")
    server = run_server(state, (*free, *place)).wait_ready()
    assert not (state / "registry.db").exists()
    enrolled = server.call(
        "POST",
        "/api/v1/enroll",
        json={
            "token": splitedge("token", "create", "--state", str(state)).split(".")[0],
            "name": "pi-1",
            "profile": load_reference("raspberry-pi-4").to_dict(),
        },
    )
    assert enrolled.status == 201, enrolled.data
    shown = " ".join(word for one in server.family for word in psutil.Process(one.pid).cmdline())
    server.end()
    assert postgresql.password not in shown + server.stderr

    again = run_server(state, ()).wait_ready()  # as last time
    assert "pi-1" in splitedge("devices", "--state", str(state))
    again.end()
    registry = Registry.open(postgresql.url(database))
    assert [device.id for device in registry.devices()] == ["pi-1"]
    registry.close()
    postgresql.drop(database)


def splitedge(*words: str) -> str:
    """What `splitedge server WORDS` prints."""
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", "server", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
