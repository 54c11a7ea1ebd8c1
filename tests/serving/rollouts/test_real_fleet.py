"""Roll-outs by a real server to real agents over the real broker; the server is killed meanwhile.

Version 2 is good, version 3 fails its trial on the device, and version 4 makes its device ask the
server for every answer, which it gets none of in time.
"""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from edge_sdk import AgentSettings, EdgeAgent, api
from edge_sdk.bundles.store import BundleStore
from profiles import load_reference
from server.cli import app
from server.tokens import create_token
from tests.serving.conftest import ServerRun
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Exported

pytestmark = [pytest.mark.broker, pytest.mark.deadline, pytest.mark.long]

SOON_S = 120.0  # on a machine that does much else besides
HOLD = ("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0", "--new-versions", "hold")
NAMES = ("pi-1", "pi-2")
# above every entropy of ten classes, so that a device answers by itself; below all, so that it asks
EXITS, ASKS = 9.0, -1.0


@dataclass
class Yard:
    """A server that holds new versions, and two agents.

    Attributes:
        kills: of the server so far.
    """

    folder: Path
    exported: Exported
    server: ServerRun
    agents: dict[str, EdgeAgent] = field(default_factory=dict)
    kills: int = 0

    @property
    def state(self) -> Path:
        return self.folder / "server"

    def kill(self) -> None:
        """End the server by SIGKILL, and start it again with what it remembers."""
        self.server.end(signal.SIGKILL)
        self.kills += 1
        log = self.folder / f"server-{self.kills}.log"
        self.server = ServerRun(self.state, (), log).wait_ready()

    def open(self, name: str) -> None:
        settings = AgentSettings(heartbeat_s=1.0, deadline_s=0.001)
        self.agents[name] = EdgeAgent.open(self.folder / name, settings)

    def rollout(self, *words: str) -> Any:
        """What `splitedge server rollout WORDS --json` prints."""
        command = ["rollout", *words, "--state", str(self.state), "--json"]
        called = CliRunner().invoke(app, command)
        assert called.exit_code == 0, (called.output, called.exception)
        return json.loads(called.stdout)

    def install(self, version: int, *, bad: bool = False, threshold: float = EXITS) -> None:
        """Export a version, and wait until the server has published it."""
        models = self.state / "models"
        self.exported.install(models, version=version, bad=bad, threshold=threshold)
        listed = ["models", "list", "--state", str(self.state), "--json"]
        wait_until(
            lambda: any(
                one["version"] == version
                for one in json.loads(CliRunner().invoke(app, listed).stdout)["models"]
            ),
            f"version {version} is not published",
            SOON_S,
        )

    def wait_state(self, state: str) -> Any:
        """Wait until the newest roll-out is in a state."""

        def reached() -> Any:
            found = self.rollout("status")
            return found if found["state"] == state else None

        return wait_until(reached, lambda: self.rollout("status"), SOON_S)

    def runs(self) -> dict[str, str]:
        return {name: agent.status().bundle for name, agent in self.agents.items()}

    def on(self, version: int) -> set[str]:
        """Names of the devices that run a version."""
        return {name for name, bundle in self.runs().items() if f"/{version}/" in bundle}

    def digests(self) -> dict[str, str]:
        return {name: BundleStore(self.folder / name).active().digest for name in NAMES}

    def wait_runs(self, version: int) -> None:
        wait_until(
            lambda: {bundle.split("/")[1] for bundle in self.runs().values()} == {str(version)},
            self.runs,
            SOON_S,
        )


@pytest.fixture
def yard(exported: Exported, tmp_path: Path) -> Iterator[Yard]:
    state = tmp_path / "server"
    exported.install(state / "models", threshold=EXITS)
    server = ServerRun(state, HOLD, tmp_path / "server-0.log").wait_ready()
    yard = Yard(tmp_path, exported, server)
    profile = load_reference("raspberry-pi-4")
    for name in NAMES:
        pi = tmp_path / name
        api.enroll(server.http, create_token(state), pi, profile=profile, name=name)
        yard.open(name)
    yield yard
    for agent in yard.agents.values():
        agent.close()
    yard.server.end(signal.SIGKILL)


def test_good_versions_reach_all_and_bad_ones_go_back_by_themselves(yard: Yard) -> None:
    # a good version, and a device that is off from the first share on
    yard.install(2)
    assert {bundle.split("/")[1] for bundle in yard.runs().values()} == {"1"}  # it is held
    yard.rollout("start", "digits", "2", "--share", "50%", "--then", "100%", "--wait", "1s")
    wait_until(lambda: yard.on(2), yard.runs, SOON_S)
    yard.rollout("pause")
    off = min({*NAMES} - yard.on(2))
    yard.agents.pop(off).close()  # it says that it goes
    yard.rollout("resume")
    done = yard.wait_state("done")
    assert [one["share"] for one in done["members"]].count(0.5) == 1
    yard.wait_runs(2)
    yard.open(off)
    yard.wait_runs(2)  # it catches up when it starts
    before = yard.digests()

    # a version that fails its trial on the first device, with a server killed after the start
    yard.install(3, bad=True)
    yard.rollout("start", "digits", "3", "--share", "50%", "--wait", "1s")
    yard.kill()
    failed = yard.wait_state("failed")
    assert "exit.onnx" in failed["reason"]
    assert len(failed["members"]) == 1
    assert yard.digests() == before
    yard.wait_runs(2)

    # a version whose device waits for the server in vain, with a server killed before it judged
    yard.install(4, threshold=ASKS)
    health = ("--health", "fallback<5%", "--answers", "30")
    yard.rollout("start", "digits", "4", "--share", "50%", "--wait", "10m", *health)
    wait_until(lambda: yard.on(4), yard.runs, SOON_S)
    yard.kill()
    stop = threading.Event()
    stream = threading.Thread(target=predict, args=(yard, stop))
    stream.start()
    try:
        failed = yard.wait_state("failed")
    finally:
        stop.set()
        stream.join()
    # a question may have got its answer before the server was killed
    assert re.fullmatch(r"fallback is (9\d|100)\.\d %, expected below 5\.0 %", failed["reason"])
    assert len(failed["members"]) == 1
    yard.wait_runs(2)
    assert yard.digests() == before
    wait_until(lambda: not yard.rollout("status")["waits"], "not all are back", SOON_S)


def predict(yard: Yard, stop: threading.Event) -> None:
    """Ask every agent about ten times a second."""
    while not stop.wait(0.1):
        for agent in yard.agents.values():
            agent.predict(yard.exported.x[0])
