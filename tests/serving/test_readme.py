"""What the README says to type, typed: only ports and paths are put in."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import urllib3
from safetensors.torch import save_file

from edge_sdk.nets import Supernet, build
from edge_sdk.training.data.load import load_dataset
from server.run import Addresses
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TOKEN = re.compile(r"^\S+\.[0-9a-f]{32}$", re.MULTILINE)


def snippet(name: str) -> str:
    """The fenced block under the comment that names it."""
    found = re.search(rf"<!-- snippet: {name} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found is not None, f"README.md has no snippet {name}"
    return found[1]


@dataclass(frozen=True)
class Place:
    """Where a reader of the README sits: a folder, and a server that was started from it."""

    folder: Path
    http: str
    token: str

    def shell(self, script: str) -> str:
        """The stdout of a script of the README."""
        done = subprocess.run(
            ["bash", "-euc", script.replace("http://127.0.0.1:8000", self.http)],
            cwd=self.folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def environment() -> dict[str, str]:
    """With `splitedge` and `python` of this installation first, and torch on one thread."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory, train_centrally: Callable[..., None]
) -> Iterator[Place]:
    """The server snippet, run in an empty folder that has trained weights."""
    folder = tmp_path_factory.mktemp("readme")
    left = folder / "splitedge-demo" / "server" / "training" / "digits"  # by the demo
    left.mkdir(parents=True)
    save_file(_trained(train_centrally).state_dict(), left / "weights.safetensors")
    http, mqtt = (f"127.0.0.1:{port}" for port in _free_ports(2))
    (folder / "server").mkdir()
    Addresses(http, f"embedded:{mqtt}").save(folder / "server")  # as if it had run there before
    with (folder / "log").open("w") as log:
        shell = subprocess.Popen(
            ["bash", "-euc", snippet("server")],
            cwd=folder,
            env=environment(),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        assert shell.wait(120) == 0, (folder / "log").read_text()
        _wait_ready(f"http://{http}", folder / "log")
        (token,) = TOKEN.findall((folder / "log").read_text())
        yield Place(folder, f"http://{http}", token)
    finally:
        os.killpg(shell.pid, signal.SIGKILL)  # the server that the shell left in the background


def _trained(train_centrally: Callable[..., None]) -> Supernet:
    torch.set_num_threads(1)
    data = load_dataset("digits")
    net = build("tiny", mean=data.mean, std=data.std, seed=0)
    train_centrally(net, data.x_train, data.y_train, epochs=5, learning_rate=5e-3)
    return net


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _wait_ready(http: str, log: Path) -> None:
    def ready() -> bool:
        with contextlib.suppress(urllib3.exceptions.HTTPError):
            return urllib3.request("GET", f"{http}/v2/health/ready", retries=False).status == 200
        return False

    wait_until(ready, log.read_text, 60)


def test_curl_is_answered_with_the_digit_that_is_drawn(place: Place) -> None:
    answer = json.loads(place.shell(snippet("curl")))
    label, probabilities = answer["outputs"]
    assert (label["name"], label["data"]) == ("label", [0])
    assert (probabilities["name"], probabilities["shape"]) == ("probabilities", [1, 10])
    assert np.argmax(probabilities["data"]) == 0


def test_device_enrols_and_classifies_that_digit(place: Place) -> None:
    enroll = snippet("enroll")
    output = place.shell(
        enroll.replace("http://SERVER:8000", place.http).replace("TOKEN", place.token)
    )
    assert "digits/1/" in output
    drawn = re.search(r'"data": \[(.*?)\]', snippet("curl"), re.DOTALL)
    assert drawn is not None
    pixels = np.array([float(value) for value in drawn[1].split(",")], np.float32)
    np.save(place.folder / "digit.npy", pixels.reshape(1, 8, 8))
    (place.folder / "classify.py").write_text(snippet("device"))
    answer = place.shell("python classify.py")
    assert re.fullmatch(r"0 (device|server|fallback) \d+\.\d\d ms\n", answer), answer


def test_two_machines_are_joined_under_a_certificate(place: Place) -> None:
    """The block of the README, both machines being this one."""
    http, mqtt = _free_ports(2)
    changes = {
        "192.168.1.10": "127.0.0.1",
        "0.0.0.0": "127.0.0.1",
        "8000": str(http),
        "8883": str(mqtt),
        "./server": "./tls-server",
        "./pi": "./tls-pi",
    }
    run, enroll = snippet("certificate"), snippet("enroll-tls")
    for there, here in changes.items():
        run, enroll = run.replace(there, here), enroll.replace(there, here)
    certificate, _, serve = run.partition("splitedge server run")
    place.shell(certificate)
    server = subprocess.Popen(
        ["bash", "-euc", f"exec splitedge server run{serve}"],
        cwd=place.folder,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        assert f"https://127.0.0.1:{http}" in server.stdout.readline()
        token = place.shell("splitedge server token create --state ./tls-server").strip()
        output = place.shell(enroll.replace("TOKEN", token))
        assert "enrolled as" in output
    finally:
        server.terminate()
        server.wait(20)
        assert server.stdout is not None
        server.stdout.close()


def test_map_of_the_folders_is_that_of_the_repository() -> None:
    named = re.findall(r"^\| `([a-z_/]+)/` \|", README, re.MULTILINE)
    assert all((ROOT / folder).is_dir() for folder in named)
    packages = {path.parent.name for path in ROOT.glob("*/py.typed")}
    assert packages <= set(named)


def test_commands_in_the_text_are_commands(place: Place) -> None:
    commands = re.findall(r"`(splitedge [a-z -]*?)(?: --[^`]*)?`", README)
    assert len(commands) >= 3
    for command in commands:
        assert "Usage: splitedge" in place.shell(f"{command} --help")
