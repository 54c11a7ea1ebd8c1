"""`splitedge server root …`: the commands, on the state of a server that is not running."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_sdk.cli.main import main
from edge_sdk.state import StateLock
from server.signing.artifacts import ArtifactRepository
from server.state import existing_registry
from server.tokens import create_token

Command = Callable[..., str]


@pytest.fixture
def root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Runs `splitedge server root WORDS` on a server's state; what it printed, or the error."""
    state = tmp_path / "state"
    ArtifactRepository(state).open_or_create()

    def call(*words: object) -> str:
        command = ["splitedge", "server", "root", *map(str, words)]
        if "--state" not in words:
            command += ["--state", str(state)]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        assert (left.value.code == 1) == err.startswith("error: "), err
        return out or err

    return call


def shown(root: Command) -> dict[str, dict[str, object]]:
    report = json.loads(root("show", "--json"))
    return {role["role"]: role for role in report["roles"]} | {"root_version": report}


def test_keys_are_shown_renewed_and_rotated(root: Command) -> None:
    before = shown(root)
    assert before["root"]["keys_in_state"] == 1
    assert "root version 2" in root("renew")
    assert "new keys: timestamp, snapshot, targets" in root("rotate", "--keys", "online")
    after = shown(root)
    assert after["root_version"]["root_version"] == 3
    changed = [
        role
        for role in ("root", "timestamp", "snapshot", "targets")
        if after[role]["keys"] != before[role]["keys"]
    ]
    assert changed == ["timestamp", "snapshot", "targets"]
    assert "1 of 1" in root("show")


def test_root_moves_to_a_folder_and_is_rotated_from_there(root: Command, tmp_path: Path) -> None:
    usb = tmp_path / "usb"
    moved = root("move-offline", usb, "--root-keys", 3, "--root-threshold", 2)
    assert f"its keys are {usb}/root-v2-*.pem" in moved
    assert "backups made before still hold the old root key" in moved
    assert "encrypted" not in moved
    assert shown(root)["root"]["keys_in_state"] == 0
    assert "give each folder that has some by --root-key offline:DIR" in root("renew")
    assert "expected offline:DIR, got usb" in root("renew", "--root-key", "usb")
    place = ("--root-key", f"offline:{usb}")
    assert "destroy the older ones" in root("rotate", "--keys", "root", *place)
    assert (usb / "root-v3-3.pem").exists()
    role = shown(root)["root"]
    assert (role["threshold"], len(role["keys"])) == (2, 3)  # type: ignore[arg-type]  # a list
    assert "root version 4" in root("rotate", *place, "--root-keys", 1, "--root-threshold", 1)
    assert "expected 1 <= --root-threshold <= --root-keys" in root(
        "rotate", *place, "--root-keys", 1, "--root-threshold", 2
    )


def test_keys_are_encrypted_by_command(
    root: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "passphrase"
    file.write_text("correct horse battery staple\n")
    assert "give the passphrase" in root("encrypt-keys")
    option = ("--key-passphrase-file", file)
    with StateLock(tmp_path / "state", "server"):
        assert f"stop it, run this again, and start it with --key-passphrase-file {file}" in root(
            "encrypt-keys", *option
        )
    assert not any(shown(root)[role]["encrypted"] for role in ("root", "timestamp"))
    said = root("encrypt-keys", *option)
    assert said.startswith("encrypted ")
    assert "backups made before still hold the keys as they were" in said
    assert all(shown(root)[role]["encrypted"] for role in ("root", "timestamp"))
    assert "the key is encrypted" in root("rotate")
    monkeypatch.setenv("SPLITEDGE_KEY_PASSPHRASE_FILE", str(file))
    assert "root version 2" in root("rotate")
    moved = root("move-offline", tmp_path / "usb")
    assert "they are encrypted with the server's own passphrase" in moved
    file.write_text("short\n")
    assert "at least 20 characters" in root("rotate")


def test_passphrase_that_does_not_fit_is_told_by_its_option(root: Command, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("correct horse battery staple\n")
    second.write_text("another horse battery staple\n")
    root("encrypt-keys", "--key-passphrase-file", first)
    change = ("encrypt-keys", "--key-passphrase-file", second)
    assert "give the file of that one by --old-passphrase-file" in root(*change)
    assert "nor that of --old-passphrase-file opens" in root(
        *change, "--old-passphrase-file", second
    )
    assert root(*change, "--old-passphrase-file", first).startswith("encrypted ")
    missing = tmp_path / "nopass"
    said = root("rotate", "--key-passphrase-file", missing)
    assert said == f"error: {missing}: not found; give the file of the passphrase\n"
    missing.mkdir()
    assert f"{missing}: cannot be read (Is a directory)" in root(
        "rotate", "--key-passphrase-file", missing
    )
    second.write_bytes(b"\xff\xfe")
    assert "expected a passphrase in UTF-8" in root("rotate", "--key-passphrase-file", second)


def test_use_of_the_keys_is_in_the_audit_log(root: Command, tmp_path: Path) -> None:
    state = tmp_path / "state"
    create_token(state)  # makes the registry
    root("renew")
    root("rotate", "--keys", "online")
    with existing_registry(state) as registry:
        noted = [(one.what, one.detail) for one in registry.trail.entries()]
    assert ("root.renew", "version 2") in noted
    assert ("root.rotate", "version 3, new keys: timestamp, snapshot, targets") in noted


def test_folder_that_is_no_server_is_refused(root: Command, tmp_path: Path) -> None:
    assert "not the state folder of a server" in root("show", "--state", tmp_path / "none")
