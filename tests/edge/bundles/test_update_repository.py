"""The signed repository on the server: keys, publishing, re-signing, kills between writes."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata, Root, Snapshot, Targets, Timestamp

from edge_sdk.bundles.update import update
from edge_sdk.errors import ManifestError
from server.errors import ArtifactError, BadRequestError
from server.signing import artifacts
from server.signing.artifacts import ArtifactRepository
from tests.edge.bundles.kill_at import KILL_AT

if TYPE_CHECKING:
    from tests.edge.bundles.depot import Depot, Export


@pytest.fixture
def repository(tmp_path: Path) -> ArtifactRepository:
    repository = ArtifactRepository(tmp_path / "repository")
    repository.open_or_create()
    return repository


def read(repository: ArtifactRepository) -> tuple[Timestamp, Snapshot, Targets]:
    """A device's view: tuf itself checks each signature against the root."""
    folder = repository.metadata_folder
    root = Metadata[Root].from_bytes(repository.root_bytes)
    root.signed.verify_delegate("root", root.signed_bytes, root.signatures)
    timestamp = Metadata[Timestamp].from_file(str(folder / "timestamp.json"))
    version = timestamp.signed.snapshot_meta.version
    raw = (folder / f"{version}.snapshot.json").read_bytes()
    timestamp.signed.snapshot_meta.verify_length_and_hashes(raw)
    snapshot = Metadata[Snapshot].from_bytes(raw)
    version = snapshot.signed.meta["targets.json"].version
    raw = (folder / f"{version}.targets.json").read_bytes()
    snapshot.signed.meta["targets.json"].verify_length_and_hashes(raw)
    targets = Metadata[Targets].from_bytes(raw)
    check = root.signed.verify_delegate
    check("timestamp", timestamp.signed_bytes, timestamp.signatures)
    check("snapshot", snapshot.signed_bytes, snapshot.signatures)
    check("targets", targets.signed_bytes, targets.signatures)
    for path, target in targets.signed.targets.items():
        place, _, name = path.rpartition("/")
        file = repository.targets_folder / place / f"{target.hashes['sha256']}.{name}"
        target.verify_length_and_hashes(file.read_bytes())
    return timestamp.signed, snapshot.signed, targets.signed


def test_new_repository_has_four_private_keys_and_empty_targets(
    repository: ArtifactRepository,
) -> None:
    keys = sorted(repository.keys_folder.glob("*.pem"))
    assert [key.stem for key in keys] == ["root", "snapshot", "targets", "timestamp"]
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
    assert stat.S_IMODE(repository.keys_folder.stat().st_mode) == 0o700
    assert read(repository)[2].targets == {}


def test_opening_again_keeps_keys_and_bundles(
    repository: ArtifactRepository, export: Export
) -> None:
    repository.publish_bundles(export.write(1))
    root = repository.root_bytes
    before = read(repository)
    repository.open_or_create()
    after = read(repository)
    assert repository.root_bytes == root
    assert after[2].targets == before[2].targets
    assert after[0].version == before[0].version + 1  # start signs a fresh timestamp


def test_every_file_is_a_target_and_the_manifest_lists_the_others(
    repository: ArtifactRepository, export: Export
) -> None:
    folder = export.write(1)
    repository.publish_bundles(folder)
    targets = read(repository)[2].targets
    place = "bundles/tiny/1/d2"
    assert set(targets) == {f"{place}/{n}" for n in ("manifest.json", "exit.onnx", "golden.bin")}
    assert targets[f"{place}/manifest.json"].custom == {"files": ["exit.onnx", "golden.bin"]}
    size = (folder / "bundles" / "d2" / "exit.onnx").stat().st_size
    assert targets[f"{place}/exit.onnx"].length == size


def test_everything_but_the_root_is_signed_without_the_root_key(
    repository: ArtifactRepository, export: Export, tmp_path: Path
) -> None:
    (repository.keys_folder / "root.pem").rename(tmp_path / "root.pem")
    repository.open_or_create()
    repository.publish_bundles(export.write(1))
    repository.refresh_timestamp()
    assert len(read(repository)[2].targets) == 3


def test_publishing_the_same_again_changes_nothing_and_other_content_is_refused(
    repository: ArtifactRepository, export: Export, tmp_path: Path
) -> None:
    folder = export.write(1)
    repository.publish_bundles(folder)
    before = read(repository)
    assert repository.publish_bundles(folder) == ("tiny/1/d2",)
    assert read(repository)[1].version == before[1].version
    (folder / "bundles" / "d2" / "golden.bin").write_bytes(b"another")
    with pytest.raises(BadRequestError, match=r"another golden\.bin; export it under a new"):
        repository.publish_bundles(folder)
    assert read(repository)[2].targets == before[2].targets


def test_export_that_is_not_whole_publishes_nothing(
    repository: ArtifactRepository, export: Export
) -> None:
    folder = export.write(1)
    (folder / "bundles" / "d2" / "exit.onnx").unlink()
    with pytest.raises(ManifestError, match=r"exit\.onnx"):
        repository.publish_bundles(folder)
    assert read(repository)[2].targets == {}


def test_bundle_under_another_name_than_its_place_is_refused(
    repository: ArtifactRepository, export: Export
) -> None:
    folder = export.write(1)
    moved = shutil.copytree(folder / "bundles" / "d2", folder / "bundles" / "d1")
    shutil.rmtree(folder / "bundles" / "d2")
    model = folder / "model.json"
    model.write_text(model.read_text().replace('"d2"', '"d1"'))
    assert moved.exists()
    with pytest.raises(ManifestError, match="expected the bundle tiny/1/d1"):
        repository.publish_bundles(folder)


