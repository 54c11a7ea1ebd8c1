"""`splitedge agent ...` without a server: devices that are not enrolled, and wrong use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import Splitedge


@pytest.mark.parametrize("command", [("predict", "x.npy"), ("run",), ("status",), ("update",)])
def test_device_that_is_not_enrolled_is_told_how(
    command: tuple[str, ...], tmp_path: Path, splitedge: Splitedge
) -> None:
    refusal = splitedge("agent", *command, "--state", tmp_path / "pi").refusal
    assert "`splitedge agent enroll`" in refusal
    assert not (tmp_path / "pi").exists()


@pytest.mark.deadline
@pytest.mark.parametrize("place", [0, 4])
def test_debug_shows_the_traceback_wherever_it_is_put(
    place: int, tmp_path: Path, splitedge: Splitedge
) -> None:
    words: list[object] = ["agent", "status", "--state", tmp_path]
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", *map(str, words)]
    command.insert(4 + place, "--debug")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "EnrolmentError" in done.stderr
    assert "Traceback" not in splitedge(*words).refusal


@pytest.mark.parametrize(
    "words",
    [
        ("agent", "predict"),
        ("agent", "enroll", "--server", "http://127.0.0.1:1"),
        ("agent", "predict", "x.npy", "--threshold", "low"),
        ("agent", "run", "--update-minutes", "0"),
        ("agent", "dance"),
        ("dance",),
    ],
)
def test_wrong_use_exits_with_2(words: tuple[str, ...], splitedge: Splitedge) -> None:
    called = splitedge(*words)
    assert (called.status, called.out) == (2, "")
    assert "--help" in called.err


def test_profile_of_a_catalogue_device_is_json(splitedge: Splitedge) -> None:
    profile = splitedge("agent", "profile", "--reference", "raspberry-pi-5", "--json").json
    assert profile["name"] == "raspberry-pi-5"
    refusal = splitedge("agent", "profile", "--reference", "toaster").refusal
    assert "raspberry-pi-5" in refusal  # one of the catalogue


def test_profile_of_the_bundle_needs_one(tmp_path: Path, splitedge: Splitedge) -> None:
    refusal = splitedge("agent", "profile", "--bundle", "--state", tmp_path).refusal
    assert "splitedge agent update" in refusal
    both = ("--bundle", "--reference", "raspberry-pi-5")
    assert "without --reference" in splitedge("agent", "profile", *both).refusal


@pytest.mark.parametrize("words", [("list",), ("lift", "3fa9c1")])
def test_quarantine_of_a_folder_without_a_device_is_refused(
    words: tuple[str, ...], tmp_path: Path, splitedge: Splitedge
) -> None:
    called = splitedge("agent", "quarantine", *words, "--state", tmp_path / "nodev")
    assert "splitedge agent enroll" in called.refusal
