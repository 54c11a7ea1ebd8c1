"""Backup and restoration: of a running server, and between SQLite and PostgreSQL."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select

from edge_sdk.errors import ConfigurationError, StateInUseError
from edge_sdk.state import StateLock
from profiles import load_reference
from profiles.measured import BundleMeasurement, GraphMeasurement
from server.deployment.publisher import digest_of
from server.errors import ConflictError
from server.registry.database import Registry, open_registry
from server.registry.location import RegistryLocation
from server.registry.operator import load_or_create_operator_secret
from server.registry.schema import METADATA
from server.signing.artifacts import ArtifactRepository
from server.upkeep.archive import BackupWriter
from server.upkeep.backup import back_up, restore
from server.upkeep.doctor import examine
from tests.edge.bundles import crash_states
from tests.reader import Document, Reader

if TYPE_CHECKING:
    from tests.serving.conftest import Exported, ServerRun
    from tests.serving.postgresql import PostgreSql

UPKEEP = Document("docs/upkeep.md")
PROFILE = load_reference("raspberry-pi-4").to_dict()


@pytest.fixture
def state(tmp_path: Path, exported: Exported) -> Path:
    """A server's state with a published model, devices, tokens and what is known of them."""
    state = tmp_path / "state"
    folder = exported.install(state / "models")
    artifacts = ArtifactRepository(state)
    artifacts.open_or_create()
    artifacts.publish_bundles(folder)
    load_or_create_operator_secret(state)
    with closing(open_registry(state)) as registry:
        fill(registry)
    return state


def fill(registry: Registry) -> None:
    registry.catalogue.publish("digits", 1)
    for number in range(3):
        registry.redeem_token(registry.create_token("barn"), f"pi-{number}", PROFILE)
    registry.create_token("shed", note="unused")
    registry.revoke("pi-2")
    measured = BundleMeasurement("digits/1/d1", {"exit": GraphMeasurement(1.0, 10, 5)}, 2.0, 10)
    registry.capabilities.measured("pi-0", measured)
    registry.capabilities.pin("pi-1", depth=2)
    registry.catalogue.assign("barn", "digits", 1)


def rows(location: RegistryLocation) -> dict[str, list[Mapping[str, Any]]]:
    """All rows of all tables, without what a restoration adds to the audit log."""
    opened = Registry.open(location.address)
    with closing(opened) as registry, registry._transactions.reading() as connection:
        found = {
            table.name: [dict(row) for row in connection.execute(select(table)).mappings()]
            for table in METADATA.sorted_tables
        }
    found["audit"] = [row for row in found["audit"] if row["what"] != "server.restore"]
    return {name: sorted(of, key=str) for name, of in found.items()}


def files(folder: Path, *parts: str) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for part in parts
        for path in (folder / part).rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def test_the_registry_may_be_named_where_it_would_be_anyway(state: Path, tmp_path: Path) -> None:
    back_up(state, tmp_path / "backup.tar")
    new = tmp_path / "is it new?"
    location = RegistryLocation.in_folder(new)
    assert restore(tmp_path / "backup.tar", new, location).devices == 3
    assert rows(location) == rows(RegistryLocation.in_folder(state))
    assert back_up(new, tmp_path / "again.tar").devices == 3


@pytest.mark.parametrize("name", ["backup.tar", "backup"])
def test_what_is_restored_is_what_was_backed_up(state: Path, tmp_path: Path, name: str) -> None:
    saved = back_up(state, tmp_path / name)
    assert (saved.devices, saved.incomplete) == (3, ())
    written = [tmp_path / name, *(tmp_path / name).rglob("*")]
    assert {path.stat().st_mode & 0o077 for path in written} == {0}  # it holds secrets
    done = restore(tmp_path / name, tmp_path / "new")
    assert done.devices == 3
    parts = ("keys", "models", "tuf/targets")
    assert files(tmp_path / "new", *parts) == files(state, *parts)
    assert rows(RegistryLocation.of(tmp_path / "new")) == rows(RegistryLocation.of(state))
    assert [one for one in examine(tmp_path / "new") if one.verdict == "problem"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "new", "state"])


# restores a backup, of which the path is given, into the folder `new`
RESTORATION = """
from server.upkeep.backup import restore

(backup,) = work
begin()
restore(Path(backup), state / "new")
note("done", backup)
"""


