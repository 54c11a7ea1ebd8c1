"""A device that goes away is shown as offline within seconds: real agents, a real browser."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from playwright.sync_api import Browser, expect
from typer.testing import CliRunner

from edge_sdk import api
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.mqtt.messages import Will
from edge_sdk.wire.topics import Kind, Topic
from profiles import load_reference
from server.cli import app
from server.deployment.presence import GONE_S, presence_of
from server.registry.database import Registry
from server.state import existing_registry
from server.tokens import create_token
from tests.exposition import families_of
from tests.serving.dashboard.test_browser import DESK, visit
from tests.waiting import wait_until

if TYPE_CHECKING:
    from server.registry.records import Device
    from tests.serving.conftest import Exported, ServerRun

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

# the housekeeper's turn, the patience with a connection, the page's turn; and a busy machine
SECONDS = 3 * GONE_S + 5


@contextmanager
def running_agent(state: Path) -> Iterator[subprocess.Popen[str]]:
    """`splitedge agent run`, once it runs its bundle."""
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", "agent", "run", "--state", str(state)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        try:
            assert agent.stdout is not None
            assert "runs digits/1" in agent.stdout.readline()
            yield agent
        finally:
            agent.kill()


def shown(state: Path) -> str:
    """Presence of the one device, as `splitedge server devices` has it."""
    listed = CliRunner().invoke(app, ["devices", "--state", str(state), "--json"])
    assert listed.exit_code == 0, listed.output
    (row,) = json.loads(listed.stdout)
    return str(row["presence"])


def counted(server: ServerRun) -> dict[str, float]:
    """Devices by state, as Prometheus reads them."""
    families = families_of(server.call("GET", "/metrics").data.decode())
    return {one.labels["state"]: one.value for one in families["splitedge_devices"].samples}


@pytest.mark.parametrize("broker", ["embedded", "mosquitto"])
def test_a_device_that_stops_or_is_killed_is_offline_within_seconds(
    chromium: Browser,
    tmp_path: Path,
    exported: Exported,
    run_server: Callable[..., ServerRun],
    broker: str,
) -> None:
    state, pi = tmp_path / "server", tmp_path / "pi-1"
    exported.install(state / "models")
    free = ("--http", "127.0.0.1:0", "--mqtt", f"{broker}:127.0.0.1:0")
    server = run_server(state, free).wait_ready()
    profile = load_reference("raspberry-pi-4")
    api.enroll(server.http, create_token(state), pi, profile=profile, name="pi-1")
    with visit(chromium, server.http, state, DESK) as desk:
        row = desk.page.get_by_role("table", name="Devices").get_by_role("row").nth(1)
        for end in (signal.SIGTERM, signal.SIGKILL):
            with running_agent(pi) as agent:
                expect(row.get_by_title("online")).to_be_visible()
                assert shown(state) == "online"
                assert counted(server) == {"online": 1}
                agent.send_signal(end)
                agent.wait(20)
                ended = time.monotonic()
                expect(row.get_by_title("offline")).to_be_visible(timeout=1000 * SECONDS)
                assert time.monotonic() - ended >= GONE_S - 1
            expect(row).to_contain_text(re.compile(r"offline, (now|\d+ seconds? ago)"))
            assert shown(state) == "offline"
            assert counted(server) == {"silent": 1}
        desk.go("device/pi-1")
        expect(desk.page.get_by_text("offline", exact=True)).to_be_visible()
        assert desk.registry.alerts.open() == []  # a silent device is given five minutes


def test_a_connection_that_breaks_and_comes_back_is_no_absence(
    tmp_path: Path, run_server: Callable[..., ServerRun]
) -> None:
    state = tmp_path / "server"
    server = run_server(state).wait_ready()
    with existing_registry(state) as registry, contextlib.ExitStack() as stack:
        token = registry.create_token("default")
        profile = load_reference("raspberry-pi-4").to_dict()
        _, credential = registry.redeem_token(token, "pi-1", profile)
        topic = str(Topic("default", "pi-1", Kind.STATUS))
        will = Will(topic, b'{"status":"offline"}')
        link = MqttLink(server.mqtt, client_id="pi-1", password=credential, will=will)
        link.start()
        stack.callback(link.stop)

        def comes_back() -> None:
            link.wait_connected(20)
            assert link.publish(topic, b'{"status":"online"}', retain=True)
            wait_until(lambda: presence_of(_device(registry), time.time()) == "online", "not heard")
            wait_until(lambda: _device(registry).gone_at is None, "it is still away")
            assert presence_of(_device(registry), time.time() + GONE_S) == "online"

        comes_back()
        for _ in range(2):
            broken = cast("socket.socket", link._client.socket())  # type: ignore[union-attr]  # it is connected
            broken.shutdown(socket.SHUT_RDWR)
            gone_at = wait_until(lambda: _device(registry).gone_at, "the will did not come")
            assert gone_at is not None
            assert presence_of(_device(registry), gone_at + GONE_S - 0.1) == "online"
            comes_back()


def _device(registry: Registry) -> Device:
    return registry.device("pi-1")
