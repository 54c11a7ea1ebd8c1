"""Signed metadata that is forged, flipped, old, expired or mixed: refused, and the bundle stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from securesystemslib.signer import CryptoSigner
from tuf.api.exceptions import DownloadHTTPError, RepositoryError
from tuf.api.metadata import Metadata, Root, Snapshot, Targets, Timestamp
from tuf.ngclient import FetcherInterface, Updater

from edge_sdk.bundles.store import BundleStore
from edge_sdk.bundles.update import update
from server.signing.artifacts import ArtifactRepository

if TYPE_CHECKING:
    from tests.edge.bundles.depot import Depot, Export

NEW = "tiny/2/d2"


def assert_keeps_the_old(state: Path) -> None:
    assert BundleStore(state).active().manifest.bundle == "tiny/1/d2"


def signer(repository: ArtifactRepository, role: str) -> CryptoSigner:
    pem = (repository.keys_folder / f"{role}.pem").read_bytes()
    return CryptoSigner(load_pem_private_key(pem, None))


def signed(metadata: Metadata[Any], key: CryptoSigner) -> bytes:
    metadata.sign(key)
    return metadata.to_bytes()


class _Memory(FetcherInterface):
    """Serves metadata from a dictionary by file name."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def _fetch(self, url: str) -> Iterator[bytes]:
        name = url.rsplit("/", 1)[-1]
        if name not in self.files:
            raise DownloadHTTPError(name, 404)
        yield self.files[name]


def refresh(folder: Path, files: dict[str, bytes], bootstrap: bytes) -> Updater:
    for path in folder.glob("*.json"):
        path.unlink()
    for path in folder.glob("root_history/*"):
        path.unlink()
    fetcher = _Memory(files)
    updater = Updater(str(folder), "http://memory/", fetcher=fetcher, bootstrap=bootstrap)
    updater.refresh()
    return updater


def test_every_flipped_byte_of_every_signed_file_is_refused(
    depot: Depot, export: Export, tmp_path: Path, *, thorough: bool, reached: Callable[..., None]
) -> None:
    """FAULTS row 18: all 3,500 of them in `make faults`; else every seventh."""
    repository = depot.repository
    repository.publish_bundles(export.write(1))
    root = Metadata[Root].from_bytes(repository.root_bytes)
    root.signed.version = 2
    names = ("2.root.json", "timestamp.json", "2.snapshot.json", "2.targets.json")
    (repository.metadata_folder / names[0]).write_bytes(signed(root, signer(repository, "root")))
    good = {name: (repository.metadata_folder / name).read_bytes() for name in names}
    bootstrap = (repository.metadata_folder / "1.root.json").read_bytes()
    folder = tmp_path / "cache"
    folder.mkdir()
    assert refresh(folder, good, bootstrap).get_targetinfo("bundles/tiny/1/d2/manifest.json")

    accepted, tried = [], 0
    for name, raw in [("1.root.json", bootstrap), *good.items()]:
        for at in range(0, len(raw), 1 if thorough else 7):
            tried += 1
            bad = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
            try:
                if name == "1.root.json":
                    refresh(folder, good, bad)
                else:
                    refresh(folder, {**good, name: bad}, bootstrap)
            except RepositoryError:
                continue
            accepted.append((name, at))
    refused = tried - len(accepted)
    reached("flipped-bytes", f"{refused:,} of {tried:,} refused", refused=refused, tried=tried)
    assert accepted == []


@pytest.mark.parametrize("name", ["timestamp.json", "3.snapshot.json", "3.targets.json"])
def test_metadata_with_a_longer_life_is_refused(depot: Depot, installed: Path, name: str) -> None:
    """FAULTS row 18."""
    raw = (depot.repository.metadata_folder / name).read_bytes()
    depot.faults.replace[name] = raw.replace(b'"expires":"2', b'"expires":"3', 1)
    outcome = update(installed, NEW)
    assert outcome.status == "refused"
    assert "signed metadata" in outcome.reason
    assert_keeps_the_old(installed)


@pytest.mark.parametrize("name", ["timestamp.json", "3.snapshot.json", "3.targets.json"])
def test_metadata_signed_with_another_key_is_refused(
    depot: Depot, installed: Path, name: str
) -> None:
    """FAULTS row 18."""
    metadata: Metadata[Any] = Metadata.from_file(str(depot.repository.metadata_folder / name))
    depot.faults.replace[name] = signed(metadata, CryptoSigner.generate_ed25519())
    assert update(installed, NEW).status == "refused"
    assert_keeps_the_old(installed)


def test_unsigned_metadata_is_refused(depot: Depot, installed: Path) -> None:
    """FAULTS row 18."""
    metadata = Metadata[Timestamp].from_file(
        str(depot.repository.metadata_folder / "timestamp.json")
    )
    metadata.signatures.clear()
    depot.faults.replace["timestamp.json"] = metadata.to_bytes()
    assert update(installed, NEW).status == "refused"
    assert_keeps_the_old(installed)


def test_replayed_timestamp_is_refused(depot: Depot, installed: Path) -> None:
    """FAULTS row 19."""
    path = depot.repository.metadata_folder / "timestamp.json"
    old = path.read_bytes()
    depot.repository.refresh_timestamp()
    assert update(installed, "tiny/1/d2").status == "unchanged"
    depot.faults.replace["timestamp.json"] = old
    outcome = update(installed, NEW)
    assert outcome.status == "refused"
    assert "version" in outcome.reason
    assert_keeps_the_old(installed)


