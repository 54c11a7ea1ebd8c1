"""Agents, servers and exports of this release and of the one before work with each other.

Real processes of both releases: a device enrols, updates, exits, offloads, and gets late answers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.releases.conftest import Program, Release, Server, Trained

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

SOON_S = 30.0


def install(exported: Path, models: Path) -> None:
    """Put an export under `models` in one rename, as `splitedge export` does."""
    target = models / exported.parent.name / exported.name
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_name(f".{target.name}-copy")
    shutil.copytree(exported, work)
    work.rename(target)


def enrol(agent: Release, server: Server, pi: Path) -> dict[str, Any]:
    """Enrol a device of one release at a server of the other one."""
    made = server.release.splitedge("server", "token", "create", "--state", server.state, "--json")
    words = ["agent", "enroll", "--server", server.http, "--token", json.loads(made)["token"]]
    words += ["--state", str(pi), "--name", "pi-1", "--profile", "raspberry-pi-4", "--json"]
    answer: dict[str, Any] = json.loads(agent.splitedge(*words))
    return answer


def run_agent(release: Release, pi: Path, samples: Path) -> Program:
    """The release's agent, once it knows that its server is there."""
    from tests.releases.conftest import PROGRAM

    program = release.start(pi.with_name("agent.log"), PROGRAM, pi, samples)
    finds_its_server(program)
    return program


def finds_its_server(program: Program) -> None:
    """Wait until the agent knows that its server is there."""
    wait_until(
        lambda: program.ask("status")["presence"] == "present",
        lambda: program.ask("status"),
        SOON_S,
    )


def check_answers(program: Program, trained: Trained) -> None:
    """Every answer is torch's: the exit head's where it exits, else the whole network's."""
    answers = program.ask("predict", samples=len(trained.x))
    sources = {answer["source"] for answer in answers}
    assert sources == {"device", "server"}, [a["reason"] for a in answers if a["reason"]]
    for place, answer in enumerate(answers):
        expected = trained.exits if answer["source"] == "device" else trained.whole
        assert answer["label"] == expected[place]


def runs(program: Program, version: int) -> None:
    """Wait until the agent runs that version."""
    bundle = f"digits/{version}/d2"
    wait_until(
        lambda: program.ask("status")["bundle"] == bundle,
        lambda: f"{bundle}: {program.ask('status')}, {program.log.read_text()}",
        SOON_S,
    )


def check_late_answers(program: Program, server: Server, trained: Trained) -> None:
    """Queries of a time without a server are answered when it is back."""
    release = server.release
    server.stop()
    asked = program.ask("predict", samples=len(trained.x), deadline_s=0.5)
    waiting = {answer["id"]: place for place, answer in enumerate(asked) if answer["id"]}
    assert waiting
    assert {answer["source"] for answer in asked} == {"device", "fallback"}
    server.start(release)
    late = wait_until(
        lambda: [one for one in [program.ask("late")] if len(one) == len(waiting)],
        lambda: f"late answers: {program.ask('late')}",
        SOON_S,
    )[0]
    for answer in late:
        assert answer["prediction"]["label"] == trained.whole[waiting[answer["id"]]]
        assert program.ask("acknowledge", id=answer["id"])
    assert program.ask("late") == []


@pytest.mark.parametrize("newer", ["server", "agent"])
def test_a_device_and_a_server_of_two_releases_work_together(
    newer: str,
    now: Release,
    before: Release,
    trained: Trained,
    exports: tuple[Path, Path],
    tmp_path: Path,
    programs: list[Program | Server],
) -> None:
    from tests.releases.conftest import Server

    serves, runs_on = (now, before) if newer == "server" else (before, now)
    state, pi = tmp_path / "server", tmp_path / "pi"
    install(exports[0], state / "models")
    server = Server(serves, state)
    programs.append(server)
    assert enrol(runs_on, server, pi)["bundle"] == "digits/1/d2"
    program = run_agent(runs_on, pi, trained.samples)
    programs.append(program)
    check_answers(program, trained)

    install(exports[1], state / "models")
    runs(program, 2)
    check_answers(program, trained)
    check_late_answers(program, server, trained)
    listed = json.loads(serves.splitedge("server", "devices", "--state", state, "--json"))
    assert [(row["device"], row["bundle"]) for row in listed] == [("pi-1", "digits/2/d2")]
    assert "Traceback" not in server.log + program.log.read_text()


def test_a_server_and_then_its_device_are_upgraded(
    now: Release,
    before: Release,
    trained: Trained,
    exports: tuple[Path, Path],
    tmp_path: Path,
    programs: list[Program | Server],
) -> None:
    from tests.releases.conftest import Server

    state, pi = tmp_path / "server", tmp_path / "pi"
    install(exports[0], state / "models")
    server = Server(before, state)
    programs.append(server)
    enrol(before, server, pi)
    old = run_agent(before, pi, trained.samples)
    programs.append(old)
    server.stop()
    server.start(now)
    finds_its_server(old)
    check_answers(old, trained)
    old.stop()
    new = run_agent(now, pi, trained.samples)
    programs.append(new)
    check_answers(new, trained)
    install(exports[1], state / "models")
    runs(new, 2)
    check_answers(new, trained)
    assert "Traceback" not in server.log + new.log.read_text()
