"""Approval: until the operator lets a device in, its credential opens nothing."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edge_sdk import api
from edge_sdk.errors import EnrolmentError, LinkError
from edge_sdk.identity import Identity
from edge_sdk.membership.approval import wait_for_approval
from edge_sdk.mqtt.link import MqttLink
from profiles import load_reference
from server.errors import ApprovalError, ConflictError
from server.state import existing_registry
from server.tokens import create_token
from tests.serving.conftest import ServerRun
from tests.serving.logins import is_let_in
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

FREE = ("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0")


class Site:
    """A server as a process in approval mode."""

    def __init__(self, server: ServerRun, state: Path, folder: Path) -> None:
        self.server, self.state, self.folder = server, state, folder

    def enrol(self, name: str, folder: str | None = None) -> tuple[Identity, Path]:
        state = self.folder / (folder or name)
        token = create_token(self.state)
        profile = load_reference("raspberry-pi-4")
        return api.enroll(self.server.http, token, state, profile=profile, name=name), state

    def command(self, *words: str) -> str:
        """The stdout of a `splitedge` command."""
        command = [sys.executable, "-P", "-m", "edge_sdk.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def login(self, identity: Identity) -> bool:
        """Whether the broker lets it in."""
        name, credential = identity.device, identity.credential
        link = MqttLink(self.server.mqtt, client_id=name, password=credential, mqtt5=False)
        return is_let_in(link)

    def status(self, identity: Identity, method: str, path: str) -> int:
        headers = {"Authorization": identity.authorization}
        return self.server.call(method, path, headers=headers).status


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("approval")
    running = ServerRun(folder / "server", (*FREE, "--enrolment", "approve"), folder / "log")
    try:
        yield Site(running.wait_ready(), folder / "server", folder)
    finally:
        running.end()


def test_a_device_that_waits_reaches_nothing_and_then_everything(site: Site) -> None:
    """FAULTS row 25: a leaked token alone lets nobody in where approval is asked for."""
    identity, state = site.enrol("pi-1")
    paths = (
        ("GET", "/api/v1/devices/pi-1"),
        ("GET", "/api/v1/devices/pi-1/assignment"),
        ("GET", "/api/v1/devices/pi-1/connection"),
        ("GET", "/tuf/metadata/timestamp.json"),
        ("POST", "/api/v1/link/echo"),
        ("POST", "/api/v1/devices/pi-1/credential"),
    )
    for method, path in paths:
        assert site.status(identity, method, path) == 403, path
    with pytest.raises(LinkError, match="waits for approval: ask the operator"):
        api.locate_broker(identity)
    assert not api.is_approved(identity)
    shown = site.command("agent", "status", "--state", str(state), "--json")
    assert "waits for approval" in shown
    assert "no bundle is installed" not in shown
    assert not site.login(identity)
    assert "pi-1" in site.command("server", "devices", "pending", "--state", str(site.state))
    with existing_registry(site.state) as registry:
        registry.membership.approve("pi-1")
    assert api.is_approved(identity)
    assert site.status(identity, "GET", "/tuf/metadata/timestamp.json") == 200
    wait_until(lambda: site.login(identity), "the broker does not let it in", 5)


def test_approving_a_name_that_is_in_already_names_who_waits(site: Site) -> None:
    site.enrol("pi-5")
    site.command("server", "devices", "approve", "pi-5", "--state", str(site.state))
    waiting, _ = site.enrol("pi-5", "again")
    assert waiting.device == "pi-5-2"
    with pytest.raises(AssertionError, match=r"pi-5 needs no approval; waiting: .*pi-5-2"):
        site.command("server", "devices", "approve", "pi-5", "--state", str(site.state))
    assert not api.is_approved(waiting)
    site.command("server", "devices", "approve", "pi-5-2", "--state", str(site.state))
    assert api.is_approved(waiting)


def test_a_device_that_is_rejected_is_told_and_stays_out(site: Site) -> None:
    identity, _ = site.enrol("pi-2")
    with existing_registry(site.state) as registry:
        registry.membership.reject("pi-2")
    with pytest.raises(EnrolmentError, match="revoked"):
        wait_for_approval(identity, print)
    assert not site.login(identity)
    with existing_registry(site.state) as registry:
        (entry,) = registry.trail.entries(what="device.reject")
    assert entry.source.endswith("on this machine")


def test_the_command_waits_and_goes_on_by_itself(site: Site) -> None:
    state = site.folder / "pi-3"
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", "agent", "enroll", "--name", "pi-3"]
    command += ["--profile", "raspberry-pi-4", "--server", site.server.http]
    command += ["--token", create_token(site.state), "--state", str(state)]
    lines: queue.Queue[str] = queue.Queue()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as waiting:
        assert waiting.stderr is not None
        reader = threading.Thread(target=_pass_on, args=(waiting.stderr, lines), daemon=True)
        reader.start()
        said = lines.get(timeout=30)
        assert "ask the operator to run `splitedge server devices approve pi-3`" in said
        site.command("server", "devices", "approve", "pi-3", "--state", str(site.state))
        out, _ = waiting.communicate(timeout=60)
        reader.join()
    assert out.startswith("enrolled as pi-3 in fleet default: no bundle yet")


def test_who_ends_the_waiting_is_told_how_to_go_on(site: Site) -> None:
    state = site.folder / "pi-4"
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", "agent", "enroll", "--name", "pi-4"]
    command += ["--profile", "raspberry-pi-4", "--server", site.server.http]
    command += ["--token", create_token(site.state), "--state", str(state)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        while "waiting for approval" not in waiting.stderr.readline():
            assert waiting.poll() is None
        waiting.send_signal(signal.SIGINT)
        _, said = waiting.communicate(timeout=60)
    assert "pi-4 is enrolled, and goes on without a new token" in said
    assert "`splitedge agent update`" in said


def _pass_on(pipe: Iterator[str], lines: queue.Queue[str]) -> None:
    for line in pipe:
        if "waiting" in line:
            lines.put(line)


def test_approval_is_remembered_over_a_restart(
    tmp_path: Path, run_server: Callable[..., ServerRun]
) -> None:
    state = tmp_path / "server"
    run_server(state, (*FREE, "--enrolment", "approve")).wait_ready().end()
    again = run_server(state).wait_ready()
    profile = load_reference("raspberry-pi-4")
    identity = api.enroll(again.http, create_token(state), tmp_path / "pi", profile=profile)
    assert not api.is_approved(identity)


def test_one_token_may_ask_for_approval(tmp_path: Path) -> None:
    for approve in (False, True):
        token = create_token(tmp_path, approve=approve).partition(".")[0]
        with existing_registry(tmp_path) as registry:
            device, credential = registry.redeem_token(token, None, {})
            assert device.active != approve
            if approve:
                with pytest.raises(ApprovalError, match="waits for approval"):
                    registry.authenticate(device.id, credential)
                registry.membership.approve(device.id)
                with pytest.raises(ConflictError, match="approved already"):
                    registry.membership.reject(device.id)
            assert registry.authenticate(device.id, credential).active


def test_an_agent_that_cannot_wait_is_told_so_and_keeps_its_token(site: Site) -> None:
    token = create_token(site.state)
    profile = load_reference("raspberry-pi-4")
    body = {"token": token.partition(".")[0], "name": "pi-9", "profile": profile.to_dict()}
    reply = site.server.call("POST", "/api/v1/enroll", json=body)
    assert reply.status == 403
    assert "update splitedge on the device; the token stays valid" in reply.json()["error"]
    identity = api.enroll(
        site.server.http, token, site.folder / "pi-9", profile=profile, name="pi-9"
    )
    assert identity.device == "pi-9"
