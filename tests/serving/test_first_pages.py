"""What README.md and docs/tutorial.md say to type, typed: only ports, paths, a shorter time between
two reports of a device, and shorter ways to the second model are put in.

The tutorial begins with the commands of the README, so both are typed in one folder.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import urllib3
from typer.testing import CliRunner

from server.cli import app as server_app
from server.registry.telemetry.history import RAW_S
from tests.reader import ROOT, Document, Reader, environment, free_ports, started_server
from tests.waiting import wait_until

pytestmark = pytest.mark.long

README = Document("README.md")
TUTORIAL = Document("docs/tutorial.md")
PYTHON = Document("docs/python.md")
WRITTEN_AGENT = "127.0.0.1:8080"
WAITING = " &\n"  # how a shell is told not to wait for a command
TOKEN_COMMAND = "splitedge server token create --state server\n"


@dataclass(frozen=True)
class Pupil(Reader):
    """A reader of the tutorial, with a running agent at `agent`."""

    agent: str = ""

    def type(self, script: str) -> str:
        """The stdout of a script in which the agent's address is put in."""
        return self.shell(script.replace(WRITTEN_AGENT, self.agent))

    def asked(self, *words: str) -> Any:
        """What `splitedge server WORDS --json` prints, in this process.

        It is what a test waits for: each process would take most of a second of a processor.
        """
        command = [*words, "--state", str(self.folder / "server"), "--json"]
        called = CliRunner().invoke(server_app, command)
        assert called.exit_code == 0, (called.output, called.exception)
        return json.loads(called.stdout)


@pytest.fixture(scope="module")
def pupil(tmp_path_factory: pytest.TempPathFactory, fashion_mnist_fixture: Path) -> Iterator[Pupil]:
    """The tutorial up to a running agent."""
    home = tmp_path_factory.mktemp("tutorial")
    make = TUTORIAL.snippet("make").replace("../shared/data", str(fashion_mnist_fixture))
    Reader(home).shell(make.replace("examples/", f"{ROOT}/examples/"))
    folder = home / "clothes"
    Reader(folder).shell(TUTORIAL.snippet("adopt"))
    with started_server(folder, TUTORIAL.snippet("serve") + TOKEN_COMMAND) as reader:
        reader.shell(TUTORIAL.snippet("enroll"))
        _report_often(folder / "device")
        agent = f"127.0.0.1:{free_ports(1)[0]}"
        with _running(folder, TUTORIAL.snippet("run").replace(WRITTEN_AGENT, agent), "agent.log"):
            wait_until(lambda: _is_ready(f"http://{agent}"), (folder / "agent.log").read_text, 60)
            yield Pupil(folder, reader.http, reader.token, agent)