def test_snapshot_of_another_moment_is_refused(depot: Depot, installed: Path) -> None:
    """FAULTS row 19: mix and match: a new timestamp over the snapshot or the targets of before."""
    folder = depot.repository.metadata_folder
    for role in ("snapshot", "targets"):
        depot.faults.replace = {f"3.{role}.json": (folder / f"2.{role}.json").read_bytes()}
        assert update(installed, NEW).status == "refused"
        assert_keeps_the_old(installed)


def test_signed_timestamp_that_goes_back_to_an_old_snapshot_is_refused(
    depot: Depot, installed: Path
) -> None:
    """FAULTS row 19: a thief of the timestamp key alone can withhold updates, and nothing else."""
    assert update(installed, "tiny/1/d2").status == "unchanged"
    path = depot.repository.metadata_folder / "timestamp.json"
    metadata = Metadata[Timestamp].from_bytes(path.read_bytes())
    metadata.signed.version += 1
    metadata.signed.snapshot_meta.version = 2
    key = signer(depot.repository, "timestamp")
    depot.faults.replace["timestamp.json"] = signed(metadata, key)
    assert update(installed, NEW).status == "refused"
    assert_keeps_the_old(installed)


def test_expired_metadata_keeps_the_bundle_and_says_since_when(
    depot: Depot, installed: Path
) -> None:
    """FAULTS row 19."""
    fresh_at = update(installed, "tiny/1/d2").fresh_at
    path = depot.repository.metadata_folder / "timestamp.json"
    metadata = Metadata[Timestamp].from_bytes(path.read_bytes())
    metadata.signed.version += 1
    metadata.signed.expires = datetime.now(UTC) - timedelta(hours=1)
    key = signer(depot.repository, "timestamp")
    depot.faults.replace["timestamp.json"] = signed(metadata, key)

    outcome = update(installed, NEW)

    assert outcome.status == "unreachable"
    assert "expired" in outcome.reason
    assert fresh_at is not None
    assert outcome.fresh_at == fresh_at
    assert_keeps_the_old(installed)
    # the server signs again, past the version that was replayed, and all is well
    depot.faults.replace.clear()
    for _ in range(2):
        depot.repository.refresh_timestamp()
    assert update(installed, NEW).status == "installed"


@pytest.mark.parametrize("name", ["timestamp.json", "3.snapshot.json", "3.targets.json"])
def test_endless_metadata_is_refused_at_its_limit(depot: Depot, installed: Path, name: str) -> None:
    """FAULTS rows 19 and 28."""
    depot.faults.endless.add(name)
    outcome = update(installed, NEW)
    assert outcome.status == "refused"
    assert_keeps_the_old(installed)


@pytest.mark.parametrize(
    "names",
    [
        ["../../agent.json"],
        ["/etc/passwd"],
        ["a/b"],
        [".."],
        [],
        None,
        "exit.onnx",
        [1],
        ["x"] * 99,
    ],
)
def test_signed_list_of_files_that_leaves_its_folder_is_refused(
    depot: Depot, installed: Path, names: object
) -> None:
    """FAULTS row 28: even the holder of every key cannot write outside the slot."""

    def change(targets: Targets) -> None:
        manifest = targets.targets[f"bundles/{NEW}/manifest.json"]
        manifest.unrecognized_fields["custom"] = {"files": names}
        for name in names if isinstance(names, list) else ():
            targets.targets[f"bundles/{NEW}/{name}"] = manifest

    publish(depot.repository, change)
    before = tree(installed)
    assert update(installed, NEW).status == "refused"
    assert_keeps_the_old(installed)
    assert tree(installed) == before


def test_manifest_that_names_other_files_than_were_signed_is_refused(
    depot: Depot, export: Export, state: Path
) -> None:
    folder = export.write(1)
    depot.repository.publish_bundles(folder)

    def change(targets: Targets) -> None:
        manifest = targets.targets["bundles/tiny/1/d2/manifest.json"]
        manifest.unrecognized_fields["custom"] = {"files": ["golden.bin"]}

    publish(depot.repository, change)
    outcome = update(state, "tiny/1/d2")
    assert outcome.status == "refused"
    assert "exit.onnx" in outcome.reason


def publish(repository: ArtifactRepository, change: Callable[[Targets], None]) -> None:
    """Sign changed targets with the repository's own keys."""
    with repository.locked():
        state = repository.metadata.load()
        change(state.targets.signed)
        repository.metadata.release(state, targets=True, snapshot=True)


def tree(state: Path) -> set[str]:
    """The files on the device, except tuf's own metadata."""
    paths = (path.relative_to(state) for path in state.rglob("*"))
    return {str(path) for path in paths if path.parts[0] != "tuf"}


def test_snapshot_names_the_targets_by_hash(depot: Depot, export: Export) -> None:
    depot.repository.publish_bundles(export.write(1))
    folder = depot.repository.metadata_folder
    snapshot = Metadata[Snapshot].from_file(str(folder / "2.snapshot.json")).signed
    named = snapshot.meta["targets.json"]
    assert (named.version, named.length) == (2, (folder / "2.targets.json").stat().st_size)