def test_a_power_cut_leaves_a_whole_state_or_none(tmp_path: Path) -> None:
    """FAULTS row 2: a folder that the disk has, without the bytes of its files."""
    state, around = tmp_path / "state", tmp_path / "around"
    ArtifactRepository(state).open_or_create()
    load_or_create_operator_secret(state)
    with closing(open_registry(state)) as registry:
        fill(registry)
    back_up(state, tmp_path / "backup.tar")
    around.mkdir()
    moments = crash_states.record(around, str(tmp_path / "backup.tar"), act=RESTORATION)

    def found(*, synced: bool) -> list[dict[str, bytes | None]]:
        states = map(
            crash_states.renamed_without_bytes, crash_states.disks({}, moments, synced=synced)
        )
        return [{path: raw for path, raw in one.items() if path[:4] == "new/"} for one in states]

    *seen, last = found(synced=True)
    assert {"new/registry.db", "new/keys/root.pem", "new/tuf/metadata/timestamp.json"} <= set(last)
    assert last == {path: raw for path, (_, raw) in moments[-1].tree.items() if path != "new"}
    assert [one for one in seen if one not in ({}, last)] == []
    assert found(synced=False)[-1] != last


def test_a_server_that_has_signed_nothing_yet_is_restored(tmp_path: Path) -> None:
    """Its clock may have stood in 1970 since its first start."""
    state, new = tmp_path / "state", tmp_path / "new"
    load_or_create_operator_secret(state)
    with closing(open_registry(state)) as registry:
        fill(registry)
    back_up(state, tmp_path / "backup.tar")
    assert restore(tmp_path / "backup.tar", new).root_version == 0
    with closing(open_registry(new)) as registry:
        assert registry.device("pi-1").active


def test_what_a_killed_backup_left_is_deleted_by_the_next(state: Path, tmp_path: Path) -> None:
    left = state / ".backup-killed"
    left.mkdir()
    (left / "registry.db").write_bytes(bytes(1_000))
    with StateLock(state, "backup"), pytest.raises(StateInUseError):  # it runs yet
        back_up(state, tmp_path / "backup.tar")
    assert left.exists()
    back_up(state, tmp_path / "backup.tar")
    assert not left.exists()


def test_devices_that_saw_later_versions_than_those_of_the_backup_get_higher_ones(
    state: Path, tmp_path: Path
) -> None:
    artifacts = ArtifactRepository(state)
    artifacts.rotate()
    back_up(state, tmp_path / "b.tar")
    for _ in range(5):
        artifacts.refresh_timestamp()  # an hour each
    seen = artifacts.metadata.load()
    assert restore(tmp_path / "b.tar", tmp_path / "new").root_version == 2
    restored = ArtifactRepository(tmp_path / "new")
    restored.open_or_create()
    first = restored.metadata.load()
    for of in ("timestamp", "snapshot", "targets"):
        assert getattr(first, of).signed.version > getattr(seen, of).signed.version
    restored.open_or_create()
    assert restored.metadata.load().timestamp.signed.version == first.timestamp.signed.version + 1


@pytest.mark.parametrize(("old", "new"), [("sqlite", "postgresql"), ("postgresql", "sqlite")])
def test_a_registry_moves_between_databases(
    state: Path, tmp_path: Path, postgresql: PostgreSql, old: str, new: str
) -> None:
    databases = [postgresql.new_database(), postgresql.new_database("template0")]
    if old == "postgresql":
        place = RegistryLocation.parse(
            postgresql.url_without_password(databases[0]), postgresql.password_file
        )
        (state / "registry.db").unlink()
        place.save(state)
        with closing(open_registry(state)) as registry:
            fill(registry)
    before = rows(RegistryLocation.of(state))
    back_up(state, tmp_path / "b.tar")
    location = None
    if new == "postgresql":
        url = postgresql.url_without_password(databases[1])
        location = RegistryLocation.parse(url, postgresql.password_file)
    restore(tmp_path / "b.tar", tmp_path / "new", location)
    assert (tmp_path / "new" / "registry.db").exists() == (new == "sqlite")
    assert rows(RegistryLocation.of(tmp_path / "new")) == before
    with closing(open_registry(tmp_path / "new")) as registry:  # numbers go on after the old ones
        registry.redeem_token(registry.create_token(), "pi-new", PROFILE)
        newest = registry.trail.entries(1)[0]
        assert newest.id > max(row["id"] for row in before["audit"])
    if location is not None:
        with pytest.raises(ConfigurationError, match="expected an empty database"):
            restore(tmp_path / "b.tar", tmp_path / "again", location)
        assert not (tmp_path / "again").exists()
    for database in databases:
        postgresql.drop(database)


@pytest.mark.parametrize("out", ["b.tar", "backups/b.tar", "."])
def test_a_backup_into_the_state_itself_is_refused(state: Path, out: str) -> None:
    """The next one would hold it, and each would be twice as long as the one before."""
    before = sorted(state.rglob("*"))
    with pytest.raises(ConfigurationError, match="give a place outside it"):
        back_up(state, state / out)
    assert sorted(state.rglob("*")) == before


