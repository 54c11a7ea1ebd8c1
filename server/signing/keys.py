"""Private keys at rest: Ed25519 in PKCS#8 PEM files for their owner only, encrypted if wanted.

{state}/keys/{role}.pem         the key of a role: root, timestamp, snapshot, targets
{state}/keys/{role}.next.pem    the next key of a role, while a rotation is under way
{DIR}/root-v{version}-{n}.pem   root keys that are kept elsewhere, by the root that names them
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Root, Snapshot, Targets, Timestamp

from edge_sdk.durable import make_folder, write_atomic
from edge_sdk.errors import ConfigurationError
from server.errors import ArtifactError

ONLINE: Final = (Timestamp.type, Snapshot.type, Targets.type)
ROLES: Final = (Root.type, *ONLINE)
OFFLINE: Final = "offline:"
KEYS_MAX: Final = 16
# PKCS#8, as cryptography writes it, tries a passphrase in 0.3 ms: only a long one withstands that.
PASSPHRASE_MIN: Final = 20

_ENCRYPTED: Final = b"-----BEGIN ENCRYPTED PRIVATE KEY-----"


@dataclass(frozen=True, slots=True)
class RootKeys:
    """Place and number of root keys.

    Attributes:
        folder: kept apart from the state; None keeps the one key with the others.
        count: how many keys there are.
        threshold: how many of them must sign a root.
    """

    folder: Path | None = None
    count: int = 1
    threshold: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.threshold <= self.count <= KEYS_MAX:
            raise ConfigurationError(
                f"root keys: expected 1 <= --root-threshold <= --root-keys <= {KEYS_MAX}, got"
                f" {self.threshold} of {self.count}"
            )
        if self.folder is None and self.count > 1:
            raise ConfigurationError(
                f"root keys: {self.count} keys in one folder protect no better than one; give"
                " --root-key offline:DIR, and keep each key in another place afterwards"
            )

    @classmethod
    def parse(cls, text: str | None, count: int = 1, threshold: int = 1) -> RootKeys:
        """Read the option `--root-key`: nothing, or `offline:DIR`.

        Raises: ConfigurationError.
        """
        folder = text.removeprefix(OFFLINE) if text and text.startswith(OFFLINE) else ""
        if text is not None and not folder:
            raise ConfigurationError(f"--root-key: expected offline:DIR, got {text}")
        return cls(Path(folder) if folder else None, count, threshold)


class KeyFolder:
    """The keys of the roles in the state folder.

    Args:
        passphrase: of encrypted keys; new keys are encrypted with it. None for keys in the clear.
    """

    def __init__(self, folder: Path, passphrase: bytes | None = None) -> None:
        self.folder = folder
        self.passphrase = passphrase

    def path(self, role: str) -> Path:
        """The file of a role's key."""
        return self.folder / f"{role}.pem"

    def next_path(self, role: str) -> Path:
        """The file of a role's next key."""
        return self.folder / f"{role}.next.pem"

    def signer(self, role: str) -> CryptoSigner:
        """The key of a role.

        Raises: ArtifactError if it is missing or damaged, or the passphrase does not open it.
        """
        return read_key(self.path(role), self.passphrase)

    def create(self, path: Path) -> CryptoSigner:
        """Write a new key to `path`.

        Raises: StorageError.
        """
        signer = CryptoSigner.generate_ed25519()
        write_key(path, signer, self.passphrase)
        return signer

    def in_the_clear(self) -> list[Path]:
        """The files of keys that are not encrypted."""
        return [path for path in sorted(self.folder.glob("*.pem")) if not is_encrypted(path)]


def read_key(path: Path, passphrase: bytes | None) -> CryptoSigner:
    """Read a key; one in the clear needs no passphrase and takes any.

    Raises: ArtifactError.
    """
    try:
        raw = path.read_bytes()
    except OSError as err:
        raise ArtifactError(
            f"{path}: cannot be read ({err.strerror}); restore it from a backup"
        ) from err
    encrypted = _ENCRYPTED in raw
    if encrypted and passphrase is None:
        raise ArtifactError(
            f"{path}: the key is encrypted; give --key-passphrase-file, or set"
            " SPLITEDGE_KEY_PASSPHRASE_FILE"
        )
    try:
        return CryptoSigner(load_pem_private_key(raw, passphrase if encrypted else None))
    except (ValueError, TypeError, UnsupportedAlgorithm) as err:
        if encrypted:
            raise ArtifactError(
                f"{path}: the passphrase does not open this key; give the file of the one that it"
                " was encrypted with"
            ) from err
        raise ArtifactError(f"{path}: not an Ed25519 key in PEM ({err}); restore it") from err


