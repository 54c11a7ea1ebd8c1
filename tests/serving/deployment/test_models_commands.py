"""`splitedge server models …` and `/api/v1/models`: two fleets, two models, three versions.

A real server and a real agent in each fleet.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from edge_sdk import AgentSettings, EdgeAgent, api
from profiles import load_reference
from server.cli import app
from server.errors import ConflictError
from server.tokens import create_token
from tests.serving.conftest import ServerRun
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Exported

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

SOON_S = 20.0
FREE = ("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0")


@dataclass
class Fleets:
    """A running server, and an agent in each of the fleets `barn` and `shed`.

    Attributes:
        newest: highest version of `digits` so far; the only version of `letters` is 1.
    """

    server: ServerRun
    state: Path
    exported: Exported
    agents: dict[str, EdgeAgent]
    newest: int = 1

    def install(self, *, bad: bool = False) -> str:
        """Export the next version of `digits`; its name."""
        self.newest += 1
        self.exported.install(self.state / "models", version=self.newest, bad=bad)
        return f"digits/{self.newest}"

    def models(self, *words: str) -> Any:
        """What `splitedge server models WORDS --json` prints."""
        called = CliRunner().invoke(app, ["models", *words, "--state", str(self.state), "--json"])
        if called.exception is not None and not isinstance(called.exception, SystemExit):
            raise called.exception
        assert called.exit_code == 0, called.output
        return json.loads(called.stdout)

    def call(self, method: str, path: str, body: object = None) -> Any:
        """The answer to an operator's request."""
        secret = (self.state / "keys" / "operator.key").read_text().strip()
        headers = {"Authorization": f"Bearer operator:{secret}"}
        more = {} if body is None else {"json": body}
        answer = self.server.call(method, path, headers=headers, **more)
        assert answer.status == 200, answer.data
        return answer.json()

    def open(self, fleet: str) -> None:
        """Start the agent of a fleet."""
        settings = AgentSettings(heartbeat_s=1.0)
        self.agents[fleet] = EdgeAgent.open(self.state.with_name(fleet), settings)

    def run(self, barn: str, shed: str) -> None:
        """Wait until the agents run these versions, and the server knows it."""
        wait_until(
            lambda: self._running == self.known == {"pi-barn": barn, "pi-shed": shed},
            lambda: f"{(barn, shed)}: run {self._running}, known {self.known}",
            SOON_S,
        )

    @property
    def _running(self) -> dict[str, str]:
        return {f"pi-{f}": version_of(one.status().bundle) for f, one in self.agents.items()}

    @property
    def known(self) -> dict[str, str]:
        """The versions that the server says they run."""
        devices = self.call("GET", "/api/v1/devices")["devices"]
        return {one["device"]: version_of(one["runs"]) for one in devices}

    def index(self) -> list[dict[str, Any]]:
        """The server's list of models, those that it cannot serve included."""
        found: list[dict[str, Any]] = self.server.call("POST", "/v2/repository/index").json()
        return found


def version_of(bundle: str | None) -> str:
    return (bundle or "").rpartition("/")[0]


@pytest.fixture(scope="module")
def started(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleets]:
    folder = tmp_path_factory.mktemp("fleets")
    state = folder / "server"
    exported.install(state / "models")
    server = ServerRun(state, FREE, folder / "server.log").wait_ready()
    fleets = Fleets(server, state, exported, {})
    for fleet in ("barn", "shed"):
        pi, token = folder / fleet, create_token(state, fleet=fleet)
        profile = load_reference("raspberry-pi-4")
        api.enroll(server.http, token, pi, profile=profile, name=f"pi-{fleet}")
        fleets.open(fleet)
    yield fleets
    for agent in fleets.agents.values():
        agent.close()
    fleets.server.end(signal.SIGKILL)


@pytest.fixture
def fleets(started: Fleets) -> Fleets:
    """Both fleets without an assignment, on the newest version of `digits`, which is good."""
    for fleet in ("barn", "shed"):
        started.models("assign", fleet, "--default")
    version = started.install()
    started.run(version, version)
    return started


