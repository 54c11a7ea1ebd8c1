"""The signed repository of bundles for devices: TUF metadata and targets as plain files.

    {state}/keys/{role}.pem                         see keys.py; the root's may be kept elsewhere
    {state}/tuf/metadata/{version}.{role}.json      and timestamp.json, the only one ever replaced
    {state}/tuf/targets/bundles/{model}/{version}/{variant}/{sha256}.{file}

Nothing is kept in memory. Each change takes the repository's lock, reads the files that the
timestamp names, adds files under new names, and replaces timestamp.json last. So a reader sees the
old state or the new one, even after a kill in between. Serve both folders as static files.

Whatever signs needs a clock that is right (clock.py), and raises ClockError where it is not.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final, Self

from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import (
    Root,
    Snapshot,
    Targets,
    Timestamp,
)

from edge_sdk.durable import make_folder, storage_error, sync_folder, write_atomic
from edge_sdk.errors import ConfigurationError
from edge_sdk.installation import BUILD_DATE
from edge_sdk.manifest import MANIFEST_NAME, ModelManifest
from server.errors import ArtifactError, BadRequestError, ClockError, NotReadyError
from server.signing.bundles import SignedBundle, read_bundle
from server.signing.clock import Clock, clock_problem, utc_now
from server.signing.keys import (
    ONLINE,
    KeyFolder,
    RootKeys,
    create_offline,
    keys_in,
    read_key,
)
from server.signing.metadata import MetadataFiles, State, is_due
from server.signing.roots import RootChain, enough_signers, first_root, next_root

RENEW_BEFORE: Final = timedelta(days=30)
# In the folder tuf/ of a state that was restored. Devices may have seen later versions than those
# of the backup, and refuse lower ones, so the next signature skips more than were ever signed.
RESTORED_NAME: Final = "restored"
SKIPPED_VERSIONS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class SignedFiles:
    """The folders of signed files in a state folder, for who only serves them."""

    metadata_folder: Path
    targets_folder: Path

    @classmethod
    def of(cls, state: Path) -> Self:
        """The folders of a state folder."""
        return cls(state / "tuf" / "metadata", state / "tuf" / "targets")


class ArtifactRepository:
    """The bundles of one server, signed.

    Args:
        folder: the server's state folder.
        passphrase: of the private keys; None for keys in the clear.
        root_keys: where the root keys of a new repository are written, and how many.
        clock: the time to sign by.
    Attributes:
        metadata: the files below the root.
    """

    def __init__(
        self,
        folder: Path,
        *,
        passphrase: bytes | None = None,
        root_keys: RootKeys | None = None,
        clock: Clock = utc_now,
    ) -> None:
        self.keys_folder = folder / "keys"
        signed = SignedFiles.of(folder)
        self.metadata_folder, self.targets_folder = signed.metadata_folder, signed.targets_folder
        self.keys = KeyFolder(self.keys_folder, passphrase)
        self.roots = RootChain(self.metadata_folder)
        self._root_keys = root_keys or RootKeys()
        self._clock = clock
        self.metadata = MetadataFiles(self.metadata_folder, self.keys, clock)

    def open_or_create(self) -> None:
        """Make keys, root and empty metadata where they are missing, then sign a fresh timestamp.

        Call it at the start and at least daily: with an expired timestamp devices take no update.

        Raises: ArtifactError if existing files cannot be read, or keys are missing; ClockError if
            the clock is wrong, which a later call mends; ConfigurationError if root keys are to lie
            elsewhere and do not; StorageError.
        """
        self._make_folders()
        with self.locked():
            self._finish_rotation()
            if self.roots.newest_version == 0:
                self._check_clock()
                self._create_root()
            self._check_root_keys()
            if not self.metadata.timestamp_path.exists():
                self._check_clock()
                self.metadata.create()
            self._check_keys()
        self.refresh_timestamp()

    @property
    def root_bytes(self) -> bytes:
        """The newest root.

        Raises: ArtifactError if there is none yet.
        """
        return self.roots.newest_bytes

    def root_for_enrolment(self, fingerprint: str = "") -> bytes:
        """The root that a new device gets, and trusts from then on.

        Args:
            fingerprint: of the device's token, which may be of an earlier root of the chain.
        Raises: ClockError while the clock is wrong; NotReadyError if the root has expired, and no
            device would take an update; ArtifactError.
        """
        self._check_clock()
        expires = self.roots.newest().signed.expires
        if self._clock() >= expires:
            raise NotReadyError(
                f"the server's root expired on {expires:%Y-%m-%d}, so no device can enrol; its"
                " operator runs `splitedge server root renew`, and the token stays valid"
            )
        return self.roots.with_fingerprint(fingerprint)

    @property
    def now(self) -> datetime:
        """The time by which it signs."""
        return self._clock()

    @property
    def last_signed(self) -> datetime | None:
        """When the newest timestamp was signed, by the clock then; None where there is none."""
        return self.metadata.last_signed

    @property
    def clock_problem(self) -> str | None:
        """The reason why the clock is not right enough to sign by; None where it is."""
        return clock_problem(self._clock(), self.last_signed)

    def expiries(self) -> dict[str, datetime]:
        """The end date of the newest metadata of each role.

        Raises: ArtifactError.
        """
        state = self._load()
        return {
            Root.type: self.roots.newest().signed.expires,
            Targets.type: state.targets.signed.expires,
            Snapshot.type: state.snapshot.signed.expires,
            Timestamp.type: state.timestamp.signed.expires,
        }

    def rotate(
        self,
        roles: Collection[str] = (),
        *,
        folders: Sequence[Path] = (),
        new_root_keys: RootKeys | None = None,
    ) -> int:
        """Sign the next root, with new keys for `roles`; what was signed is signed again.

        Without roles it is a renewal: the same keys for ten years from now. Devices follow, also
        those that are away. The keys that were replaced have no power over devices that followed.

        Args:
            roles: that get new keys.
            folders: where root keys lie that are not in the state.
            new_root_keys: place and number of the root keys from now on, where they get new ones.
        Returns: the version of the new root.
        Raises: ClockError; ArtifactError if there are too few root keys; ConfigurationError;
            StorageError. Then the old root goes on.
        """
        self._make_folders()
        with self.locked():
            self._finish_rotation()
            self._check_clock()
            newest = self.roots.newest()
            signers = self._root_signers(newest.signed, folders)
            version = newest.signed.version + 1
            new = new_root_keys or RootKeys()
            with self._new_root_signers(version, new) if Root.type in roles else _none() as fresh:
                online = {
                    role: self.keys.create(self.keys.next_path(role)).public_key
                    for role in ONLINE
                    if role in roles
                }
                following = next_root(
                    newest,
                    self._clock(),
                    root_keys=[signer.public_key for signer in fresh],
                    threshold=new.threshold,
                    online=online,
                )
                self.roots.append(following, [*signers, *fresh])
            self._finish_rotation()
            if fresh and new.folder is not None:
                self.keys.path(Root.type).unlink(missing_ok=True)
        if online:
            self.refresh_timestamp()
        return version

    def trust_clock(self) -> None:
        """Sign by a clock that is far ahead of the last signature: the operator knows better.

        Raises: ClockError if the clock is before the release; ArtifactError, also where no server
            has run yet: the first root may be meant to be made offline; StorageError.
        """
        if self._clock() < BUILD_DATE:
            self._check_clock()
        self._make_folders()
        with self.locked():
            if self.roots.newest_version == 0:
                raise ArtifactError(
                    "there is no root yet, and so no signature whose time could be wrong: start the"
                    " server, which makes one"
                )
            if not self.metadata.timestamp_path.exists():
                self.metadata.create()
            self._check_keys()
        self._refresh()

    def publish_bundles(self, model_folder: Path) -> tuple[str, ...]:
        """Add every bundle of the model export in `model_folder`, all of them or none.

        Publishing the same files again changes nothing.

        Returns: the bundles' names, `{model}/{version}/{variant}`.
        Raises: ManifestError for an incomplete export; BadRequestError for a published name with
            other content, because devices may be running it; ClockError; StorageError.
        """
        model = ModelManifest.load(model_folder)
        bundles = [
            read_bundle(model, model_folder / "bundles" / variant, variant)
            for variant in model.variants
        ]
        with self.locked():
            state = self._load()
            for bundle in bundles:
                self._check_unchanged(bundle, state.targets.signed)
            added = [
                bundle
                for bundle in bundles
                if f"bundles/{bundle.name}/{MANIFEST_NAME}" not in state.targets.signed.targets
            ]
            if added:
                self._check_clock()
            for bundle in added:
                self._write_files(bundle)
                state.targets.signed.targets.update({file.path: file for file in bundle.targets})
            if added:
                self.metadata.release(state, targets=True, snapshot=True)
        return tuple(bundle.name for bundle in bundles)

    def withdraw(self, model: str, version: int) -> int:
        """Take the bundles of one version out of the repository, and delete their files.

        Returns: the number of files that are no longer published.
        Raises: ArtifactError; ClockError; StorageError.
        """
        prefix = f"bundles/{model}/{version}/"
        with self.locked():
            state = self._load()
            published = state.targets.signed.targets
            gone = [path for path in published if path.startswith(prefix)]
            if gone:
                self._check_clock()
            for path in gone:
                del published[path]
            if gone:
                self.metadata.release(state, targets=True, snapshot=True)
        # only now: no signed metadata names them any more
        shutil.rmtree(self.targets_folder / prefix, ignore_errors=True)
        return len(gone)

    def refresh_timestamp(self) -> None:
        """Sign a new timestamp; also targets and snapshot, if they expire soon or their key is new.

        Raises: ClockError; ArtifactError; StorageError.
        """
        self._check_clock()
        self._refresh()

    def _refresh(self) -> None:
        soon = self._clock() + RENEW_BEFORE
        with self.locked():
            root = self.roots.newest().signed
            state = self._load()
            targets = is_due(root, state.targets, soon)
            snapshot = targets or is_due(root, state.snapshot, soon)
            restored = self._restored_path.exists()
            if restored:
                for metadata in (state.targets, state.snapshot, state.timestamp):
                    metadata.signed.version += SKIPPED_VERSIONS
            self.metadata.release(state, targets=targets or restored, snapshot=snapshot or restored)
            if restored:  # after a kill before this, they are skipped once more
                self._restored_path.unlink()

    def published(self) -> dict[Path, str]:
        """SHA-256 in hex of every published file, by the file.

        Raises: ArtifactError.
        """
        found = {}
        for name, target in self._load().targets.signed.targets.items():
            digest = target.hashes["sha256"]
            path = self.targets_folder / name
            found[path.with_name(f"{digest}.{path.name}")] = digest
        return found

    @property
    def _restored_path(self) -> Path:
        return self.targets_folder.parent / RESTORED_NAME

    def _check_clock(self) -> None:
        problem = self.clock_problem
        if problem is not None:
            raise ClockError(problem)

    def _make_folders(self) -> None:
        make_folder(self.keys_folder, mode=0o700)
        make_folder(self.metadata_folder)
        make_folder(self.targets_folder)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the repository's lock, against other threads and processes.

        Raises: StorageError if it cannot be made.
        """
        path = self.keys_folder / ".lock"
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as err:  # a card that fails becomes read-only
            raise storage_error(path, 0, err) from err
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _create_root(self) -> None:
        """Make keys and root, keys first: a kill never leaves a root without its keys."""
        for role in ONLINE:
            if not self.keys.path(role).exists():
                self.keys.create(self.keys.path(role))
        if self._root_keys.folder is None:
            path = self.keys.path(Root.type)
            self._append_first(
                [self.keys.signer(Root.type) if path.exists() else self.keys.create(path)]
            )
        else:
            with self._new_root_signers(1, self._root_keys) as signers:
                self._append_first(signers)

    def _append_first(self, signers: Sequence[CryptoSigner]) -> None:
        root = first_root(
            self._clock(),
            [signer.public_key for signer in signers],
            self._root_keys.threshold,
            {role: self.keys.signer(role).public_key for role in ONLINE},
        )
        self.roots.append(root, signers)

    @contextmanager
    def _new_root_signers(self, version: int, new: RootKeys) -> Iterator[list[CryptoSigner]]:
        """Write the root keys that the root `version` will name; offline ones that it does not
        name in the end are deleted.
        """
        if new.folder is None:
            yield [self.keys.create(self.keys.next_path(Root.type))]
            return
        if new.folder.resolve().is_relative_to(self.keys_folder.parent.resolve()):
            raise ConfigurationError(
                f"--root-key offline:{new.folder}: expected a folder outside the state folder"
            )
        paths = create_offline(new.folder, version, new.count, self.keys.passphrase)
        try:
            yield [read_key(path, self.keys.passphrase) for path in paths]
        except BaseException:
            if self.roots.newest_version < version:
                for path in paths:
                    path.unlink(missing_ok=True)
            raise

    def _root_signers(self, root: Root, folders: Sequence[Path]) -> list[CryptoSigner]:
        """Enough of the keys that sign for `root`, from the state and from `folders`."""
        found = [*keys_in(folders, self.keys.passphrase)]
        if self.keys.path(Root.type).exists():
            found.append(self.keys.signer(Root.type))
        return enough_signers(root, found)

    def _finish_rotation(self) -> None:
        """Put the next keys in place that the newest root names; remove others, of a killed run."""
        drafts = list(self.keys_folder.glob("*.next.pem"))
        if not drafts:
            return
        root = self.roots.newest().signed
        for path in drafts:
            role = path.name.removesuffix(".next.pem")
            if read_key(path, self.keys.passphrase).public_key.keyid in root.roles[role].keyids:
                path.replace(self.keys.path(role))
            else:
                path.unlink()
        sync_folder(self.keys_folder)

    def _check_root_keys(self) -> None:
        """Refuse to leave a root key in the state where it was to lie elsewhere."""
        folder, path = self._root_keys.folder, self.keys.path(Root.type)
        if folder is None or not path.exists():
            return
        if self.keys.signer(Root.type).public_key.keyid in self.roots.newest().signed.keys:
            raise ConfigurationError(
                f"--root-key offline:{folder}: the root key of this server lies in"
                f" {path}; move the fleet to new root keys first, by"
                f" `splitedge server root move-offline {folder}`"
            )

    def _check_keys(self) -> None:
        """Check the keys against the root, before every device refuses what they sign."""
        root = self.roots.newest().signed
        for role in ONLINE:
            if self.keys.signer(role).public_key.keyid not in root.roles[role].keyids:
                raise ArtifactError(
                    f"{self.keys.path(role)}: not the key that the root names for {role}; "
                    "restore it from a backup"
                )

    def _load(self) -> State:
        """The metadata of this moment.

        Raises: ClockError where nothing could be signed yet; ArtifactError.
        """
        if not self.metadata.timestamp_path.exists():
            self._check_clock()
        return self.metadata.load()

    def _check_unchanged(self, bundle: SignedBundle, published: Targets) -> None:
        for file in bundle.targets:
            known = published.targets.get(file.path)
            if known is not None and known != file:
                raise BadRequestError(
                    f"bundle {bundle.name}: already published with another "
                    f"{Path(file.path).name}; export it under a new version"
                )

    def _write_files(self, bundle: SignedBundle) -> None:
        folder = self.targets_folder / "bundles" / bundle.name
        make_folder(folder)
        for name, raw in bundle.files.items():
            write_atomic(folder / f"{hashlib.sha256(raw).hexdigest()}.{name}", raw)


@contextmanager
def _none() -> Iterator[list[CryptoSigner]]:
    """No new keys."""
    yield []
