"""One server writes a registry: a second one is told which, and a killed one leaves it free."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_sdk.errors import StateInUseError
from server.registry.location import RegistryLocation
from server.registry.writer.lock import WriterLock, take_writer_lock
from tests.serving.conftest import ServerRun
from tests.serving.postgresql import PostgreSql
from tests.waiting import wait_until

pytestmark = pytest.mark.broker

FREE = ("--http", "127.0.0.1:0", "--mqtt", "mosquitto:127.0.0.1:0")


@pytest.fixture(params=["sqlite", "postgresql"])
def registry(
    request: pytest.FixtureRequest, tmp_path: Path, postgresql: PostgreSql
) -> Iterator[list[str]]:
    """Options that name a registry outside of the state folder."""
    if request.param == "sqlite":
        yield ["--registry", f"sqlite:///{tmp_path}/shared.db"]
        return
    name = postgresql.new_database()
    password = str(postgresql.password_file)
    yield [
        *("--registry", postgresql.url_without_password(name)),
        *("--registry-password-file", password),
    ]
    postgresql.drop(name)


@pytest.mark.deadline
def test_a_second_api_is_refused_until_the_first_is_killed(
    registry: list[str], tmp_path: Path
) -> None:
    started: list[ServerRun] = []

    def start(name: str, role: str) -> ServerRun:
        options = [*FREE, *registry]
        one = ServerRun(tmp_path / name, options, tmp_path / f"{name}.log", role=role)
        started.append(one)
        return one

    try:
        first = start("first", "api").wait_ready()
        for name, role in (("second", "api"), ("whole", "run")):
            other = start(name, role)
            assert other.process.wait(60) != 0
            told = " ".join(other.stderr.split())
            assert f"process {first.process.pid} on {socket.gethostname()} already writes" in told
            assert "start `splitedge server backend` here" in told
            assert "Traceback" not in told
        first.end(signal.SIGKILL)
        start("second", "api").wait_ready()
    finally:
        for one in started:
            one.end(signal.SIGKILL)


def test_a_lock_is_taken_again_after_the_database_was_away(postgresql: PostgreSql) -> None:
    name = postgresql.new_database()
    location = RegistryLocation.parse(
        postgresql.url_without_password(name), postgresql.password_file
    )
    cut = (
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        f" WHERE datname = '{name}' AND application_name LIKE 'splitedge server: %'"
    )
    first = take_writer_lock(location)
    postgresql.do(cut)
    first.keep()
    with pytest.raises(StateInUseError, match=r"process \d+ on .* already writes to it"):
        take_writer_lock(location)
    assert not first.lost

    # another server is faster
    postgresql.do(cut)
    second = wait_until(lambda: _taken(location), "the lock is not free", 10)
    with pytest.raises(StateInUseError):
        first.keep()
    assert first.lost
    assert second is not None
    second.release()
    first.keep()
    assert not first.lost
    first.release()
    postgresql.drop(name)


def _taken(location: RegistryLocation) -> WriterLock | None:
    try:
        return take_writer_lock(location)
    except StateInUseError:
        return None