def test_refresh_renews_the_timestamp_only_until_the_rest_is_near_its_end(
    repository: ArtifactRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = read(repository)
    repository.refresh_timestamp()
    second = read(repository)
    versions = [(old.version, new.version) for old, new in zip(first, second, strict=True)]
    assert versions == [(2, 3), (1, 1), (1, 1)]
    assert second[0].expires > datetime.now(UTC) + timedelta(days=6)
    # as if the 90 days were all but 30 over
    monkeypatch.setattr(artifacts, "RENEW_BEFORE", timedelta(days=91))
    repository.refresh_timestamp()
    third = read(repository)
    assert [signed.version for signed in third] == [4, 2, 2]


def test_old_metadata_is_pruned_but_not_what_a_device_may_be_reading(
    repository: ArtifactRepository, export: Export
) -> None:
    for version in range(1, 14):
        repository.publish_bundles(export.write(version))
    kept = sorted(int(p.name.split(".")[0]) for p in repository.metadata_folder.glob("*.targets*"))
    assert kept == list(range(5, 15))
    assert len(read(repository)[2].targets) == 3 * 13


def test_threads_publish_side_by_side(repository: ArtifactRepository, export: Export) -> None:
    folders = [export.write(version) for version in range(1, 7)]
    threads = [
        threading.Thread(target=repository.publish_bundles, args=(f,), daemon=True) for f in folders
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read(repository)[2].targets) == 3 * 6


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda r: (r.keys_folder / "targets.pem").unlink(), "restore it from a backup"),
        (lambda r: (r.keys_folder / "targets.pem").write_bytes(b"x"), "not an Ed25519 key"),
        (
            lambda r: (r.keys_folder / "targets.pem").write_bytes(
                (r.keys_folder / "root.pem").read_bytes()
            ),
            "not the key that the root names",
        ),
        (lambda r: (r.metadata_folder / "timestamp.json").write_bytes(b"{"), "backup"),
    ],
)
def test_damaged_repository_says_what_to_restore(
    repository: ArtifactRepository, spoil: Callable[[ArtifactRepository], object], why: str
) -> None:
    spoil(repository)
    with pytest.raises(ArtifactError, match=why):
        repository.open_or_create()


def test_lost_timestamp_does_not_start_the_repository_over(
    repository: ArtifactRepository, export: Export
) -> None:
    """Devices would refuse version 1 after version 2, for ever."""
    repository.publish_bundles(export.write(1))
    (repository.metadata_folder / "timestamp.json").unlink()
    with pytest.raises(ArtifactError, match=r"2\.snapshot\.json"):
        repository.open_or_create()


# Does the same again and again in forked children, each killed one file operation later than the
# one before, on what that one left; prints the wait statuses, the last of them 0.
KILLED = (
    KILL_AT
    + """
from pathlib import Path
from server.signing.artifacts import ArtifactRepository

TOUCHES = {"open", "os.mkdir", "os.rename", "os.remove", "fcntl.flock"}
folder, export = sys.argv[1:]
repository = ArtifactRepository(Path(folder))

status = 9
number = 0
while status == 9:
    number += 1
    child = os.fork()
    if child == 0:
        kill_at(number)
        repository.publish_bundles(Path(export)) if export else repository.open_or_create()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print(status, flush=True)
    sys.stdin.readline()
"""
)


def kills(repository: ArtifactRepository, export: Path | None) -> Iterator[int]:
    """The wait status of each child, before the next one starts."""
    folder = repository.keys_folder.parent
    command = [sys.executable, "-P", "-c", KILLED, str(folder), str(export or "")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            yield int(line)
            process.stdin.write("go on\n")
            process.stdin.flush()


def test_server_killed_while_publishing_leaves_the_old_or_the_new(
    repository: ArtifactRepository, export: Export
) -> None:
    """FAULTS row 20: killed again and again, each time one file operation later."""
    repository.publish_bundles(export.write(1))
    counts = set()
    statuses = []
    for status in kills(repository, export.write(2)):
        statuses.append(status)
        counts.add(len(read(repository)[2].targets))
    assert statuses.pop() == 0
    assert set(statuses) == {9}
    assert len(statuses) > 15
    assert counts == {3, 6}


def test_server_killed_while_creating_its_keys_comes_up_the_next_time(tmp_path: Path) -> None:
    repository = ArtifactRepository(tmp_path / "repository")
    statuses = list(kills(repository, None))
    assert statuses.pop() == 0
    assert set(statuses) == {9}
    assert len(statuses) >= 10
    assert read(repository)[2].targets == {}


def test_device_follows_a_new_root_signed_by_the_old(
    depot: Depot, export: Export, state: Path
) -> None:
    """The steps of the root key's holder when the timestamp's key has leaked."""
    assert update(state).status == "unchanged"
    repository = depot.repository
    root = Metadata[Root].from_bytes(repository.root_bytes)
    leaked = root.signed.roles["timestamp"].keyids[0]
    root.signed.revoke_key(leaked, "timestamp")
    key = CryptoSigner.generate_ed25519()
    root.signed.add_key(key.public_key, "timestamp")
    root.signed.version = 2
    pem = (repository.keys_folder / "root.pem").read_bytes()
    root.sign(CryptoSigner(load_pem_private_key(pem, None)))
    root.to_file(str(repository.metadata_folder / "2.root.json"))
    assert update(state).status == "refused"  # the old key signs nothing any more
    (repository.keys_folder / "timestamp.pem").write_bytes(key.private_bytes)
    repository.open_or_create()
    repository.publish_bundles(export.write(1))
    assert update(state, "tiny/1/d2").status == "installed"
    assert repository.root_bytes == (repository.metadata_folder / "2.root.json").read_bytes()
