"""The running device as a whole, and docs/running-device.md as a reader types it.

A real server, a real broker, the agent as a process of its own, and curl.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from edge_sdk import api
from edge_sdk.errors import StateInUseError
from edge_sdk.service.client import RunningAgent
from edge_sdk.state import StateLock
from profiles import load_reference
from server.processes import ServerProcess
from server.tokens import create_token
from tests.edge.systemd.managers import listening_manager
from tests.reader import Document, Reader, environment, free_ports
from tests.waiting import is_listening, wait_until

if TYPE_CHECKING:
    from tests.edge.digits import Digits

pytestmark = pytest.mark.deadline

DOCUMENT = Document("docs/running-device.md")
WATCHDOG_S = 1.0
WRITTEN = "127.0.0.1:8080"


@dataclass(frozen=True)
class Place:
    """A folder with an enrolled device in `pi`, and its server."""

    folder: Path
    server: ServerProcess
    port: int

    def script(self, snippet: str) -> str:
        """A block of the document, at a port that is free here."""
        return DOCUMENT.snippet(snippet).replace(WRITTEN, f"127.0.0.1:{self.port}")

    def type(self, snippet: str) -> str:
        """What a block of the document prints."""
        return Reader(self.folder).shell(self.script(snippet))

    def curl(self, path: str, *words: str) -> tuple[int, Any]:
        """Status and JSON of one request."""
        url = f"http://127.0.0.1:{self.port}{path}"
        done = subprocess.run(
            ["curl", "-sS", "-w", "\n%{http_code}", url, *words],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        body, _, status = done.stdout.rpartition("\n")
        return int(status), json.loads(body)

    @contextmanager
    def running(self, script: str, **more: str) -> Iterator[subprocess.Popen[str]]:
        """The agent that a block starts, until SIGTERM, which it must obey.

        Args:
            more: variables of its environment.
        """
        process = subprocess.Popen(
            ["bash", "-euc", f"exec {script}"],
            cwd=self.folder,
            env={**environment(), **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_until(lambda: RunningAgent.find(self.folder / "pi"), "no agent", 60)
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        assert "Traceback" not in err
        assert not (self.folder / "pi" / "agent.sock").exists()


@pytest.fixture(scope="module")
def place(digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A server with the digits' model, and a device."""
    folder = tmp_path_factory.mktemp("device")
    shutil.copytree(digits.models, folder / "server" / "models")
    np.save(folder / "digit.npy", digits.x[0])
    server = ServerProcess(folder / "server")
    server.start(("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0"))
    profile = load_reference("raspberry-pi-4")
    token = create_token(folder / "server")
    api.enroll(server.http, token, folder / "pi", profile=profile, name="pi")
    yield Place(folder, server, *free_ports(1))
    server.stop()


def test_any_program_asks_the_agent_with_and_without_the_server(place: Place) -> None:
    with place.running(place.script("run")) as agent:
        wait_until(lambda: is_listening(place.port), "nobody listens")
        answer = json.loads(place.type("infer"))
        assert (answer["model_name"], answer["outputs"][0]["data"]) == ("digits", [0])
        shown = json.loads(DOCUMENT.text.partition("```json\n")[2].partition("```")[0])
        assert answer["parameters"].keys() >= shown["parameters"].keys()
        assert answer.keys() == shown.keys()

        wait_until(
            lambda: place.curl("/agent/status")[1]["presence"] == "present", "the server is away"
        )
        asked = json.loads(place.type("parameters"))
        assert (asked["parameters"]["source"], asked["outputs"][0]["data"]) == ("server", [0])

        printed = place.type("cli")
        rows, end = json.JSONDecoder().raw_decode(printed)
        status, end = json.JSONDecoder().raw_decode(printed, end + 1)
        assert rows[0]["input"] == "digit.npy"
        assert status["agent"]["pid"] == agent.pid
        assert status["agent"]["counters"]["server"] >= 1
        assert printed[end:].strip() == f"pi: {status['bundle']}"
        assert json.loads(place.type("socket")) == {"ready": True}

        with pytest.raises(StateInUseError, match=f"process {agent.pid} already runs as agent"):
            StateLock(place.folder / "pi")

        place.server.stop()
        status_code, alone = place.curl(
            "/v2/models/digits/infer", "--data-binary", "@ask-server.json"
        )
        assert (status_code, alone["parameters"]["source"]) == (200, "fallback")
        assert alone["parameters"]["reason"]
        assert alone["outputs"][0]["data"] == [0]
        assert place.curl("/v2/health/ready") == (200, {"ready": True})
        place.server.start()
        wait_until(
            lambda: place.curl("/agent/status")[1]["presence"] == "present", "still away", 30
        )
        again = place.curl("/v2/models/digits/infer", "--data-binary", "@ask-server.json")[1]
        assert again["parameters"]["source"] == "server"


def test_settings_file_opens_the_port_and_the_manager_hears_of_an_agent_that_works(
    place: Place, tmp_path: Path
) -> None:
    """The unit's own command, and what systemd would be told of it."""
    place.type("settings")
    unit = subprocess.run(
        ["splitedge", "agent", "install-service", "--dry-run"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    (started,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    words = started.partition("/splitedge ")[2].replace("/var/lib/splitedge/agent", "./pi")
    with listening_manager(tmp_path) as manager:
        with place.running(
            f"splitedge {words}",
            **manager.environment(WATCHDOG_S),
            SPLITEDGE_AGENT_OPTIONS="--update-minutes 5",
        ) as agent:
            assert "STATUS=pi runs digits/1/" in manager.wait("READY=1")
            assert place.curl("/v2/health/ready") == (200, {"ready": True})
            manager.wait("WATCHDOG=1")
            agent.send_signal(signal.SIGSTOP)
            assert manager.is_silent(2 * WATCHDOG_S)
            agent.send_signal(signal.SIGCONT)
            manager.wait("WATCHDOG=1")
        assert "STOPPING=1" in manager.read()
