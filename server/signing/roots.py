"""The roots, which say whose signatures devices trust: a chain, each link signed by the one before.

    {state}/tuf/metadata/{version}.root.json

A device knows the root of its enrolment. It asks for the next versions one by one, and takes each
that enough keys of the root before it and enough of its own have signed. So every version is kept.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from securesystemslib.signer import CryptoSigner
from tuf.api.exceptions import RepositoryError, UnsignedMetadataError
from tuf.api.metadata import Key, Metadata, Root

from edge_sdk.durable import write_atomic
from server.errors import ArtifactError
from server.registry.credentials import FINGERPRINT_CHARACTERS

# Devices keep their bundle when metadata expires. So this limits how long a replayed old repository
# can hold an update back, not how long the server may be away.
ROOT_LIFE: Final = timedelta(days=3650)


class RootChain:
    """The versions of the root in the metadata folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, version: int) -> Path:
        """The file of a version."""
        return self._folder / f"{version}.root.json"

    @property
    def newest_version(self) -> int:
        """The newest version; 0 where there is none yet."""
        version = 0
        while self.path(version + 1).exists():
            version += 1
        return version

    @property
    def newest_bytes(self) -> bytes:
        """The newest root as it is served.

        Raises: ArtifactError if there is none yet.
        """
        return self._read(max(1, self.newest_version))

    def newest(self) -> Metadata[Root]:
        """The newest root.

        Raises: ArtifactError if there is none, or it is damaged.
        """
        try:
            return Metadata[Root].from_bytes(self.newest_bytes)
        except RepositoryError as err:
            raise ArtifactError(f"{self._folder}: root: {err}; restore it") from err

    def with_fingerprint(self, fingerprint: str) -> bytes:
        """The newest root, or the earlier one that a token was made for.

        A device checks what it is given against its token, and follows the chain from there.

        Args:
            fingerprint: of the token; empty where the device does not say it.
        Raises: ArtifactError.
        """
        newest = self.newest_version
        for version in range(newest, 0, -1) if fingerprint else ():
            raw = self._read(version)
            if hashlib.sha256(raw).hexdigest()[:FINGERPRINT_CHARACTERS] == fingerprint:
                return raw
        return self._read(max(1, newest))

    def append(self, root: Metadata[Root], signers: Iterable[CryptoSigner]) -> None:
        """Sign the next version and write it, if devices with the present one will take it.

        Raises: ArtifactError if the keys are not enough for either; StorageError.
        """
        root.signatures.clear()
        for signer in {one.public_key.keyid: one for one in signers}.values():
            root.sign(signer, append=True)
        version = root.signed.version
        judges = [root.signed]
        if version > 1:
            judges.append(self.newest().signed)
        for judge in judges:
            try:
                judge.verify_delegate(Root.type, root.signed_bytes, root.signatures)
            except UnsignedMetadataError as err:
                have = sum(keyid in judge.roles[Root.type].keyids for keyid in root.signatures)
                raise ArtifactError(_too_few(judge, have)) from err
        write_atomic(self.path(version), root.to_bytes())

    def _read(self, version: int) -> bytes:
        return read_signed(self.path(version))


def read_signed(path: Path) -> bytes:
    """The bytes of a signed file.

    Raises: ArtifactError saying what to restore.
    """
    try:
        return path.read_bytes()
    except OSError as err:
        raise ArtifactError(
            f"{path}: cannot be read ({err.strerror}); restore it from a backup"
        ) from err


def first_root(
    now: datetime, root_keys: Sequence[Key], threshold: int, online: Mapping[str, Key]
) -> Metadata[Root]:
    """Version 1, not signed yet.

    Args:
        online: the key of each other role.
    """
    root = Root(expires=now + ROOT_LIFE, consistent_snapshot=True)
    _name_keys(root, Root.type, root_keys, threshold)
    for role, key in online.items():
        _name_keys(root, role, [key], 1)
    return Metadata(root)


def next_root(
    newest: Metadata[Root],
    now: datetime,
    *,
    root_keys: Sequence[Key] = (),
    threshold: int = 1,
    online: Mapping[str, Key],
) -> Metadata[Root]:
    """The version after `newest`, not signed yet: valid for ten years from `now`.

    Args:
        root_keys, threshold: the next root keys; none keeps those of `newest`.
        online: the next key of each other role that gets a new one.
    """
    following = copy.deepcopy(newest)
    following.signatures.clear()
    root = following.signed
    root.version += 1
    root.expires = now + ROOT_LIFE
    if root_keys:
        _name_keys(root, Root.type, root_keys, threshold)
    for role, key in online.items():
        _name_keys(root, role, [key], 1)
    return following


def enough_signers(root: Root, keys: Iterable[CryptoSigner]) -> list[CryptoSigner]:
    """The keys among `keys` that `root` names for itself.

    Raises: ArtifactError if they are fewer than its threshold.
    """
    named = root.roles[Root.type]
    found = {one.public_key.keyid: one for one in keys if one.public_key.keyid in named.keyids}
    if len(found) < named.threshold:
        raise ArtifactError(_too_few(root, len(found)))
    return list(found.values())


def _name_keys(root: Root, role: str, keys: Sequence[Key], threshold: int) -> None:
    for keyid in list(root.roles[role].keyids):
        root.revoke_key(keyid, role)
    for key in keys:
        root.add_key(key, role)
    root.roles[role].threshold = threshold


def _too_few(root: Root, have: int) -> str:
    named = root.roles[Root.type]
    keyids = ", ".join(keyid[:8] for keyid in named.keyids)
    return (
        f"root version {root.version} asks for {named.threshold} of its {len(named.keyids)} root"
        f" keys ({keyids}), and {have} of them were found; give each folder that has some by"
        " --root-key offline:DIR; keys that are offline are replaced by `splitedge server root"
        " rotate --keys root`"
    )