@contextmanager
def _running(folder: Path, script: str, log_name: str) -> Iterator[None]:
    with (folder / log_name).open("w") as log:
        shell = subprocess.Popen(
            ["bash", "-euc", f"exec {script}"],
            cwd=folder,
            env=environment(),
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        shell.send_signal(signal.SIGTERM)
        assert shell.wait(30) == 0, (folder / log_name).read_text()


def _report_often(state: Path) -> None:
    """Let a device report as often as its history has points; by default, every half minute."""
    file = state / "agent.toml"
    often = f"heartbeat_s = {RAW_S:.1f}"
    changed = file.read_text().replace("#heartbeat_s = 30.0", often)
    assert often in changed
    file.write_text(changed)


def _is_ready(url: str) -> bool:
    with contextlib.suppress(urllib3.exceptions.HTTPError):
        return urllib3.request("GET", f"{url}/v2/health/ready", retries=False).status == 200
    return False


def test_both_pages_begin_with_the_same_commands() -> None:
    for name in ("adopt", "serve", "enroll"):
        assert README.snippet(name) == TUTORIAL.snippet(name)
    assert README.snippet("run").strip() in TUTORIAL.snippet("run")


def test_the_running_agent_answers_the_first_page(pupil: Pupil) -> None:
    printed = pupil.type(README.snippet("ask"))
    table, _, described = printed.rpartition("\n{")
    assert table.count("device") + table.count("server") >= 10
    model = json.loads("{" + described)
    assert model["parameters"]["class_names"][8] == "bag"


def test_profile_shows_what_each_graph_takes(pupil: Pupil) -> None:
    printed = pupil.type(TUTORIAL.snippet("profile"))
    assert "exit" in printed
    assert "ms" in printed


def test_every_input_is_offloaded_if_the_reader_asks_for_it(pupil: Pupil) -> None:
    pupil.type(TUTORIAL.snippet("ask"))
    command = TUTORIAL.snippet("all-offloaded").strip()
    answers = json.loads(pupil.type(f"{command} --json"))
    assert {answer["source"] for answer in answers} == {"server"}


def test_a_program_asks_by_curl(pupil: Pupil) -> None:
    answer = json.loads(pupil.type(TUTORIAL.snippet("curl")))
    assert answer["outputs"][0]["name"] == "label"
    assert answer["parameters"]["source"] in {"device", "server"}


def test_a_correction_is_kept_as_a_label(pupil: Pupil) -> None:
    pupil.type(TUTORIAL.snippet("correct"))
    assert list((pupil.folder / "kept" / "labelled" / "shirt").glob("*.png"))


def test_script_of_the_first_page_asks_the_device(pupil: Pupil, tmp_path: Path) -> None:
    """The script runs on a device of its own: the tutorial's agent holds the other folder."""
    enroll = README.snippet("enroll").replace("--state device", f"--state {tmp_path}/device")
    pupil.shell(enroll)
    script = README.snippet("device").replace('"device"', f'"{tmp_path}/device"')
    (tmp_path / "ask.py").write_text(script)
    answer = pupil.shell(f"python {tmp_path}/ask.py")
    assert re.fullmatch(r"\S+ (device|server|fallback) \d+\.\d\d ms\n", answer), answer

    script = PYTHON.snippet("many").replace('"device"', f'"{tmp_path}/device"')
    (tmp_path / "many.py").write_text(script)
    first, *answers, presence = pupil.shell(f"python {tmp_path}/many.py").splitlines()
    assert re.fullmatch(r"\S+ device \d\.\d\d", first)
    assert len(answers) == len(list((pupil.folder / "new" / "shirt").glob("*.png")))
    assert {line.split()[1] for line in answers} <= {"device", "server", "fallback"}
    assert presence in {"unknown", "present", "away"}


def test_script_without_a_server_counts_what_it_was_unsure_of(pupil: Pupil, tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(PYTHON.snippet("alone"))
    *answers, unsure = pupil.shell(f"python {tmp_path}/alone.py").splitlines()
    assert len(answers) == len(list((pupil.folder / "new" / "bag").glob("*.png")))
    assert {line.split()[-1] for line in answers} == {"device"}
    assert 0 <= ast.literal_eval(unsure)["count"] <= len(answers)


@pytest.mark.deadline
def test_an_own_network_is_trained_exported_and_served(pupil: Pupil) -> None:
    train = README.snippet("train").replace("examples/", f"{ROOT}/examples/")
    pupil.shell(train)
    curl = README.snippet("curl")

    def served() -> bool:
        url = f"{pupil.http}/v2/models/digits/ready"
        return urllib3.request("GET", url, retries=False).status == 200

    wait_until(served, "the server serves digits", 30)
    label, probabilities = json.loads(pupil.shell(curl))["outputs"]
    assert (label["name"], label["data"]) == ("label", [0])
    assert (probabilities["name"], probabilities["shape"]) == ("probabilities", [1, 10])
    assert np.argmax(probabilities["data"]) == 0


def test_two_machines_are_joined_under_a_certificate(pupil: Pupil) -> None:
    """The block of the README, both machines being this one."""
    http, mqtt = free_ports(2)
    changes = {
        "192.168.1.10": "127.0.0.1",
        "0.0.0.0": "127.0.0.1",
        "8000": str(http),
        "8883": str(mqtt),
        "./server": "./tls-server",
        "--state device": "--state tls-device",
    }
    run, enroll = README.snippet("certificate"), README.snippet("enroll-tls")
    for there, here in changes.items():
        run, enroll = run.replace(there, here), enroll.replace(there, here)
    certificate, _, serve = run.partition("splitedge server run")
    pupil.shell(certificate)
    server = subprocess.Popen(
        ["bash", "-euc", f"exec splitedge server run{serve}"],
        cwd=pupil.folder,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        assert f"https://127.0.0.1:{http}" in server.stdout.readline()
        token = pupil.shell("splitedge server token create --state ./tls-server").strip()
        output = pupil.shell(enroll.replace("TOKEN", token))
        assert "enrolled as" in output
    finally:
        server.terminate()
        server.wait(20)
        assert server.stdout is not None
        server.stdout.close()


def test_map_of_the_folders_is_that_of_the_repository() -> None:
    named = re.findall(r"^\| `([a-z_/]+)/` \|", README.text, re.MULTILINE)
    assert all((ROOT / folder).is_dir() for folder in named)
    packages = {path.parent.name for path in ROOT.glob("*/py.typed")}
    assert packages <= set(named)


@pytest.fixture(scope="module")
def held(pupil: Pupil) -> Iterator[Pupil]:
    """The reader has stopped the server, and started it again as the tutorial says."""
    server = _server_of(pupil.folder)
    stop = TUTORIAL.snippet("stop").replace("kill %1", f"kill {server.pid}")
    answers = json.loads(pupil.type(stop))
    assert len(answers) == 10
    assert {answer["source"] for answer in answers} <= {"device", "fallback"}
    server.wait(30)
    pupil.type(TUTORIAL.snippet("settings"))
    with (pupil.folder / "again.log").open("w") as log:
        again = subprocess.Popen(
            ["bash", "-euc", f"exec {TUTORIAL.snippet('again').strip(WAITING)}"],
            cwd=pupil.folder,
            env=environment(),
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(lambda: _is_ready(pupil.http), (pupil.folder / "again.log").read_text, 60)
        yield pupil
    finally:
        again.terminate()
        again.wait(30)


@pytest.mark.deadline
def test_device_answers_without_the_server_and_finds_it_again(held: Pupil) -> None:
    offload = TUTORIAL.snippet("all-offloaded").strip()

    def answered() -> bool:
        found = json.loads(held.type(f"{offload} --json"))
        return {answer["source"] for answer in found} == {"server"}

    wait_until(answered, (held.folder / "again.log").read_text, 60)


def _repository(script: str, data: Path) -> str:
    """A script of the reader's folder, which lies in the checkout and has the data beside it."""
    script = script.replace("../../shared/data", str(data))
    return script.replace("../examples/", f"{ROOT}/examples/")


@pytest.mark.deadline
def test_pictures_that_change_raise_an_alert(held: Pupil, fashion_mnist_fixture: Path) -> None:
    held.type(_repository(TUTORIAL.snippet("drift"), fashion_mnist_fixture))
    wait_until(
        lambda: "drift" in str(held.asked("alerts")), (held.folder / "again.log").read_text, 90
    )
    shown = held.type(TUTORIAL.snippet("alerts"))
    assert "drift" in shown
    assert "sign-in" in shown


@pytest.fixture(scope="module")
def bad_version(held: Pupil, fashion_mnist_fixture: Path) -> int:
    """A version that waits on the server, and whose answers no device can know by itself.

    One depth is enough.
    """
    script = _repository(TUTORIAL.snippet("bad"), fashion_mnist_fixture)
    written = "--name things"
    assert written in script
    held.type(script.replace(written, f"{written} --depth 6 --int8 never"))
    versions = wait_until(lambda: _waiting(held.asked("models", "list")), "no version waits", 90)
    return max(versions)


def _waiting(listed: dict[str, Any]) -> list[int]:
    return [
        one["version"] for one in listed["models"] if one["model"] == "things" and not one["active"]
    ]


@pytest.fixture(scope="module")
def second_device(held: Pupil) -> Iterator[None]:
    """A second device runs."""
    folder = held.folder / "device2"
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was cut short
    held.type(TUTORIAL.snippet("second"))
    _report_often(folder)
    with _running(held.folder, TUTORIAL.snippet("run-second"), "agent2.log"):
        yield


@pytest.mark.deadline
@pytest.mark.usefixtures("second_device")
def test_a_bad_version_goes_back_by_itself(held: Pupil, bad_version: int) -> None:
    def rollout() -> dict[str, Any]:
        return dict(held.asked("rollout", "status"))

    def devices() -> list[str]:
        return [str(one["runs"]) for one in held.asked("devices")]

    start = TUTORIAL.snippet("rollout")
    assert "start things 2 " in start
    held.type(start.replace("things 2 ", f"things {bad_version} "))
    try:
        wait_until(
            lambda: any(one["state"] == "runs it" for one in rollout()["members"]), rollout, 90
        )
        held.type(TUTORIAL.snippet("work"))
        wait_until(lambda: rollout()["state"] != "running", rollout, 90)
        ended = rollout()
        assert ended["state"] == "failed", ended
        assert re.match(r"exit is \d\.\d %, expected above 20", ended["reason"]), ended
        wait_until(
            lambda: not any(one.startswith(f"things/{bad_version}/") for one in devices()),
            devices,
            90,
        )
        assert sum(one.startswith("things/1/") for one in devices()) >= 2
        assert "failed" in held.type(TUTORIAL.snippet("back"))
    finally:
        if rollout()["state"] == "running":  # a second attempt begins another one
            held.type("splitedge server rollout abort --state server")


def _server_of(folder: Path) -> psutil.Process:
    """The server that runs in that folder."""
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = process.info["cmdline"] or []
        if process.info["cwd"] == str(folder) and words[-4:] == [
            "server",
            "run",
            "--state",
            "server",
        ]:
            return process
    raise AssertionError(f"{folder}: no server runs there")
