"""A server with one model of random weights, and a device that is enrolled there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from server.bench.models import export_random
from server.processes import ServerProcess
from server.tokens import create_token
from tests.edge.agent_commands.samples import SPEC


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """URL and state folder of a server with one model, of random weights."""
    torch.set_num_threads(1)
    state = tmp_path_factory.mktemp("served") / "server"
    export_random("tiny", SPEC.shape, (2,), state / "models")
    process = ServerProcess(state)
    process.start(("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0"))
    yield process.http, state
    process.stop()


@pytest.fixture(scope="module")
def enrolment(
    server: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any], str]:
    """An enrolled state folder, what enrolling printed, and its token."""
    http, state = server
    pi, token = tmp_path_factory.mktemp("devices") / "pi", create_token(state)
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", "agent", "enroll", "--server", http]
    command += ["--token", token, "--state", str(pi), "--name", "pi-1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return pi, json.loads(done.stdout), token


@pytest.fixture(scope="module")
def pi(enrolment: tuple[Path, dict[str, Any], str]) -> Path:
    """The state folder of an enrolled device."""
    return enrolment[0]