def write_key(path: Path, signer: CryptoSigner, passphrase: bytes | None) -> None:
    """Write a key for its owner only, encrypted where there is a passphrase.

    Raises: StorageError.
    """
    raw = signer.private_bytes
    if passphrase is not None:
        raw = load_pem_private_key(raw, None).private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(passphrase)
        )
    write_atomic(path, raw, mode=0o600)


def is_encrypted(path: Path) -> bool:
    """Whether the key in a file is encrypted; False for a file that cannot be read."""
    try:
        return _ENCRYPTED in path.read_bytes()
    except OSError:
        return False


def read_passphrase(file: Path | None) -> bytes | None:
    """The passphrase in a file of one line; None where there is no file.

    Raises: ConfigurationError.
    """
    if file is None:
        return None
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as err:
        raise ConfigurationError(f"{file}: not found; give the file of the passphrase") from err
    except OSError as err:
        raise ConfigurationError(f"{file}: cannot be read ({err.strerror})") from err
    except UnicodeDecodeError as err:
        raise ConfigurationError(f"{file}: expected a passphrase in UTF-8 ({err.reason})") from err
    if len(lines) != 1 or len(lines[0]) < PASSPHRASE_MIN:
        raise ConfigurationError(
            f"{file}: expected one line with a passphrase of at least {PASSPHRASE_MIN} characters;"
            " `openssl rand -base64 32` makes a good one"
        )
    return lines[0].encode()


def create_offline(folder: Path, version: int, count: int, passphrase: bytes | None) -> list[Path]:
    """Write new root keys to a folder outside the state.

    Args:
        version: of the root that will name them.
    Raises: ConfigurationError if there are such keys already, of another server maybe;
        StorageError.
    """
    make_folder(folder, mode=0o700)
    paths = [folder / f"root-v{version}-{number}.pem" for number in range(1, count + 1)]
    there = [path for path in paths if path.exists()]
    if there:
        raise ConfigurationError(
            f"{there[0]}: exists already, and may be the root key of another server; give each"
            " server a folder of its own by --root-key offline:DIR, or remove the file if no"
            " server's root was ever made with it"
        )
    try:
        for path in paths:
            write_key(path, CryptoSigner.generate_ed25519(), passphrase)
    except BaseException:
        for path in paths:
            path.unlink(missing_ok=True)
        raise
    return paths


def keys_in(folders: Iterable[Path], passphrase: bytes | None) -> Iterator[CryptoSigner]:
    """The keys of every PEM file in some folders.

    Raises: ConfigurationError for a folder that is not there; ArtifactError.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ConfigurationError(
                f"--root-key offline:{folder}: not a folder; connect the medium with the root keys"
            )
        for path in sorted(folder.glob("*.pem")):
            yield read_key(path, passphrase)


def encrypt_keys(folders: Iterable[Path], passphrase: bytes, old: bytes | None) -> list[Path]:
    """Encrypt every key in some folders with a passphrase, whichever it has now.

    All are read before the first is written. After a kill in between, running it again goes on.

    Args:
        old: the passphrase of keys that are encrypted already.
    Returns: the files that were written.
    Raises: ArtifactError; ConfigurationError for a folder that is not there; StorageError.
    """
    found = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigurationError(f"{folder}: not a folder with keys")
        for path in sorted(folder.glob("*.pem")):
            found[path] = _read_with_either(path, passphrase, old)
    for path, signer in found.items():
        write_key(path, signer, passphrase)
    return list(found)


def _read_with_either(path: Path, new: bytes, old: bytes | None) -> CryptoSigner:
    try:
        return read_key(path, new)
    except ArtifactError as err:
        if not is_encrypted(path):
            raise
        if old is None:
            raise ArtifactError(
                f"{path}: encrypted with another passphrase already; give the file of that one by"
                " --old-passphrase-file"
            ) from err
    try:
        return read_key(path, old)
    except ArtifactError as err:
        raise ArtifactError(
            f"{path}: neither the passphrase of --key-passphrase-file nor that of"
            " --old-passphrase-file opens this key"
        ) from err
