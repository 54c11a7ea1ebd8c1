"""The signed repository of bundles for devices: TUF metadata and targets as plain files.

    {state}/keys/{role}.pem                         Ed25519, 0600; root.pem may be kept elsewhere
    {state}/tuf/metadata/{version}.{role}.json      and timestamp.json, the only one ever replaced
    {state}/tuf/targets/bundles/{model}/{version}/{variant}/{sha256}.{file}

Nothing is kept in memory. Each change takes the repository's lock, reads the files that the
timestamp names, adds files under new names, and replaces timestamp.json last. So a reader sees the
old state or the new one, even after a kill in between. Serve both folders as static files.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from securesystemslib.signer import CryptoSigner
from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import (
    Metadata,
    MetaFile,
    Root,
    Signed,
    Snapshot,
    TargetFile,
    Targets,
    Timestamp,
)

from edge_sdk.durable import make_folder, write_atomic
from edge_sdk.errors import ManifestError
from edge_sdk.manifest import MANIFEST_NAME, BundleManifest, ModelManifest, read_bytes
from server.errors import ArtifactError, BadRequestError

# Devices keep their bundle when metadata expires. So these limit how long a replayed old repository
# can hold an update back, not how long the server may be away.
ROOT_LIFE: Final = timedelta(days=3650)
TARGETS_LIFE: Final = timedelta(days=90)
SNAPSHOT_LIFE: Final = timedelta(days=90)
TIMESTAMP_LIFE: Final = timedelta(days=7)
RENEW_BEFORE: Final = timedelta(days=30)
# a device in the middle of a refresh may still ask for the versions that were current at its start
_KEPT_VERSIONS: Final = 10
_ONLINE: Final = (Timestamp.type, Snapshot.type, Targets.type)


class ArtifactRepository:
    """The bundles of one server, signed.

    Args:
        folder: the server's state folder.
    """

    def __init__(self, folder: Path) -> None:
        self.keys_folder = folder / "keys"
        self.metadata_folder = folder / "tuf" / "metadata"
        self.targets_folder = folder / "tuf" / "targets"

    def open_or_create(self) -> None:
        """Make keys, root and empty metadata where they are missing, then sign a fresh timestamp.

        Raises: ArtifactError if existing files cannot be read, or keys are missing; StorageError.
        """
        make_folder(self.keys_folder, mode=0o700)
        make_folder(self.metadata_folder)
        make_folder(self.targets_folder)
        with self._locked():
            if not self._root_path(1).exists():
                self._create_root()
            if not self._timestamp_path.exists():
                self._create_metadata()
            self._check_keys()
        self.refresh_timestamp()

    @property
    def root_bytes(self) -> bytes:
        """The newest root, which a device gets at enrolment and trusts from then on.

        Raises: ArtifactError if there is none yet.
        """
        version = 1
        while self._root_path(version + 1).exists():
            version += 1
        return self._read(self._root_path(version))

    def publish_bundles(self, model_folder: Path) -> tuple[str, ...]:
        """Add every bundle of the model export in `model_folder`, all of them or none.

        Publishing the same files again changes nothing.

        Returns: the bundles' names, `{model}/{version}/{variant}`.
        Raises: ManifestError for an incomplete export; BadRequestError for a published name with
            other content, because devices may be running it; StorageError.
        """
        model = ModelManifest.load(model_folder)
        bundles = [
            _read_bundle(model, model_folder / "bundles" / variant, variant)
            for variant in model.variants
        ]
        with self._locked():
            state = self._load()
            for bundle in bundles:
                self._check_unchanged(bundle, state.targets.signed)
            added = [
                bundle
                for bundle in bundles
                if f"bundles/{bundle.name}/{MANIFEST_NAME}" not in state.targets.signed.targets
            ]
            for bundle in added:
                self._write_files(bundle)
                state.targets.signed.targets.update({file.path: file for file in bundle.targets})
            if added:
                self._release(state, targets=True, snapshot=True)
        return tuple(bundle.name for bundle in bundles)

    def withdraw(self, model: str, version: int) -> int:
        """Take the bundles of one version out of the repository, and delete their files.

        Returns: the number of files that are no longer published.
        Raises: ArtifactError; StorageError.
        """
        prefix = f"bundles/{model}/{version}/"
        with self._locked():
            state = self._load()
            published = state.targets.signed.targets
            gone = [path for path in published if path.startswith(prefix)]
            for path in gone:
                del published[path]
            if gone:
                self._release(state, targets=True, snapshot=True)
        # only now: no signed metadata names them any more
        shutil.rmtree(self.targets_folder / prefix, ignore_errors=True)
        return len(gone)

    def refresh_timestamp(self) -> None:
        """Sign a new timestamp; also targets and snapshot, if they expire soon.

        Call it at the start and at least daily: with an expired timestamp devices take no update.

        Raises: ArtifactError; StorageError.
        """
        soon = datetime.now(UTC) + RENEW_BEFORE
        with self._locked():
            state = self._load()
            targets = state.targets.signed.is_expired(soon)
            snapshot = targets or state.snapshot.signed.is_expired(soon)
            self._release(state, targets=targets, snapshot=snapshot)

    @property
    def _timestamp_path(self) -> Path:
        return self.metadata_folder / "timestamp.json"

    def _root_path(self, version: int) -> Path:
        return self.metadata_folder / f"{version}.root.json"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the repository's lock, against other threads and processes."""
        handle = os.open(self.keys_folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _create_root(self) -> None:
        """Make keys and root, keys first: a kill never leaves a root without its keys."""
        root = Root(expires=datetime.now(UTC) + ROOT_LIFE, consistent_snapshot=True)
        for role in (Root.type, *_ONLINE):
            path = self.keys_folder / f"{role}.pem"
            if not path.exists():
                write_atomic(path, CryptoSigner.generate_ed25519().private_bytes, mode=0o600)
            root.add_key(self._signer(role).public_key, role)
        metadata = Metadata(root)
        metadata.sign(self._signer(Root.type))
        write_atomic(self._root_path(1), metadata.to_bytes())

    def _check_keys(self) -> None:
        """Check the keys against the root, before every device refuses what they sign."""
        root = self._parse_root()
        for role in _ONLINE:
            if self._signer(role).public_key.keyid not in root.roles[role].keyids:
                raise ArtifactError(
                    f"{self.keys_folder / role}.pem: not the key that the root names for {role}; "
                    "restore it from a backup"
                )

    def _parse_root(self) -> Root:
        try:
            return Metadata[Root].from_bytes(self.root_bytes).signed
        except RepositoryError as err:
            raise ArtifactError(f"{self.metadata_folder}: root: {err}; restore it") from err

    def _create_metadata(self) -> None:
        """Write the first versions, unless the repository has had later ones.

        Devices remember the versions that they saw, and would refuse lower ones.
        """
        later = [p.name for p in self.metadata_folder.glob("*.snapshot.json") if p.name[:2] != "1."]
        if later:
            raise ArtifactError(
                f"{self._timestamp_path}: not found, though {later[0]} is; restore it from a backup"
            )
        state = _State(Metadata(Timestamp()), Metadata(Snapshot()), Metadata(Targets()))
        self._write(state, targets=True, snapshot=True)

    def _load(self) -> _State:
        """Read the files that the timestamp names, not later ones of an unfinished change."""
        try:
            timestamp = Metadata[Timestamp].from_bytes(self._read(self._timestamp_path))
            version = timestamp.signed.snapshot_meta.version
            path = self.metadata_folder / f"{version}.snapshot.json"
            snapshot = Metadata[Snapshot].from_bytes(self._read(path))
            version = snapshot.signed.meta["targets.json"].version
            path = self.metadata_folder / f"{version}.targets.json"
            targets = Metadata[Targets].from_bytes(self._read(path))
        except RepositoryError as err:
            raise ArtifactError(
                f"{self.metadata_folder}: {err}; restore the folder from a backup"
            ) from err
        return _State(timestamp, snapshot, targets)

    def _release(self, state: _State, *, targets: bool, snapshot: bool) -> None:
        """Sign and write the next version of the changed files."""
        state.targets.signed.version += targets
        state.snapshot.signed.version += snapshot
        state.timestamp.signed.version += 1
        self._write(state, targets=targets, snapshot=snapshot)
        if snapshot:
            self._prune(state.snapshot.signed)
            self._prune(state.targets.signed)

    def _write(self, state: _State, *, targets: bool, snapshot: bool) -> None:
        """Write targets, snapshot, timestamp in this order: each names the one before by hash."""
        if targets:
            vouched = self._write_version(state.targets, TARGETS_LIFE)
            state.snapshot.signed.meta["targets.json"] = vouched
        if snapshot:
            vouched = self._write_version(state.snapshot, SNAPSHOT_LIFE)
            state.timestamp.signed.snapshot_meta = vouched
        write_atomic(self._timestamp_path, self._sign(state.timestamp, TIMESTAMP_LIFE))

    def _write_version(
        self, metadata: Metadata[Targets] | Metadata[Snapshot], life: timedelta
    ) -> MetaFile:
        raw = self._sign(metadata, life)
        signed = metadata.signed
        write_atomic(self.metadata_folder / f"{signed.version}.{signed.type}.json", raw)
        return MetaFile.from_data(signed.version, raw, ["sha256"])

    def _sign(
        self,
        metadata: Metadata[Targets] | Metadata[Snapshot] | Metadata[Timestamp],
        life: timedelta,
    ) -> bytes:
        metadata.signed.expires = datetime.now(UTC) + life
        metadata.sign(self._signer(metadata.signed.type))
        return metadata.to_bytes()

    def _prune(self, signed: Signed) -> None:
        for path in self.metadata_folder.glob(f"*.{signed.type}.json"):
            version = path.name.split(".")[0]
            if version.isdigit() and int(version) <= signed.version - _KEPT_VERSIONS:
                path.unlink(missing_ok=True)

    def _signer(self, role: str) -> CryptoSigner:
        path = self.keys_folder / f"{role}.pem"
        raw = self._read(path)
        try:
            return CryptoSigner(load_pem_private_key(raw, password=None))
        except (ValueError, TypeError, UnsupportedAlgorithm) as err:
            raise ArtifactError(f"{path}: not an Ed25519 key in PEM ({err}); restore it") from err

    def _check_unchanged(self, bundle: _Bundle, published: Targets) -> None:
        for file in bundle.targets:
            known = published.targets.get(file.path)
            if known is not None and known != file:
                raise BadRequestError(
                    f"bundle {bundle.name}: already published with another "
                    f"{Path(file.path).name}; export it under a new version"
                )

    def _write_files(self, bundle: _Bundle) -> None:
        folder = self.targets_folder / "bundles" / bundle.name
        make_folder(folder)
        for name, raw in bundle.files.items():
            write_atomic(folder / f"{hashlib.sha256(raw).hexdigest()}.{name}", raw)

    def _read(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as err:
            raise ArtifactError(
                f"{path}: cannot be read ({err.strerror}); restore it from a backup"
            ) from err


@dataclass(frozen=True, slots=True)
class _State:
    """The metadata of one moment, which a change edits and releases."""

    timestamp: Metadata[Timestamp]
    snapshot: Metadata[Snapshot]
    targets: Metadata[Targets]


@dataclass(frozen=True, slots=True)
class _Bundle:
    """One bundle of an export: its files, and the targets to sign."""

    name: str
    files: dict[str, bytes]
    targets: tuple[TargetFile, ...]


def _read_bundle(model: ModelManifest, folder: Path, variant: str) -> _Bundle:
    raw = read_bytes(folder / MANIFEST_NAME)
    manifest = BundleManifest.from_json(raw)
    expected = f"{model.name}/{model.version}/{variant}"
    if manifest.bundle != expected:
        raise ManifestError(
            f"{folder}: expected the bundle {expected}, its manifest says {manifest.bundle}; "
            "export again"
        )
    files = {name: read_bytes(folder / name) for name in manifest.files}
    files[MANIFEST_NAME] = raw
    targets = tuple(_target(manifest, name, data) for name, data in files.items())
    return _Bundle(manifest.bundle, files, targets)


def _target(manifest: BundleManifest, name: str, data: bytes) -> TargetFile:
    """The target of a file; the manifest's own also lists, signed, all files of the bundle."""
    path = f"bundles/{manifest.bundle}/{name}"
    target = TargetFile(len(data), {"sha256": hashlib.sha256(data).hexdigest()}, path)
    if name == MANIFEST_NAME:
        target.unrecognized_fields["custom"] = {"files": list(manifest.files)}
    return target
