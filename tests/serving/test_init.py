"""`splitedge init`: what its README says to type, typed; only ports are put in."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import urllib3
from typer.testing import CliRunner

from edge_sdk.settings_file.settings_file import SettingsFile
from server.project.cli import app
from server.run import Addresses
from tests.reader import WRITTEN_HTTP, environment, free_ports
from tests.waiting import wait_until

pytestmark = pytest.mark.long

WRITTEN_AGENT = "127.0.0.1:8080"


def init(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def blocks(readme: str) -> list[str]:
    """The commands of a README, block by block."""
    return re.findall(r"```sh\n(.*?)```", readme, re.DOTALL)


@pytest.mark.deadline
@pytest.mark.broker
def test_every_command_of_the_readme_works(tmp_path: Path) -> None:
    project = tmp_path / "shed-camera"
    made = init(project, "--json")
    assert made.exit_code == 0, made.output
    files = set(orjson.loads(made.stdout)["files"])
    assert {"README.md", "recipe.toml", "my_data.py", "device/agent.toml"} <= files
    http, mqtt, agent = (f"127.0.0.1:{port}" for port in free_ports(3))
    settings = project / "device" / "agent.toml"
    settings.write_text(settings.read_text().replace(WRITTEN_AGENT, agent))

    def type_(script: str) -> str:
        script = script.replace(WRITTEN_HTTP, f"http://{http}")
        done = subprocess.run(
            ["bash", "-euc", script],
            cwd=project,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    train, serve, use, run = blocks((project / "README.md").read_text())
    trained = type_(train)
    assert "my_data:load: 1,797 samples of 1 x 8 x 8 float32 in 10 classes" in trained
    Addresses(http, f"embedded:{mqtt}").save(project / "server")
    with background(serve, project) as served:
        wait_until(lambda: served.poll() == 0, "the server", 60)
        used = type_(use)
        assert "enrolled as shed-camera-1 in fleet default: shed-camera/1/" in used
        labels = np.load(project / "samples.npy").shape[0]
        assert len(re.findall(r"samples\.npy\[\d+\]", used)) == labels == 20
        with background(f"exec {run}", project):
            wait_until(lambda: is_ready(agent), "no agent", 60)
    # what the runs made is not for a repository of versions
    git = subprocess.run(
        "git init -q . && git add . && git ls-files",
        shell=True,
        cwd=project,
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(git.stdout.split()) == {
        *(".gitignore", "README.md", "device/agent.toml", "my_data.py", "recipe.toml"),
    }


@contextlib.contextmanager
def background(script: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A script with all that it starts, until the end of the block."""
    process = subprocess.Popen(
        ["bash", "-euc", script], cwd=folder, env=environment(), start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def is_ready(agent: str) -> bool:
    """Whether the agent at that address answers programs."""
    url = f"http://{agent}/v2/health/ready"
    with contextlib.suppress(urllib3.exceptions.HTTPError):
        return urllib3.request("GET", url, retries=False).status == 200
    return False


def test_each_suggestion_of_the_settings_can_be_taken(tmp_path: Path) -> None:
    assert init(tmp_path / "shed").exit_code == 0
    text = (tmp_path / "shed" / "device" / "agent.toml").read_text()
    assert SettingsFile.from_toml(text.encode()).agent.deadline_s == 0.5
    suggestion = re.compile(r"^#(?=\[|\w+ = )", re.MULTILINE)
    everything = suggestion.sub("", text)
    # one that sets the threshold excludes the other
    first = SettingsFile.from_toml(re.sub(r"(?m)^threshold.*$", "", everything).encode())
    second = SettingsFile.from_toml(re.sub(r"(?m)^(\[budget\]|limit.*)$", "", everything).encode())
    assert first.agent != second.agent
    assert first.stream.sinks
    assert second.agent.threshold == 0.5
    assert len(suggestion.findall(text)) == 8  # lines and tables


def test_nothing_is_written_over(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    refused = init(folder)
    assert refused.exit_code == 1
    assert "it is not empty" in str(refused.exception)
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("name", ["Shed Camera", "shed_camera", "x" * 64])
def test_a_name_that_no_model_can_have_is_refused(name: str, tmp_path: Path) -> None:
    refused = init(tmp_path / name)
    assert "expected a name of 1 to 63 of a-z" in str(refused.exception)
    assert not (tmp_path / name).exists()
