"""The doctor says what is wrong with a server's state, and what to do; nothing is changed."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.mqtt.certificates import self_signed
from edge_sdk.errors import ConfigurationError
from server.registry.copies.rows import is_outdated, newest_entry
from server.registry.database import Registry, open_registry
from server.registry.location import RegistryLocation
from server.registry.migrate import newest_version
from server.registry.operator import OPERATOR_KEY, load_or_create_operator_secret
from server.run import Addresses
from server.signing.artifacts import ArtifactRepository
from server.signing.keys import RootKeys, encrypt_keys
from server.upkeep.certificate import judge_certificate
from server.upkeep.doctor import Finding, examine
from tests.serving.registry.test_migration import at_version

if TYPE_CHECKING:
    from tests.serving.conftest import Exported


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A server's state without models."""
    state = tmp_path / "state"
    ArtifactRepository(state).open_or_create()
    load_or_create_operator_secret(state)
    with closing(open_registry(state)) as registry:
        registry.create_token()
    return state


def problems(state: Path) -> list[Finding]:
    return [one for one in examine(state) if one.verdict == "problem"]


def test_a_healthy_state_is_ok_in_every_check(state: Path) -> None:
    found = examine(state)
    assert [one for one in found if one.verdict == "problem"] == []
    assert [one.check for one in found if one.verdict == "warning"] == ["keys"]  # the root's key
    checks = [
        "keys",
        "keys",
        "registry",
        "signed bundles",
        "models",
        "disk",
        "TLS",
        "clock",
        "descriptors",
    ]
    assert [one.check for one in found] == [*checks, "server"]
    healthy = doctor(state)
    assert (healthy.returncode, healthy.stderr) == (0, "")
    assert healthy.stdout.count("\n") == len(found)
    lose_key(state)
    ill = doctor(state)
    assert (ill.returncode, ill.stderr) == (1, "")
    assert "problem  keys: " in ill.stdout


def test_a_root_key_in_the_clear_is_a_warning(state: Path, tmp_path: Path) -> None:
    def warned() -> list[str]:
        return [one.text for one in examine(state) if one.verdict == "warning"]

    (text,) = warned()
    assert "root.pem: the root's key lies on this server unencrypted" in text
    assert f"root move-offline DIR --state {state}" in text
    encrypt_keys([state / "keys"], b"correct horse battery staple", None)
    assert warned() == []


def test_a_root_key_kept_elsewhere_is_no_warning(state: Path, tmp_path: Path) -> None:
    ArtifactRepository(state).rotate(["root"], new_root_keys=RootKeys(tmp_path / "usb"))
    assert [one for one in examine(state) if one.verdict == "warning"] == []


def test_a_model_that_cannot_be_loaded_is_a_warning(state: Path, exported: Exported) -> None:
    def warned() -> list[str]:
        return [one.text for one in examine(state) if one.check == "models"][:-1]

    exported.install(state / "models")
    folder = exported.install(state / "models", version=2)
    assert warned() == []
    (folder / "model.json").write_bytes(b"{}")
    (text,) = warned()
    assert text.startswith(f"{folder}: cannot be loaded, so it is not served: ")
    exported.install(state / "models", version=3)
    for graph in (state / "models" / "digits" / "3" / "segments").iterdir():
        graph.write_bytes(b"no graph")
    assert len(warned()) == 2


def test_the_certificate_is_looked_at(state: Path, tmp_path: Path) -> None:
    def found(mqtt_public: str | None = None) -> tuple[str, str]:
        used = Addresses("0.0.0.0:8000", "auto:0.0.0.0:8883", mqtt_public, None, str(cert))
        used.save(state)
        (one,) = [one for one in examine(state) if one.check == "TLS"]
        return one.verdict, one.text

    cert, _ = self_signed(tmp_path, by_address=False)  # for two days
    verdict, text = found()
    assert verdict == "warning"
    assert re.search(r"cert\.pem: expires on \d{4}-\d\d-\d\d, in 1 days; renew it", text)
    assert found("mqtts://0.0.0.0:8883")[0] == "warning"  # the server's own host
    verdict, text = found("mqtts://hub.example:8883")
    assert verdict == "problem"
    assert "it names localhost, and devices are told to connect to hub.example" in text
    later = datetime.now(UTC) + timedelta(days=3)
    assert "devices refuse it" in judge_certificate(cert, None, later)[1]
    earlier = datetime.now(UTC) - timedelta(days=40)
    assert judge_certificate(cert, None, earlier)[0] == "problem"
    cert.write_text("no certificate")
    assert found()[0] == "problem"
    cert.unlink()
    assert "cannot be checked" in found()[1]


