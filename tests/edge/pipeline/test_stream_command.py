"""`splitedge agent run --source ... --sink ...` as a user types it, with a real server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.edge.digits import Digits
    from tests.edge.fleet import Fleet

pytestmark = pytest.mark.deadline

RUN = [sys.executable, "-P", "-m", "edge_sdk.cli", "agent", "run", "--state"]


@pytest.fixture(scope="module")
def state(fleet: Fleet) -> Path:
    return fleet.device("command")


@pytest.fixture
def running() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `agent run` in a folder, and ends it."""
    made: list[subprocess.Popen[str]] = []

    def start(state: Path, *options: str, folder: Path) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        made.append(
            subprocess.Popen(
                [*RUN, str(state), *options],
                cwd=folder,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                text=True,
            )
        )
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.communicate()


def rows_in(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_lines_in_and_lines_out_as_a_filter(
    state: Path, running: Any, digits: Digits, tmp_path: Path
) -> None:
    lines = [
        json.dumps({"x": digits.x[0].tolist(), "name": "first"}),
        "no json",
        json.dumps(digits.x[1].tolist()),
    ]
    sinks = ("--sink", "-", "--sink", "jsonl:answers.jsonl")
    process = running(state, "--source", "-", *sinks, "--smooth", "majority:3", folder=tmp_path)
    out, err = process.communicate("\n".join(lines) + "\n", timeout=60)
    assert process.returncode == 0, err
    rows = rows_in(out)  # nothing but rows on stdout
    assert [row["input"] for row in rows] == ["first", "line 3"]
    assert rows == rows_in((tmp_path / "answers.jsonl").read_text())
    assert rows[0]["smoothed_label"] == rows[0]["label"]
    assert "skipped: line 2: not JSON" in err
    assert "standard input: 2 answered, 1 skipped" in err
    assert "splitedge agent: command runs digits/1/d2" in err


def test_agent_toml_names_source_and_sinks_next_to_the_state(
    state: Path, running: Any, digits: Digits, tmp_path: Path
) -> None:
    (state / "agent.toml").write_text(
        '[stream]\nsource = "folder:pictures"\nsinks = ["jsonl:answers.jsonl"]\n'
    )
    (state / "pictures").mkdir()
    answers = state / "answers.jsonl"

    def names() -> list[str]:
        if not answers.exists():
            return []
        return [Path(row["input"]).name for row in rows_in(answers.read_text())]

    try:
        process = running(state, folder=tmp_path)
        np.save(state / "pictures" / "a.npy", digits.x[0])
        wait_until(lambda: names() == ["a.npy"], names, 30)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        np.save(state / "pictures" / "b.npy", digits.x[1])
        process = running(state, folder=tmp_path)  # after a restart, what was answered is left out
        wait_until(lambda: names() == ["a.npy", "b.npy"], names, 30)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    finally:
        (state / "agent.toml").unlink()


def test_a_reader_of_stdout_that_leaves_ends_the_run(
    state: Path, running: Any, digits: Digits, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "import itertools, numpy\n"
        "def zeros():\n"
        "    return (numpy.zeros((1, 8, 8)) for _ in itertools.count())\n"
    )
    process = running(state, "--source", "own:zeros", folder=tmp_path)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["input"] == "own:zeros 1"
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (("--sink", "-"), 1, "error: a sink or a smoothing needs a source; see --source"),
        (("--source", "-", "--every", "-1"), 2, "'--every': expected at least 0s, got -1"),
    ],
)
def test_a_wrong_option_is_named(
    options: tuple[str, ...],
    status: int,
    message: str,
    state: Path,
    running: Any,
    tmp_path: Path,
) -> None:
    process = running(state, *options, folder=tmp_path)
    out, err = process.communicate("", timeout=30)
    assert (process.returncode, out) == (status, "")
    assert message in err
    assert "Traceback" not in err
