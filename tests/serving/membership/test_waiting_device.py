"""A device that waits to train, without a running agent: it follows the orders of its server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_sdk import api
from edge_sdk.errors import EnrolmentError
from edge_sdk.identity import Identity
from edge_sdk.membership.rotation import rotate
from edge_sdk.training.device.invitation import CommandLink
from profiles import load_reference
from server.processes import ServerProcess
from server.state import existing_registry
from server.tokens import create_token
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.deadline]


@pytest.fixture(params=["embedded", "mosquitto"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server without a model, so that its devices can only train."""
    process = ServerProcess(tmp_path / "server")
    process.start(("--http", "127.0.0.1:0", "--mqtt", f"{request.param}:127.0.0.1:0"))
    yield process
    process.stop()


@pytest.fixture
def device(server: ServerProcess, tmp_path: Path) -> Path:
    token = create_token(tmp_path / "server")
    profile = load_reference("raspberry-pi-4")
    api.enroll(server.http, token, tmp_path / "pi", profile=profile, name="pi")
    return tmp_path / "pi"


def told_to_rotate(state: Path, device: Path) -> Identity:
    """The credential before, which is no longer valid."""
    before = Identity.load(device)
    with existing_registry(state) as registry:
        registry.membership.ask_to_rotate("pi")
    wait_until(lambda: Identity.load(device).credential != before.credential, "none new", 30)

    def is_done() -> bool:
        with existing_registry(state) as registry:
            return not registry.membership.orders()

    wait_until(is_done, "the order is not done", 10)
    with pytest.raises(EnrolmentError, match="wrong credential"):
        api.is_approved(before)
    return before


def test_a_device_that_waits_to_train_replaces_its_credential_when_it_is_told(
    server: ServerProcess, device: Path, tmp_path: Path
) -> None:
    with CommandLink(Identity.load(device), device) as link:
        wait_until(lambda: link._link is not None and link._link.connected, "not connected", 20)
        told_to_rotate(tmp_path / "server", device)
        assert link.arrived.get(timeout=5)["op"] == "rotate"
        # the link that it hears by has the new credential: it is told again
        wait_until(lambda: link._link is not None and link._link.connected, "not back", 20)
        told_to_rotate(tmp_path / "server", device)
        # and that of another process, `splitedge agent rotate`
        wait_until(lambda: link._link is not None and link._link.connected, "not back", 20)
        rotate(device)
        newest = Identity.load(device).credential
        wait_until(lambda: link._membership.identity.credential == newest, "not seen", 30)
        wait_until(lambda: link._link is not None and link._link.connected, "not back", 20)
        told_to_rotate(tmp_path / "server", device)