def doctor(state: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", "server", "doctor"]
    return subprocess.run(
        [*command, "--state", str(state)], capture_output=True, text=True, check=False
    )


def show_key(state: Path) -> None:
    (state / OPERATOR_KEY).chmod(0o644)


def lose_key(state: Path) -> None:
    (state / OPERATOR_KEY).unlink()


def damage_registry(state: Path) -> None:
    raw = bytearray((state / "registry.db").read_bytes())
    raw[4096 : 3 * 4096] = bytes(2 * 4096)
    (state / "registry.db").write_bytes(bytes(raw))


def make_newer(state: Path) -> None:
    opened = Registry.open(f"sqlite:///{state}/registry.db")
    with closing(opened) as registry, registry._transactions.writing() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")


def lose_model(state: Path) -> None:
    with closing(open_registry(state)) as registry:
        registry.catalogue.publish("digits", 1, digest="0" * 64)


def damage_metadata(state: Path) -> None:
    (state / "tuf" / "metadata" / "timestamp.json").write_bytes(b"{")


def set_clock_back(state: Path) -> None:
    location = RegistryLocation.of(state)
    ahead = Registry.open(location.address, clock=lambda: time.time() + 86_400)
    with closing(ahead) as registry:
        registry.create_token()
    assert (newest_entry(location) or 0) > time.time()


@pytest.mark.parametrize(
    ("harm", "check", "text"),
    [
        (show_key, "keys", "other users can read it; run `chmod go="),
        (lose_key, "keys", "operator.key is missing"),
        (damage_registry, "registry", "restore a backup|cannot be checked"),
        (make_newer, "registry", "has version 9999, this program knows versions up to"),
        (lose_model, "models", "digits/1: .*restore them from a backup"),
        (damage_metadata, "signed bundles", "cannot be checked"),
        (set_clock_back, "clock", "24.0 hours later"),
    ],
)
def test_each_harm_is_found_and_said(
    state: Path, harm: Callable[[Path], None], check: str, text: str
) -> None:
    harm(state)
    found = problems(state)
    assert check in [one.check for one in found]
    (told,) = [one.text for one in found if one.check == check][:1]
    assert re.search(text, told), told


def put_back(file: Path, version: str) -> None:
    """Make a registry one of an earlier version, with the rows that it has."""
    earlier = file.with_name("earlier.db")
    at_version(earlier, version).close()
    with closing(sqlite3.connect(earlier)) as old, old:
        old.execute("ATTACH ? AS now", (str(file),))
        for (table,) in old.execute("SELECT name FROM main.sqlite_schema WHERE type = 'table'"):
            if table != "alembic_version":
                names = [row[1] for row in old.execute(f"PRAGMA main.table_info({table})")]
                columns = ", ".join(f'"{name}"' for name in names)
                old.execute(f"INSERT INTO main.{table} SELECT {columns} FROM now.{table}")
    for name in ("registry.db-wal", "registry.db-shm"):
        file.with_name(name).unlink(missing_ok=True)
    earlier.replace(file)


def test_a_registry_of_an_earlier_release_is_left_as_it_is(state: Path) -> None:
    put_back(state / "registry.db", "0005")
    assert [one.verdict for one in examine(state) if one.check == "models"] == ["warning"]
    assert problems(state) == []
    (registry_text,) = [one.text for one in examine(state) if one.check == "registry"]
    assert registry_text.endswith("an earlier version, migrated at the next start")
    assert is_outdated(RegistryLocation.in_folder(state))
    open_registry(state).close()  # a start migrates it
    assert [one.verdict for one in examine(state) if one.check == "models"] == ["ok"]
    (registry_text,) = [one.text for one in examine(state) if one.check == "registry"]
    assert registry_text.endswith(f", version {newest_version()}")


def test_a_folder_that_is_no_servers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not the state folder of a server"):
        examine(tmp_path)
    assert list(tmp_path.iterdir()) == []
