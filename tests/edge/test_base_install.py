"""The wheel as a device installs it: base dependencies only, against a real server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from server.bench.models import export_random
from server.processes import ServerProcess
from server.tokens import create_token

pytestmark = [pytest.mark.install, pytest.mark.long]

ROOT = Path(__file__).parents[2]
PACKAGES = ("edge_sdk", "exporters", "profiles", "server")
OF_THE_CHECKOUT = ("benchmarks", "tests")  # so general that they would hide a user's own
SERVER_ONLY = ("torch", "fastapi", "sqlalchemy", "uvicorn", "onnx", "sklearn", "alembic")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: building leaves folders in the source."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    junk = shutil.ignore_patterns("__pycache__")
    for package in (*PACKAGES, *OF_THE_CHECKOUT):
        shutil.copytree(ROOT / package, source / package, ignore=junk)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, source)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bin_folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of a new virtual environment with the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("device") / "venv"
    venv.create(folder, with_pip=True)
    pip = (folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile")
    run(*pip, "--constraint", ROOT / "constraints.txt", wheel)
    return folder / "bin"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """URL and state folder of a server that runs in this environment."""
    torch.set_num_threads(1)
    state = tmp_path_factory.mktemp("served") / "server"
    export_random("tiny", (1, 8, 8), (2,), state / "models")
    process = ServerProcess(state)
    process.start(("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0"))
    yield process.http, state
    process.stop()


def run(*command: object, cwd: Path | None = None) -> str:
    """Its stdout; the user's own PYTHONPATH would let the environment see the repository."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_holds_the_packages_their_data_and_nothing_else(wheel: Path) -> None:
    files = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.partition("/")[0] for name in files}
    assert {name for name in tops if not name.endswith(".dist-info")} == set(PACKAGES)
    assert not tops & set(OF_THE_CHECKOUT)
    expected = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".toml", ".mako") or path.name == "py.typed"
    }
    assert expected <= files
    assert "profiles/catalog/raspberry-pi-4.toml" in files
    assert "server/registry/migrations/versions/to_v0010/v0001_registry.py" in files
    assert {f"{package}/py.typed" for package in PACKAGES} <= files


def test_device_needs_the_base_install_only(
    bin_folder: Path, server: tuple[str, Path], tmp_path: Path
) -> None:
    python, splitedge = bin_folder / "python", bin_folder / "splitedge"
    code = (
        "import edge_sdk, importlib.util, pathlib, sys\n"
        "assert pathlib.Path(edge_sdk.__file__).is_relative_to(sys.prefix)\n"
        f"print([name for name in {SERVER_ONLY} if importlib.util.find_spec(name)])\n"
        "from edge_sdk import EdgeAgent\n"
    )
    assert run(python, "-c", code, cwd=tmp_path) == "[]\n"
    assert "agent" in run(splitedge, "--help", cwd=tmp_path)

    http, state = server
    pi, token = tmp_path / "pi", create_token(state)
    enroll = (splitedge, "agent", "enroll", "--server", http, "--token", token, "--state", pi)
    assert json.loads(run(*enroll, "--json", cwd=tmp_path))["bundle"] == "bench-tiny/1/d2"
    np.save(tmp_path / "x.npy", np.zeros((3, 1, 8, 8), np.float32))
    predict = (splitedge, "agent", "predict", tmp_path / "x.npy", "--state", pi, "--json")
    for threshold, source in (("-1", "server"), ("9", "device")):
        rows = json.loads(run(*predict, "--threshold", threshold, "--deadline", 10, cwd=tmp_path))
        assert [row["source"] for row in rows] == [source] * 3


@pytest.mark.deadline
@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("server", "run"), "server"),
        (("server", "token", "create"), "server"),
        (("demo",), "server"),
        (("bench",), "server"),
        (
            ("export", "--backbone=tiny", "--weights=w", "--data=digits", "--out=o", "--name=n"),
            "server",
        ),
        (("agent", "train", "--data", "digits"), "train"),
        (("agent", "run", "--serve", "127.0.0.1:0"), "serve"),
    ],
)
def test_command_says_what_to_install(
    words: tuple[str, ...], extra: str, bin_folder: Path, tmp_path: Path
) -> None:
    command = [str(bin_folder / "splitedge"), *words]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: this command needs ")
    assert line.endswith(f"pip install 'splitedge[{extra}]'")
    assert not list(tmp_path.iterdir())
