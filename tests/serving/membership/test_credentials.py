"""Rotation of credentials: a device that is stopped at any moment can log in afterwards."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_sdk import api
from edge_sdk.errors import EnrolmentError
from edge_sdk.identity import Identity
from edge_sdk.membership.rotation import NEXT_NAME, current_identity, rotate
from profiles import load_reference
from server.errors import AuthenticationError
from server.registry.database import Registry
from server.registry.membership import CONFIRM_S
from server.state import existing_registry
from tests.clock import Clock
from tests.serving.conftest import ServerRun

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

# rotates, and is killed at the given call of one of the functions that it goes through
KILLED = """
import os, signal, sys
from pathlib import Path
from edge_sdk import api, durable, identity
from edge_sdk.membership import rotation

at, state = sys.argv[1], Path(sys.argv[2])

def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def then_killed(work):
    def both(*arguments, **more):
        work(*arguments, **more)
        killed()
    return both

if at == "before it asks":
    api.new_credential = killed
elif at == "after it asked":
    api.new_credential = then_killed(api.new_credential)
elif at == "after the new one is on the disk":
    rotation.write_atomic = then_killed(rotation.write_atomic)
elif at == "after it confirmed":
    api.confirm_credential = then_killed(api.confirm_credential)
elif at == "after the identity is saved":
    identity.Identity.save = then_killed(identity.Identity.save)
rotation.rotate(state)
"""
STEPS = (
    "before it asks",
    "after it asked",
    "after the new one is on the disk",
    "after it confirmed",
    "after the identity is saved",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerRun, Path]]:
    folder = tmp_path_factory.mktemp("rotation")
    free = ("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0")
    running = ServerRun(folder / "server", free, folder / "log").wait_ready()
    try:
        yield running, folder / "server"
    finally:
        running.end()


def enrol(server: tuple[ServerRun, Path], state: Path) -> Identity:
    with existing_registry(server[1]) as registry:
        token = registry.create_token()
    profile = load_reference("raspberry-pi-4")
    return api.enroll(server[0].http, token, state, profile=profile, name="pi")


@pytest.mark.parametrize("at", STEPS)
def test_a_device_killed_while_it_rotates_can_log_in_and_rotate_again(
    server: tuple[ServerRun, Path], tmp_path: Path, at: str
) -> None:
    state = tmp_path / "pi"
    first = enrol(server, state)
    command = [sys.executable, "-P", "-c", KILLED, at, str(state)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    again = current_identity(state)
    assert api.is_approved(again)
    assert not (state / NEXT_NAME).exists()
    confirmed = STEPS.index(at) >= STEPS.index("after the new one is on the disk")
    assert (again.credential != first.credential) == confirmed
    last = rotate(state)
    assert Identity.load(state) == last
    assert api.is_approved(last)
    for old in {first, again}:
        with pytest.raises(EnrolmentError, match="wrong credential"):
            api.is_approved(old)


def test_a_new_credential_that_is_never_confirmed_ends_and_the_old_one_stays(
    server: tuple[ServerRun, Path], tmp_path: Path
) -> None:
    state = tmp_path / "pi"
    identity = enrol(server, state)
    (state / NEXT_NAME).write_text('{"credential": "from-a-rotation-long-ago"}')
    assert current_identity(state) == identity
    assert not (state / NEXT_NAME).exists()
    (state / NEXT_NAME).write_text("damaged")
    assert current_identity(state) == identity


def test_a_device_without_space_for_its_identity_goes_on_with_the_confirmed_credential(
    server: tuple[ServerRun, Path], tmp_path: Path
) -> None:
    state = tmp_path / "pi"
    old = enrol(server, state)
    obstacle = state / ".agent.json.tmp"
    obstacle.mkdir()  # only agent.json cannot be written
    new = rotate(state)
    assert Identity.load(state) == old
    for identity in (new, current_identity(state)):
        assert identity.credential != old.credential
        assert api.is_approved(identity)
    obstacle.rmdir()
    assert current_identity(state) == Identity.load(state) == new
    assert not (state / NEXT_NAME).exists()


def test_without_a_server_the_device_keeps_both(tmp_path: Path) -> None:
    identity = Identity("http://127.0.0.1:9", "pi", "default", "old")
    identity.save(tmp_path)
    (tmp_path / NEXT_NAME).write_text('{"credential": "new"}')
    assert current_identity(tmp_path) == identity
    assert (tmp_path / NEXT_NAME).exists()


def test_both_credentials_are_valid_until_the_new_one_is_confirmed(tmp_path: Path) -> None:
    clock = Clock(1_000_000.0)
    registry = Registry.open(f"sqlite:///{tmp_path}/registry.db", clock=clock)
    device, old = registry.redeem_token(registry.create_token(), "pi", {})
    late = registry.membership.new_credential("pi")
    clock.now += CONFIRM_S + 1
    with pytest.raises(AuthenticationError):
        registry.authenticate("pi", late)
    with pytest.raises(AuthenticationError):
        registry.membership.confirm_credential("pi", late)
    new = registry.membership.new_credential("pi")
    for credential in (old, new):
        assert registry.authenticate("pi", credential).id == device.id
    for _ in range(2):
        registry.membership.confirm_credential("pi", new)
    with pytest.raises(AuthenticationError):
        registry.authenticate("pi", old)
    with pytest.raises(AuthenticationError):
        registry.membership.confirm_credential("pi", old)
    assert registry.authenticate("pi", new).credential_sha256 != device.credential_sha256
    registry.close()