def test_a_state_that_is_not_empty_is_left_alone(state: Path, tmp_path: Path) -> None:
    back_up(state, tmp_path / "b.tar")
    before = rows(RegistryLocation.of(state))
    with pytest.raises(ConfigurationError, match="expected an empty folder or none"):
        restore(tmp_path / "b.tar", state)
    with pytest.raises(ConfigurationError, match="exists already"):
        back_up(state, tmp_path / "b.tar")
    assert rows(RegistryLocation.of(state)) == before


def cut(backup: Path) -> None:
    backup.write_bytes(backup.read_bytes()[: backup.stat().st_size // 2])


def flip(backup: Path) -> None:
    raw = bytearray(backup.read_bytes())
    at = raw.find(b"SQLite format 3") + 5_000
    raw[at] ^= 1
    backup.write_bytes(bytes(raw))


def climb(backup: Path) -> None:
    with tarfile.open(backup, "w") as tar:
        entry = tarfile.TarInfo("../outside")
        tar.addfile(entry)


def link(backup: Path) -> None:
    with tarfile.open(backup, "w") as tar:
        entry = tarfile.TarInfo("keys")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(entry)


def text(backup: Path) -> None:
    backup.write_text("no backup at all")


@pytest.mark.parametrize("damage", [cut, flip, climb, link, text])
def test_a_backup_that_is_damaged_or_hostile_is_refused_and_leaves_nothing(
    state: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    backup = tmp_path / "b.tar"
    back_up(state, backup)
    damage(backup)
    with pytest.raises(ConfigurationError, match=r"b\.tar: "):
        restore(backup, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.tar", "state"]


def test_a_backup_with_room_for_none_of_it_leaves_nothing(state: Path, tmp_path: Path) -> None:
    """FAULTS row 6: the disk of the backup is full."""
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from edge_sdk.errors import StorageError\n"
        "from server.upkeep.backup import back_up\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))\n"
        "try:\n    back_up(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "except StorageError as err:\n    print(err)\n"
    )
    command = [sys.executable, "-P", "-c", program, str(state), str(tmp_path / "b.tar")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "b.tar: needs" in done.stdout, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


@pytest.fixture
def enrolling(state: Path) -> Iterator[list[str]]:
    """Enrolments in another thread, one after another; the names of those that were committed."""
    names: list[str] = []
    stop = threading.Event()

    def enrol() -> None:
        with closing(open_registry(state)) as registry:
            while not stop.is_set():
                name = f"new-{len(names)}"
                registry.redeem_token(registry.create_token(), name, PROFILE)
                names.append(name)

    thread = threading.Thread(target=enrol)
    thread.start()
    yield names
    stop.set()
    thread.join()


def test_a_backup_under_writes_is_of_one_moment(
    state: Path, tmp_path: Path, enrolling: list[str]
) -> None:
    for turn in range(3):
        before = len(enrolling)
        back_up(state, tmp_path / f"b-{turn}")
        restore(tmp_path / f"b-{turn}", tmp_path / f"new-{turn}")
        with closing(open_registry(tmp_path / f"new-{turn}")) as registry:
            there = {device.id for device in registry.devices() if device.id.startswith("new-")}
            used = {token.used_by for token in registry.tokens() if token.used_by is not None}
        assert there == {f"new-{number}" for number in range(len(there))}  # none is missing
        assert len(there) >= before
        assert used == there | {"pi-0", "pi-1", "pi-2"}  # no half of an enrolment


def test_a_model_that_is_removed_meanwhile_is_in_no_backup_half(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry was copied with the model, then an operator removes it, files and all."""
    models = METADATA.tables["models"]

    def change(**values: Any) -> None:
        opened = open_registry(state)
        with closing(opened) as registry, registry._transactions.writing() as connection:
            connection.execute(models.update().values(**values))

    change(digest=digest_of(state / "models" / "digits" / "1"))
    turns = 0
    locked = ArtifactRepository.locked

    def removes(artifacts: ArtifactRepository) -> Any:
        nonlocal turns
        turns += 1
        if turns == 1:
            change(removed_at=1.0, active=False)
            for path in (state / "models").rglob("*.onnx"):
                path.unlink()
        return locked(artifacts)

    monkeypatch.setattr(ArtifactRepository, "locked", removes)
    saved = back_up(state, tmp_path / "b")
    assert turns == 2
    assert saved.incomplete == ()
    restore(tmp_path / "b", tmp_path / "new")
    with closing(open_registry(tmp_path / "new")) as registry:
        assert registry.catalogue.versions() == ()


def test_parts_of_the_state_on_another_disk_are_in_the_backup(state: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    parts = ("keys", "models", "tuf/targets")
    for part in parts:
        (state / part).rename(disk / part.replace("/", "-"))
        (state / part).symlink_to(disk / part.replace("/", "-"))
    assert back_up(state, tmp_path / "b").incomplete == ()
    restore(tmp_path / "b", tmp_path / "new")
    found = files(tmp_path / "new", *parts)
    assert found == {
        f"{part}/{name}": content
        for part in parts
        for name, content in files(disk / part.replace("/", "-"), ".").items()
    }
    assert len(found) > len(parts)
    assert not any(path.is_symlink() for path in (tmp_path / "new").rglob("*"))


def test_a_link_that_cannot_be_followed_is_told(state: Path, tmp_path: Path) -> None:
    (state / "models" / "gone").symlink_to(tmp_path / "unplugged")
    with pytest.raises(ConfigurationError, match="models/gone: a link that leads nowhere"):
        back_up(state, tmp_path / "b")
    (state / "models" / "gone").unlink()
    (state / "models" / "round").symlink_to(state / "models")
    with pytest.raises(ConfigurationError, match="models/round: a link to a folder that it lies"):
        back_up(state, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_the_server_signs_while_the_signed_files_are_copied(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gigabytes of them may go to a slow disk."""
    add, signed = BackupWriter.add, threading.Event()

    def sign() -> None:
        ArtifactRepository(state).refresh_timestamp()
        signed.set()

    def slow(writer: BackupWriter, name: str, path: Path) -> None:
        if name.startswith("tuf/targets/") and not signed.is_set():
            # in a thread, which a held lock would keep waiting
            threading.Thread(target=sign, daemon=True).start()
            assert signed.wait(10), "nothing is signed while a backup is made"
        add(writer, name, path)

    monkeypatch.setattr(BackupWriter, "add", slow)
    back_up(state, tmp_path / "b")
    assert signed.is_set()
    restore(tmp_path / "b", tmp_path / "new")
    assert [one for one in examine(tmp_path / "new") if one.verdict == "problem"] == []


def test_a_signed_file_that_is_withdrawn_meanwhile_begins_the_backup_again(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, turns = BackupWriter.add, 0

    def withdrawing(writer: BackupWriter, name: str, path: Path) -> None:
        nonlocal turns
        if name.startswith("tuf/targets/") and not turns:
            turns += 1
            ArtifactRepository(state).withdraw("digits", 1)
        add(writer, name, path)

    monkeypatch.setattr(BackupWriter, "add", withdrawing)
    back_up(state, tmp_path / "b")
    assert turns == 1
    restore(tmp_path / "b", tmp_path / "new")
    assert files(tmp_path / "new", "tuf/targets") == {}
    assert ArtifactRepository(tmp_path / "new").published() == {}


def test_files_that_are_damaged_on_the_server_itself_are_said(state: Path, tmp_path: Path) -> None:
    (state / "models" / "digits" / "1" / "model.json").unlink()
    assert back_up(state, tmp_path / "b").incomplete == ("digits/1",)


@pytest.mark.broker
@pytest.mark.deadline
def test_a_running_server_is_backed_up_and_goes_on_elsewhere(
    run_server: Callable[..., ServerRun], state: Path, tmp_path: Path
) -> None:
    server = run_server(state).wait_ready()

    def typed(name: str) -> str:
        return Reader(tmp_path).shell(UPKEEP.snippet(name).replace("./server", str(state)))

    said = typed("backup")
    assert "3 devices" in said
    assert "secret keys" in said
    server.end()
    said = typed("restore")
    assert "revoke them again" in said
    assert "The root has version 1. If a newer one was made since then" in said
    again = run_server(tmp_path / "new", ()).wait_ready()
    assert again.http == server.http  # devices find it
    assert again.call("GET", "/v2/models/digits").status == 200
    assert "pi-1" in splitedge("devices", "--state", str(tmp_path / "new"))
    assert "registry" in typed("doctor")


def splitedge(*words: str) -> str:
    """What `splitedge server WORDS` prints."""
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", "server", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_models_that_are_removed_all_the_time_are_an_error(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (state / "models" / "digits" / "1" / "model.json").unlink()
    locked = ArtifactRepository.locked
    numbers = iter(range(2, 100))

    def publishes(artifacts: ArtifactRepository) -> Any:
        with closing(open_registry(state)) as registry:
            registry.catalogue.publish("digits", next(numbers))
        return locked(artifacts)

    monkeypatch.setattr(ArtifactRepository, "locked", publishes)
    with pytest.raises(ConflictError, match="removed during 3 attempts"):
        back_up(state, tmp_path / "b")
    assert not (tmp_path / "b").exists()
