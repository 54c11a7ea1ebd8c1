"""What docs/adopt.md says to type, typed: a real server, an agent that enrols and answers."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import orjson
import pytest
import torch
import urllib3
from PIL import Image
from torch import nn

from edge_sdk import AgentSettings, EdgeAgent
from edge_sdk.training.data.load import Dataset
from server.run import Addresses
from tests.exporting.adopt.conftest import export
from tests.exporting.adopt.test_adopt_command import Tenths
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "adopt.md").read_text()
TOKEN = re.compile(r"^\S+\.[0-9a-f]{32}$", re.MULTILINE)
PICTURES = 500
# an installation that is older than this command has no entry point of that name
ADOPT = f"{shlex.quote(sys.executable)} -P -c 'from exporters.adopt.cli import app; app()'"


def snippet(name: str) -> str:
    """The fenced block under the comment that names it."""
    found = re.search(rf"<!-- snippet: {name} -->\n```\w+\n(.*?)```", DOCUMENT, re.DOTALL)
    assert found is not None, f"docs/adopt.md has no snippet {name}"
    return found[1].replace("splitedge adopt", ADOPT)


@dataclass(frozen=True)
class Place:
    """A reader's folder, and the server that was started from it."""

    folder: Path
    http: str
    token: str
    adopted: str

    def shell(self, script: str) -> str:
        return shell(self.folder, script.replace("http://127.0.0.1:8000", self.http))


def shell(folder: Path, script: str) -> str:
    """The stdout of a script."""
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def picture(x: np.ndarray, path: Path) -> None:
    pixels = np.round(x[0] * 255 / 16).astype(np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def place(
    small: nn.Module, digits: Dataset, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("reader")
    export(Tenths(small), torch.zeros(2, 1, 8, 8), folder / "model.onnx")
    (folder / "pictures").mkdir()
    for row in range(PICTURES):
        picture(digits.x_train[row], folder / "pictures" / f"{row}.png")
    picture(digits.x_test[0], folder / "new.png")
    adopted = shell(folder, snippet("adopt"))
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    http, mqtt = (f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes)
    for probe in probes:
        probe.close()
    Addresses(http, f"embedded:{mqtt}").save(folder / "server")  # as if it had run there before
    with (folder / "printed").open("w") as printed:
        started = subprocess.Popen(
            ["bash", "-euc", snippet("serve")],
            cwd=folder,
            env=environment(),
            stdout=printed,
            stderr=printed,
            start_new_session=True,
        )
    try:
        assert started.wait(120) == 0, (folder / "printed").read_text()
        wait_until(lambda: _ready(f"http://{http}"), (folder / "printed").read_text, 60)
        (token,) = TOKEN.findall((folder / "printed").read_text())
        yield Place(folder, f"http://{http}", token, adopted)
    finally:
        os.killpg(started.pid, signal.SIGKILL)


def _ready(http: str) -> bool:
    try:
        return urllib3.request("GET", f"{http}/v2/health/ready", retries=False).status == 200
    except urllib3.exceptions.HTTPError:
        return False


def test_file_and_pictures_become_an_answering_device(place: Place, digits: Dataset) -> None:
    assert "Next: splitedge server run --state server" in place.adopted
    printed = place.shell(snippet("device").replace("TOKEN", place.token))
    assert "things/1/" in printed
    assert re.search(r"\b(device|server)\b", printed.partition("new.png")[2])
    file = onnxruntime.InferenceSession(
        str(place.folder / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    rows = digits.x_test[:60]
    whole = file.run(None, {"image": rows / np.float32(16)})[0].argmax(axis=1)
    with EdgeAgent.open(place.folder / "device", AgentSettings(deadline_s=20.0)) as agent:
        answers = [agent.predict(x) for x in np.round(rows * (255 / 16)).astype(np.float32)]
    assert {answer.source for answer in answers} <= {"device", "server"}
    assert (np.array([answer.label for answer in answers]) == whole).mean() >= 0.95
    # with every input offloaded the answers are the whole model's
    asking = AgentSettings(deadline_s=20.0, threshold=-1.0)
    with EdgeAgent.open(place.folder / "device", asking) as agent:
        answers = [agent.predict(x) for x in np.round(rows * (255 / 16)).astype(np.float32)]
    assert {answer.source for answer in answers} == {"server"}
    assert (np.array([answer.label for answer in answers]) == whole).mean() >= 0.98


def test_server_answers_every_raw_input_as_the_file_does(place: Place, digits: Dataset) -> None:
    rows = np.round(digits.x_test[:8] * (255 / 16)).astype(np.float32)
    body = {
        "inputs": [
            {
                "name": "x",
                "datatype": "FP32",
                "shape": list(rows.shape),
                "data": rows.ravel().tolist(),
            }
        ],
        "outputs": [{"name": "logits"}],
    }
    answer = urllib3.request(
        "POST", f"{place.http}/v2/models/things/infer", body=orjson.dumps(body)
    )
    assert answer.status == 200, answer.data
    (logits,) = answer.json()["outputs"]
    file = onnxruntime.InferenceSession(
        str(place.folder / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    expected = file.run(None, {"image": rows / np.float32(255)})[0]
    given = np.array(logits["data"], np.float32).reshape(expected.shape)
    np.testing.assert_allclose(given, expected, atol=1e-4 * np.abs(expected).max())
