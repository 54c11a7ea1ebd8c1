"""A server without a byte of space: it starts, infers, lets devices in and hands out bundles.

No file of the server's process may grow or be written: a limit that a test sets and lifts while the
server runs, without being root.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
import urllib3

from profiles import load_reference
from server.registry.database import open_registry
from tests.edge.full_disk import full_disk
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Exported, ServerRun

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

# not loopback alone, so that a query is let in by the registry
OPEN = ("--http", "0.0.0.0:0", "--mqtt", "embedded:127.0.0.1:0", "--insecure")
SPACE = "needs 0.131 MB, has"


class Log:
    """What a server writes to its standard error: through a pipe, which needs no space."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._lines: list[str] = []
        self._path = path
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._lines)

    def _read(self) -> None:
        with self._path.open() as lines:
            for line in lines:
                self._lines.append(line)


class World:
    """A server that may have no space, and its device."""

    def __init__(self, state: Path, run: Callable[..., ServerRun], folder: Path) -> None:
        self.state = state
        self._run = run
        self._folder = folder
        self._starts = 0
        self.credential = ""

    def start(self, *, full: bool) -> None:
        """Start the server, on a full disk or not."""
        self._starts += 1
        # where `run_server` puts its log
        self.log = Log(self._folder / f"server-{self._starts - 1}.log")
        if full:
            with full_disk(0):  # the child inherits it
                self.server = self._run(self.state, OPEN)
        else:
            self.server = self._run(self.state, OPEN)
        self.server._log = Path("/dev/null")  # a pipe is read once
        self.server.wait_ready()
        self.url = f"http://127.0.0.1:{self.server.http.rsplit(':', 1)[1]}"

    def fill(self, *, full: bool) -> None:
        """Let the disk of the running server be full, or have space again."""
        for process in self.server.family:
            soft = 0 if full else resource.RLIM_INFINITY
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))

    def ask(self, method: str, path: str, **more: Any) -> urllib3.BaseHTTPResponse:
        """A request of the device."""
        login = {"Authorization": f"Bearer pi-1:{self.credential}"}
        return urllib3.request(
            method, f"{self.url}{path}", headers=login, retries=False, timeout=20, **more
        )

    def enrol(self, name: str) -> urllib3.BaseHTTPResponse:
        """A device's enrolment; the token was made before."""
        profile = load_reference("raspberry-pi-4").to_dict()
        body = {"token": self.tokens[name], "name": name, "profile": profile}
        return self.ask("POST", "/api/v1/enroll", json=body)

    def make_tokens(self, *names: str) -> None:
        """Tokens for these devices."""
        registry = open_registry(self.state)
        self.tokens = {name: registry.create_token() for name in names}
        registry.close()

    def check_reading(self, exported: Exported) -> None:
        """Inference, authentication and downloads work."""
        tensor = {"name": "x", "shape": [1, 1, 8, 8], "datatype": "UINT8"}
        query = {"inputs": [{**tensor, "data": exported.x[0].ravel().tolist()}]}
        answer = self.ask("POST", "/v2/models/digits/infer", body=orjson.dumps(query))
        assert answer.status == 200, answer.data
        assignment = self.ask("GET", "/api/v1/devices/pi-1/assignment")
        assert assignment.status == 200, assignment.data
        bundle = assignment.json()["bundle"]
        assert self.ask("GET", "/tuf/metadata/timestamp.json").status == 200
        file = next((self.state / "tuf" / "targets" / "bundles" / bundle).iterdir())
        assert self.ask("GET", f"/tuf/targets/bundles/{bundle}/{file.name}").status == 200

    def check_not_writing(self, name: str) -> None:
        """An enrolment is refused, and told why."""
        refused = self.enrol(name)
        assert refused.status == 503
        assert SPACE in refused.json()["error"]
        assert refused.headers["Retry-After"] == "1"

    def last_seen(self) -> float:
        """When the device was last seen, as the registry has it."""
        registry = open_registry(self.state)
        seen = registry.device("pi-1").last_seen
        registry.close()
        return seen or 0.0


@pytest.fixture
def world(run_server: Callable[..., ServerRun], exported: Exported, tmp_path: Path) -> World:
    """A server that has run once, with a model and the device pi-1."""
    state = tmp_path / "state"
    exported.install(state / "models")
    world = World(state, run_server, tmp_path)
    world.make_tokens("pi-1", "pi-2", "pi-3", "pi-4")
    world.start(full=False)
    enrolled = world.enrol("pi-1")
    assert enrolled.status == 201, enrolled.data
    world.credential = enrolled.json()["credential"]
    world.check_reading(exported)  # it is assigned its bundle
    return world


def test_a_server_starts_and_serves_on_a_full_disk_and_writes_again_once_there_is_space(
    world: World, exported: Exported
) -> None:
    """FAULTS row 6: full at the start, freed while it runs, full again, killed, and started so."""
    world.server.end()
    assert not (world.state / "registry.db-wal").exists()  # it was stopped in order
    timestamp = (world.state / "tuf" / "metadata" / "timestamp.json").read_bytes()
    seen = world.last_seen()

    world.start(full=True)
    for _ in range(3):
        world.check_reading(exported)
    world.check_not_writing("pi-2")
    time.sleep(2.5)  # two turns of housekeeping
    for trouble in ("registry: nothing can be written", "signing: "):
        assert world.log.text.count(trouble) == 1, world.log.text
    said = len(world.log.text)
    time.sleep(2.5)
    assert world.log.text[said:] == ""  # each is said once
    assert "Traceback" not in world.log.text

    world.fill(full=False)
    wait_until(lambda: world.enrol("pi-2").status == 201, lambda: world.log.text)
    path = world.state / "tuf" / "metadata" / "timestamp.json"
    wait_until(lambda: path.read_bytes() != timestamp, lambda: world.log.text)
    world.ask("GET", "/api/v1/devices/pi-1")
    wait_until(lambda: world.last_seen() > seen, lambda: world.log.text)
    assert "signing: works again" in world.log.text
    assert "writing works again" in world.log.text

    world.fill(full=True)  # while it runs
    world.check_reading(exported)
    world.check_not_writing("pi-3")
    world.server.end(signal.SIGKILL)  # now the last commits are only in the log

    assert (world.state / "registry.db-wal").stat().st_size > 0
    world.start(full=True)
    world.check_reading(exported)
    world.check_not_writing("pi-3")
    world.fill(full=False)
    wait_until(lambda: world.enrol("pi-3").status == 201, lambda: world.log.text)
    registry = open_registry(world.state)
    assert [device.id for device in registry.devices()] == ["pi-1", "pi-2", "pi-3"]
    registry.close()
