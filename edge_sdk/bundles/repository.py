"""The server's signed repository: which files make up a bundle. The only importer of tuf.

TUF names the files of a bundle, their lengths and hashes, and refuses metadata that is forged, old
or mixed. Its errors leave this module as ours: UpdateRefusedError for what the server signed or
did not sign, LinkError where it is away or has no fresh metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from tuf.api.exceptions import (
    DownloadError,
    DownloadHTTPError,
    DownloadLengthMismatchError,
    ExpiredMetadataError,
    RepositoryError,
    UnsignedMetadataError,
)
from tuf.api.metadata import TargetFile
from tuf.ngclient import FetcherInterface, Updater

from edge_sdk.bundles.download import ServerClient, StatusError
from edge_sdk.bundles.store import BundleRecord, FileRecord
from edge_sdk.durable import sync_file, sync_folder
from edge_sdk.errors import LinkError, UpdateRefusedError
from edge_sdk.http import ResponseTooLargeError
from edge_sdk.identity import Identity
from edge_sdk.manifest import MANIFEST_NAME, check_file_name

MAX_FILES: Final = 8  # three graphs, a golden frame, a manifest, and room for a format to come
METADATA_BYTES: Final = 5_000_000  # tuf's own limit of its largest file


@dataclass(frozen=True, slots=True)
class PublishedBundle:
    """A bundle as signed: its files, and where each is fetched, by name."""

    record: BundleRecord
    urls: Mapping[str, str]


class SignedRepository:
    """The repository as this device knows it.

    Args:
        metadata: folder of the signed metadata; it exists.
        root: file of the root keys that enrolment left.
        now: time by which metadata expire, which is not always the system's.
    Raises: UpdateRefusedError, LinkError; OSError if metadata cannot be written.
    """

    def __init__(
        self, client: ServerClient, identity: Identity, metadata: Path, root: Path, now: datetime
    ) -> None:
        self._identity = identity
        for left in metadata.glob("tmp*"):  # tuf's, of an update that was killed
            left.unlink(missing_ok=True)
        with _our_errors():
            self._updater = Updater(
                str(metadata),
                identity.url("tuf/metadata/"),
                fetcher=_Fetcher(client),
                bootstrap=_read_root(root),
            )
            # private there, and tuf is pinned
            self._updater._trusted_set.reference_time = now  # noqa: SLF001
            self._refresh()
        # tuf renames without syncing; what it remembers is what protects against old metadata
        for path in metadata.glob("*.json"):
            sync_file(path)
        sync_folder(metadata)

    def _refresh(self) -> None:
        try:
            self._updater.refresh()
        except UnsignedMetadataError as err:
            known = self._updater._trusted_set.root.version  # noqa: SLF001 - private there
            raise UpdateRefusedError(
                f"signed metadata: not signed by the keys of root version {known}, the newest that"
                f" this device knows ({err}); if the server was restored from a backup with an"
                " older root, restore a newer backup, or enrol this device again"
            ) from err

    def bundle(self, name: str) -> PublishedBundle:
        """The signed metadata of a bundle.

        Raises: UpdateRefusedError if it is not published, or not as a bundle must be; LinkError.
        """
        with _our_errors():
            manifest = self._target(name, MANIFEST_NAME)
            targets = {MANIFEST_NAME: manifest}
            for file in _listed(manifest, name):
                targets[check_file_name(file)] = self._target(name, file)
        files = {file: FileRecord(t.hashes["sha256"], t.length) for file, t in targets.items()}
        base = self._identity.url(f"tuf/targets/bundles/{name}/")
        urls = {file: f"{base}{record.sha256}.{file}" for file, record in files.items()}
        return PublishedBundle(BundleRecord(name, files), urls)

    def _target(self, bundle: str, name: str) -> TargetFile:
        target = self._updater.get_targetinfo(f"bundles/{bundle}/{name}")
        if target is None or "sha256" not in target.hashes:
            raise UpdateRefusedError(f"{bundle}: {name} is not published (signed) by this server")
        return target


class _Fetcher(FetcherInterface):
    """Brings tuf its metadata."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client

    def download_bytes(self, url: str, max_length: int) -> bytes:
        """Download into memory, not into a temporary file: that folder may be full."""
        try:
            return self._client.read(url, max_length)
        except StatusError as err:
            raise DownloadHTTPError(str(err), err.status) from err
        except ResponseTooLargeError as err:
            raise DownloadLengthMismatchError(str(err)) from err
        except LinkError as err:
            raise DownloadError(str(err)) from err

    def _fetch(self, url: str) -> Iterator[bytes]:
        yield self.download_bytes(url, METADATA_BYTES)


@contextmanager
def _our_errors() -> Iterator[None]:
    try:
        yield
    except ExpiredMetadataError as err:
        raise LinkError(
            f"no fresh metadata: {err}; check the server and this device's clock"
        ) from err
    except RepositoryError as err:
        raise UpdateRefusedError(f"signed metadata: {err}") from err
    except DownloadHTTPError as err:
        raise StatusError(str(err), err.status_code) from err
    except DownloadLengthMismatchError as err:
        raise UpdateRefusedError(str(err)) from err
    except DownloadError as err:
        raise LinkError(str(err)) from err


def _listed(manifest: TargetFile, bundle: str) -> list[str]:
    """The names of the bundle's other files, as signed with its manifest."""
    custom = manifest.custom
    names = custom.get("files") if isinstance(custom, dict) else None
    if not isinstance(names, list) or not 0 < len(names) < MAX_FILES:
        raise UpdateRefusedError(f"{bundle}: the signed metadata does not list its files")
    if not all(isinstance(name, str) for name in names):
        raise UpdateRefusedError(f"{bundle}: the signed metadata lists files without names")
    return names


def _read_root(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise UpdateRefusedError(
            f"{path}: cannot be read ({err.strerror}); enrol again to get the server's root"
        ) from err
