"""Two releases side by side: this working tree, and the wheel of the release before it.

Each command runs in a process of its own, whose PYTHONPATH names one release. The libraries are
the ones of this environment for both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / "tests" / "fixtures" / "release-before"
PROGRAM = Path(__file__).with_name("agent_program.py")
SAMPLES = 100
ANSWER_S = 60.0
EXPORT_S = 120.0

Array = NDArray[Any]


@dataclass(frozen=True)
class Release:
    """One release of splitedge: its name, and the folder with its packages."""

    name: str
    path: Path

    def splitedge(self, *words: object) -> str:
        """The standard output of `splitedge WORDS`, which must succeed."""
        command = self._command("-m", "edge_sdk.cli", *words)
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{self.name}: {' '.join(map(str, words))}: {done.stderr}"
        return done.stdout

    def start(self, log: Path, *words: object) -> Program:
        """`python WORDS` in the background."""
        with log.open("a") as stderr:
            process = subprocess.Popen(
                self._command(*words),
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                bufsize=1,
            )
        return Program(process, log)

    def _command(self, *words: object) -> list[str]:
        return [sys.executable, "-P", *map(str, words)]

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.path)}


@dataclass(frozen=True)
class Program:
    """A program that runs, and the file with its log."""

    process: subprocess.Popen[str]
    log: Path

    def line(self) -> str:
        """The next line of its output."""
        assert self.process.stdout is not None
        timer = threading.Timer(ANSWER_S, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        assert line, self.log.read_text()
        return line

    def ask(self, op: str, **more: Any) -> Any:
        """The answer of `agent_program.py` to one call."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **more}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.line())

    def stop(self) -> None:
        """End it by its closed input, or else as SIGTERM does."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        words = cast("list[str | Path]", self.process.args)  # as this class started it
        if "agent_program.py" not in " ".join(map(str, words)):
            self.process.terminate()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self.process.stdout.close()


class Server:
    """`splitedge server run` of one release on a state folder; it keeps its ports over restarts."""

    def __init__(self, release: Release, state: Path) -> None:
        self.state = state
        self.http = ""
        self.start(release, "--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0")

    def start(self, release: Release, *options: str) -> None:
        """Start it with that release and wait until it takes requests."""
        self.release = release
        words = ("-m", "edge_sdk.cli", "server", "run", "--state", self.state, *options)
        self._program = release.start(self.state.with_name("server.log"), *words)
        line = self._program.line().split()
        self.http = line[line.index("(API),") - 1]

    def stop(self) -> None:
        """Stop it."""
        self._program.stop()

    @property
    def log(self) -> str:
        """Its log so far."""
        return self._program.log.read_text()


@dataclass(frozen=True)
class Trained:
    """A small network, the samples that agents are asked about, and what torch answers.

    Attributes:
        weights: its weights as a training leaves them.
        x: (n, 1, 8, 8) raw samples; `samples` is the file that holds them.
        exits, whole: (n,) labels of the exit head at depth 2, and of the whole network.
    """

    weights: Path
    samples: Path
    x: Array
    exits: list[int]
    whole: list[int]


@pytest.fixture(scope="module")
def now() -> Release:
    """This working tree."""
    return Release("this release", ROOT)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The release before, installed into a folder of its own."""
    (wheel,) = WHEELS.glob("*.whl")
    folder = tmp_path_factory.mktemp("before")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    pip += ["--disable-pip-version-check", "--target", str(folder), str(wheel)]
    subprocess.run(pip, check=True, timeout=120)
    return Release("the release before", folder)


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, train_centrally: Callable[..., None]
) -> Trained:
    """A network trained for a second, so that some samples exit and some do not."""
    import torch
    from safetensors.torch import save_file

    from edge_sdk.nets import build
    from edge_sdk.training.data.load import load_dataset

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("trained")
    data = load_dataset("digits").head(600, SAMPLES)
    net = build("tiny", mean=data.mean, std=data.std, seed=0)
    train_centrally(net, data.x_train, data.y_train, epochs=6, learning_rate=1e-2)
    kept = {
        name: tensor
        for name, tensor in net.state_dict().items()
        if not name.startswith("exits.") or name.startswith("exits.2.")
    }
    save_file(kept, folder / "weights.safetensors")
    np.save(folder / "samples.npy", data.x_test)
    with torch.no_grad():
        x = torch.from_numpy(data.x_test)
        exits, whole = net.exit_head(2)(net.prefix(2)(x)).argmax(1), net(x).argmax(1)
    return Trained(
        folder / "weights.safetensors",
        folder / "samples.npy",
        data.x_test,
        exits.tolist(),
        whole.tolist(),
    )


@pytest.fixture(scope="module")
def exports(
    trained: Trained, before: Release, now: Release, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Folders of `digits/1` by the exporter of the release before, and of `digits/2` by ours."""
    out = tmp_path_factory.mktemp("models")
    words: list[object] = ["-m", "edge_sdk.cli", "export", "--out", out, "--name", "digits"]
    words += ["--backbone", "tiny", "--weights", trained.weights, "--data", "digits"]
    words += ["--int8", "never"]
    started = [  # at once: both take seconds
        release.start(out / f"{number}.log", *words, "--version", number)
        for number, release in enumerate((before, now), start=1)
    ]
    for program in started:
        printed, _ = program.process.communicate(timeout=EXPORT_S)
        assert program.process.returncode == 0, printed + program.log.read_text()
    return out / "digits" / "1", out / "digits" / "2"


@pytest.fixture
def programs() -> Iterator[list[Program | Server]]:
    """What a test started, and this stops."""
    started: list[Program | Server] = []
    yield started
    for one in reversed(started):
        one.stop()
