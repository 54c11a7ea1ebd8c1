"""What the options of a service ask of the machine: readable files, a reachable broker."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from edge_sdk.errors import StorageError
from edge_sdk.systemd.unit import ServiceUnit
from edge_sdk.systemd.users import SystemUser
from server.run import Addresses
from server.systemd.options import broker_note, unreadable_files
from tests.reader import environment

UNIT = ServiceUnit("server", ["/opt/splitedge"], "keeper", "1G", 60, "about")
# none of the numbers of this process, so that the rights of others hold
KEEPER = SystemUser(60123, 60123, frozenset({60123, 60124}))
LAN = ("--http", "0.0.0.0:8000")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A key in /etc/splitedge of a system that does not run."""
    place = tmp_path / "etc" / "splitedge" / "key.pem"
    place.parent.mkdir(parents=True)
    place.touch()
    for folder in (tmp_path, tmp_path / "etc", place.parent):
        folder.chmod(0o755)
    return place


def found(root: Path, *words: str, user: SystemUser = KEEPER) -> list[str]:
    return unreadable_files(UNIT, words, user, root)


def test_a_key_that_the_services_user_may_not_read_is_named(key: Path, tmp_path: Path) -> None:
    words = ("--tls-key", "/etc/splitedge/key.pem")
    refused = ["--tls-key /etc/splitedge/key.pem: its user keeper may not read it"]
    key.chmod(0o600)
    assert found(tmp_path, *words) == refused
    assert found(tmp_path, "--tls-key=/etc/splitedge/key.pem") == refused
    key.chmod(0o644)
    assert found(tmp_path, *words) == []
    key.parent.chmod(0o700)
    assert found(tmp_path, *words) == refused
    key.parent.chmod(0o755)

    key.chmod(0o640)
    assert found(tmp_path, *words) == refused
    of_group = replace(KEEPER, groups=KEEPER.groups | {key.stat().st_gid})
    assert found(tmp_path, *words, user=of_group) == []
    key.chmod(0o400)
    assert found(tmp_path, *words, user=of_group) == refused
    assert found(tmp_path, *words, user=replace(KEEPER, uid=key.stat().st_uid)) == []


def test_files_that_are_missing_or_hidden_from_a_service_are_named(tmp_path: Path) -> None:
    words = ("--tls-cert", "/etc/none.pem", "--tls-key", "/home/pi/key.pem", "--mqtt-ca", "ca.pem")
    assert found(tmp_path, *words) == [
        "--tls-cert /etc/none.pem: there is no such file",
        "--tls-key /home/pi/key.pem: the service cannot see that folder",
        "--mqtt-ca /var/lib/splitedge/server/ca.pem: there is no such file",
    ]


def test_a_user_of_an_image_has_the_groups_that_name_it(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "passwd").write_text("root:x:0:0::/:/bin/sh\nkeeper:x:7:8::/:/bin/sh\n")
    (tmp_path / "etc" / "group").write_text("tls:x:9:anna,keeper\nother:x:10:keepers\n")
    assert SystemUser.find("keeper", tmp_path) == SystemUser(7, 8, frozenset({8, 9}))
    with pytest.raises(StorageError, match="no user anna"):
        SystemUser.find("anna", tmp_path)


@pytest.mark.parametrize(
    ("words", "last", "noted"),
    [
        ((), None, False),
        (LAN, None, True),
        ((*LAN, "--mqtt", "auto"), None, True),
        ((*LAN, "--mqtt=embedded:127.0.0.1:1883"), None, True),
        ((*LAN, "--mqtt", "auto:0.0.0.0:8883"), None, False),
        ((*LAN, "--mqtt", "mqtts://broker:8883"), None, False),
        (("--mqtt", "auto"), Addresses("0.0.0.0:8000", "embedded:127.0.0.1:1883"), True),
        (("--mqtt", "auto"), Addresses("0.0.0.0:8000", "embedded:0.0.0.0:1883"), False),
        (("--mqtt", "auto"), Addresses("0.0.0.0:8000", "mqtts://broker:8883"), True),
        ((), Addresses("0.0.0.0:8000", "mqtts://broker:8883"), False),
        (("--http", "127.0.0.1:8000"), Addresses("0.0.0.0:8000", "auto"), False),
    ],
)
def test_a_broker_that_other_machines_cannot_reach_is_told(
    words: tuple[str, ...], last: Addresses | None, noted: bool, tmp_path: Path
) -> None:
    if last is not None:
        last.save(tmp_path)
    assert ("add --mqtt auto:0.0.0.0:8883" in broker_note(words, tmp_path)) == noted


@pytest.mark.deadline
def test_an_installation_says_what_the_server_will_lack(key: Path, tmp_path: Path) -> None:
    (tmp_path / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (tmp_path / "etc" / "group").write_text("root:x:0:\n")
    key.chmod(0o600)
    program = tmp_path / "opt" / "splitedge"
    program.parent.mkdir()
    program.touch()
    words = ["--root", str(tmp_path), "--command", "/opt/splitedge", "--", *LAN]
    words += ["--tls-key", "/etc/splitedge/key.pem"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "edge_sdk.cli", "server", "install-service", *words],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    if os.geteuid() != 0:
        assert "run it as root" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert "key.pem: its user splitedge-server may not read it" in done.stdout
    assert "sudo install -m 640 -g splitedge-server FILE /etc/splitedge/" in done.stdout
    assert "the broker listens on this machine alone" in done.stdout
