"""The line after an export leads to a device that answers, wherever the models were written."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from edge_sdk.state import StateLock, is_held
from exporters.next_step import next_step


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_models_of_a_server_are_served_by_it() -> None:
    out = Path("place/models")
    out.mkdir(parents=True)
    start = "splitedge server run --state place"
    assert next_step(out) == start
    with StateLock(Path("place"), "server"):
        assert next_step(out).startswith("the running server takes it by itself; on a device:")
    # the file of the lock stays, and nobody holds it
    assert Path("place/server.lock").is_file()
    assert next_step(out) == start


def test_asking_for_a_lock_leaves_nothing(tmp_path: Path) -> None:
    assert not is_held(tmp_path, "server")
    assert not is_held(tmp_path / "nowhere", "server")
    assert not list(tmp_path.iterdir())


def test_other_folders_are_linked_into_a_state_beside_them() -> None:
    out = Path("m")
    out.mkdir()
    words = next_step(out)
    assert words.endswith("&& splitedge server run --state server")
    subprocess.run(["sh", "-euc", words.rpartition(" && ")[0]], check=True)
    assert Path("server/models").resolve() == out.resolve()
    assert not list(out.iterdir())
    with StateLock(Path("o-server"), "server"):  # it has no models yet
        Path("o").mkdir()
        assert "/o o-server/models; the running server takes it" in next_step(Path("o"))
    # the second model goes the same way, and another folder gets a state of its own
    assert next_step(out) == "splitedge server run --state server"
    with StateLock(Path("server"), "server"):
        assert next_step(out).startswith("the running server takes it")
    Path("n").mkdir()
    assert next_step(Path("n")).endswith("splitedge server run --state n-server")


def test_a_folder_named_server_is_not_its_own_state() -> None:
    Path("server").mkdir()
    assert next_step(Path("server")).endswith("splitedge server run --state server-server")


def test_the_current_folder_has_a_state_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, state in (("models", tmp_path), ("m", tmp_path / "server")):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert next_step(Path()).endswith(f"splitedge server run --state {state}")
