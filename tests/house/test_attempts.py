"""What a failed test finds when it is run again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.attempts import Attempts

def pytest_configure(config):
    config.pluginmanager.register(Attempts())
"""
# What a module's fixture keeps, and a wait without end that the second attempt begins.
TESTS = """
import threading
import pytest

made, ended, attempts = [], [], []

@pytest.fixture(scope="module")
def place():
    made.append([])
    yield made[-1]
    ended.append(made[-1])

@pytest.mark.flaky(reruns=1)
def test_leaves_something(place):
    assert not place, "another attempt was here"
    place.append("left")
    assert ended

@pytest.mark.flaky(reruns=1)
def test_waits_without_end(place):
    attempts.append(None)
    assert len(attempts) > 1
    threading.Event().wait()

@pytest.fixture
def endless():
    yield
    threading.Event().wait()

def test_fails_and_ends_without_end(endless):
    assert False

def test_finds_what_was_made_last(place):
    assert place is made[-1]
    assert len(made) == 3
"""
ELSEWHERE = "def test_runs(): assert True"


@pytest.fixture
def run(tmp_path: Path) -> str:
    """The output of pytest, with a limit of two seconds a test."""
    files = {"conftest.py": CONFTEST, "test_first.py": TESTS, "test_second.py": ELSEWHERE}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    words = ("-m", "pytest", "-rA", "--tb=line", "-p", "no:cacheprovider", "-p", "no:schemathesis")
    limit = ("-o", "timeout=2", "-o", f"pythonpath={ROOT}")
    command = [sys.executable, *words, *limit, "--rootdir", str(tmp_path), str(tmp_path)]
    return subprocess.run(
        command,
        check=False,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    ).stdout


@pytest.mark.deadline
def test_a_second_attempt_has_fixtures_and_a_time_limit_of_its_own(run: str) -> None:
    assert "PASSED test_first.py::test_leaves_something" in run, run
    assert "PASSED test_first.py::test_finds_what_was_made_last" in run, run
    assert "FAILED test_first.py::test_waits_without_end - Failed: Timeout" in run, run
    assert "ERROR test_first.py::test_fails_and_ends_without_end - Failed: Timeout" in run, run
    assert "PASSED test_second.py::test_runs" in run, run