def test_fleets_move_with_their_own_model_and_roll_back(fleets: Fleets) -> None:
    one = f"digits/{fleets.newest}"

    # another model moves nobody; a newer version of their own moves both
    fleets.exported.install(fleets.state / "models", name="letters", version=fleets.newest)
    letters = f"letters/{fleets.newest}"
    listed = fleets.models("list")
    wait_until(lambda: letters in map(name_of, fleets.models("list")["models"]), listed)
    two = fleets.install()
    fleets.run(two, two)

    # by the command line
    assigned = fleets.models("assign", "barn", "letters")
    assert (assigned["model"], assigned["pinned"], assigned["devices"]) == ("letters", False, 1)
    fleets.run(letters, two)
    back = fleets.models("rollback", "digits")
    assert back == {"active": one, "left": two, "fleets": ["shed"], "pinned": {}}
    fleets.run(letters, one)

    # by the API
    body = {"model": "digits", "version": int(two.partition("/")[2])}
    pinned = fleets.call("PUT", "/api/v1/fleets/barn/model", body)
    assert (pinned["version"], pinned["pinned"]) == (body["version"], True)
    fleets.run(two, one)
    three = fleets.install()
    fleets.run(two, three)
    activate = f"/api/v1/models/digits/versions/{one.partition('/')[2]}/activate"
    assert fleets.call("POST", activate) == {"active": one, "left": None}
    fleets.run(two, one)

    def run_by() -> list[list[str]]:
        rows = {name_of(row): row["run_by"] for row in fleets.models("list")["models"]}
        return [rows[name] for name in (one, two, three)]

    # a heartbeat from before the switch may still be under way
    wait_until(lambda: run_by() == [["pi-shed"], ["pi-barn"], []], run_by)
    listed = fleets.models("list")
    assert listed == fleets.call("GET", "/api/v1/models")
    rows = {name_of(row): row for row in listed["models"]}
    assert {name for name, row in rows.items() if row["active"]} == {one, letters}
    assert rows[two]["pinned"] == ["barn"]

    # removal: one is active and runs on pi-shed, two is barn's, three is free to go
    for name, why in ((one, "active version"), (two, f"fleet barn is pinned to {two}")):
        with pytest.raises(ConflictError, match=why):
            fleets.models("remove", name)
    assert fleets.models("remove", three) == {"removed": [three]}
    assert not (fleets.state / "models" / three).exists()
    assert not list((fleets.state / "tuf" / "targets").rglob(f"{three}/*"))
    # exported again under its number, it is refused with a sentence
    fleets.newest -= 1
    assert fleets.install() == three
    refused = wait_until(
        lambda: [
            row
            for row in fleets.index()
            if f"digits/{row['version']}" == three and row["state"] != "READY"
        ],
        fleets.index,
    )
    assert "a number is never used twice; export under a new version" in refused[0]["reason"]
    assert fleets.known == {"pi-barn": two, "pi-shed": one}


def name_of(row: dict[str, Any]) -> str:
    return f"{row['model']}/{row['version']}"


def test_a_device_that_refuses_a_version_is_shown_with_its_reason(fleets: Fleets) -> None:
    good = f"digits/{fleets.newest}"
    bad = fleets.install(bad=True)

    def refused() -> list[str]:
        rows = fleets.models("list")["models"]
        return [one["device"] for row in rows if name_of(row) == bad for one in row["refused_by"]]

    wait_until(lambda: refused() == ["pi-barn", "pi-shed"], refused, SOON_S)
    assert fleets.known == {"pi-barn": good, "pi-shed": good}
    command = ["devices", "--fleet", "barn", "--state", str(fleets.state)]
    (row,) = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    found = row["device"], version_of(row["wants"]), version_of(row["refused"])
    assert found == ("pi-barn", bad, bad)
    assert "exit.onnx" in row["why"]
    assert f"pi-barn refused {row['refused']}" in CliRunner().invoke(app, command).stdout
    fleets.models("rollback", "digits")
    wait_until(
        lambda: not any(one["refused"] for one in fleets.call("GET", "/api/v1/devices")["devices"]),
        "the refusal is still shown",
        SOON_S,
    )


def test_a_device_that_was_away_moves_when_it_comes_back(fleets: Fleets) -> None:
    old = f"digits/{fleets.newest}"
    fleets.agents.pop("barn").close()
    new = fleets.install()
    wait_until(lambda: fleets.known["pi-shed"] == new, lambda: fleets.known, SOON_S)
    with pytest.raises(ConflictError, match=f"{old}: still runs on pi-barn"):
        fleets.models("remove", old)
    fleets.open("barn")
    fleets.run(new, new)
    assert fleets.models("remove", old) == {"removed": [old]}


def test_the_commands_work_without_a_running_server(fleets: Fleets) -> None:
    old, new = f"digits/{fleets.newest}", fleets.install()
    fleets.run(new, new)
    fleets.server.end(signal.SIGTERM)
    assert fleets.models("activate", old)["active"] == old
    fleets.models("assign", "shed", new)
    log = fleets.state.with_name("again.log")
    fleets.server = ServerRun(fleets.state, (), log).wait_ready()
    fleets.run(old, new)
