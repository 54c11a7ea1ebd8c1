"""Targets, snapshot and timestamp of the signed repository, as files that one folder holds."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from tuf.api.exceptions import RepositoryError, UnsignedMetadataError
from tuf.api.metadata import Metadata, MetaFile, Root, Signed, Snapshot, Targets, Timestamp

from edge_sdk.durable import write_atomic
from server.errors import ArtifactError
from server.signing.clock import Clock
from server.signing.keys import KeyFolder
from server.signing.roots import read_signed

# Devices keep their bundle when metadata expires. So these limit how long a replayed old repository
# can hold an update back, not how long the server may be away.
TARGETS_LIFE: Final = timedelta(days=90)
SNAPSHOT_LIFE: Final = timedelta(days=90)
TIMESTAMP_LIFE: Final = timedelta(days=7)
# a device in the middle of a refresh may still ask for the versions that were current at its start
_KEPT_VERSIONS: Final = 10


@dataclass(frozen=True, slots=True)
class State:
    """The metadata of one moment, which a change edits and releases."""

    timestamp: Metadata[Timestamp]
    snapshot: Metadata[Snapshot]
    targets: Metadata[Targets]


class MetadataFiles:
    """The metadata below the root, signed by the online keys.

    A change reads the files that the timestamp names, adds files under new names, and replaces the
    timestamp last: a reader sees the old state or the new one. Its caller holds the lock.

    Args:
        folder: of the files. keys: that sign. clock: the time to sign by.
    """

    def __init__(self, folder: Path, keys: KeyFolder, clock: Clock) -> None:
        self._folder = folder
        self._keys = keys
        self._clock = clock

    @property
    def timestamp_path(self) -> Path:
        """The one file that is ever replaced."""
        return self._folder / "timestamp.json"

    @property
    def last_signed(self) -> datetime | None:
        """When the newest timestamp was signed, by the clock then; None where there is none."""
        try:
            timestamp = Metadata[Timestamp].from_bytes(self.timestamp_path.read_bytes())
        except (OSError, RepositoryError):
            return None
        return timestamp.signed.expires - TIMESTAMP_LIFE

    def create(self) -> None:
        """Write the first versions, unless the repository has had later ones.

        Devices remember the versions that they saw, and would refuse lower ones.
        """
        later = [p.name for p in self._folder.glob("*.snapshot.json") if p.name[:2] != "1."]
        if later:
            raise ArtifactError(
                f"{self.timestamp_path}: not found, though {later[0]} is; restore it from a backup"
            )
        state = State(Metadata(Timestamp()), Metadata(Snapshot()), Metadata(Targets()))
        self._write(state, targets=True, snapshot=True)

    def load(self) -> State:
        """Read the files that the timestamp names, not later ones of an unfinished change.

        Raises: ArtifactError.
        """
        try:
            timestamp = Metadata[Timestamp].from_bytes(read_signed(self.timestamp_path))
            version = timestamp.signed.snapshot_meta.version
            path = self._folder / f"{version}.snapshot.json"
            snapshot = Metadata[Snapshot].from_bytes(read_signed(path))
            version = snapshot.signed.meta["targets.json"].version
            path = self._folder / f"{version}.targets.json"
            targets = Metadata[Targets].from_bytes(read_signed(path))
        except RepositoryError as err:
            raise ArtifactError(f"{self._folder}: {err}; restore the folder from a backup") from err
        return State(timestamp, snapshot, targets)

    def release(self, state: State, *, targets: bool, snapshot: bool) -> None:
        """Sign and write the next version of the changed files."""
        state.targets.signed.version += targets
        state.snapshot.signed.version += snapshot
        state.timestamp.signed.version += 1
        self._write(state, targets=targets, snapshot=snapshot)
        if snapshot:
            self._prune(state.snapshot.signed)
            self._prune(state.targets.signed)

    def _write(self, state: State, *, targets: bool, snapshot: bool) -> None:
        """Write targets, snapshot, timestamp in this order: each names the one before by hash."""
        if targets:
            vouched = self._write_version(state.targets, TARGETS_LIFE)
            state.snapshot.signed.meta["targets.json"] = vouched
        if snapshot:
            vouched = self._write_version(state.snapshot, SNAPSHOT_LIFE)
            state.timestamp.signed.snapshot_meta = vouched
        write_atomic(self.timestamp_path, self._sign(state.timestamp, TIMESTAMP_LIFE))

    def _write_version(
        self, metadata: Metadata[Targets] | Metadata[Snapshot], life: timedelta
    ) -> MetaFile:
        raw = self._sign(metadata, life)
        signed = metadata.signed
        write_atomic(self._folder / f"{signed.version}.{signed.type}.json", raw)
        return MetaFile.from_data(signed.version, raw, ["sha256"])

    def _sign(
        self,
        metadata: Metadata[Targets] | Metadata[Snapshot] | Metadata[Timestamp],
        life: timedelta,
    ) -> bytes:
        metadata.signed.expires = self._clock() + life
        metadata.sign(self._keys.signer(metadata.signed.type))
        return metadata.to_bytes()

    def _prune(self, signed: Signed) -> None:
        for path in self._folder.glob(f"*.{signed.type}.json"):
            version = path.name.split(".")[0]
            if version.isdigit() and int(version) <= signed.version - _KEPT_VERSIONS:
                path.unlink(missing_ok=True)


def is_due(root: Root, metadata: Metadata[Targets] | Metadata[Snapshot], soon: datetime) -> bool:
    """Whether metadata is to be signed again: it expires soon, or the root names another key."""
    if metadata.signed.is_expired(soon):
        return True
    try:
        root.verify_delegate(metadata.signed.type, metadata.signed_bytes, metadata.signatures)
    except UnsignedMetadataError:
        return True
    return False
