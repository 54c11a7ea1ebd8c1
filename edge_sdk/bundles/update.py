"""The updater: fetch a signed bundle, prove it, make it active. The only importer of tuf.

`python -P -m edge_sdk.bundles.update --state DIR [--bundle NAME]` prints one line, an
UpdateOutcome.

TUF decides what: it names the files of a bundle, their lengths and hashes, and refuses metadata
that is forged, old or mixed. This module fetches the files, resuming where it broke off, into the
inactive slot, has the bundle tried in a child process, and commits.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import shutil
import ssl
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final

import orjson
import urllib3
from tuf.api.exceptions import (
    DownloadError,
    DownloadHTTPError,
    DownloadLengthMismatchError,
    ExpiredMetadataError,
    RepositoryError,
)
from tuf.api.metadata import TargetFile
from tuf.ngclient import FetcherInterface, Updater

from edge_sdk.bundles.run_update import Status, UpdateOutcome
from edge_sdk.bundles.store import BundleRecord, BundleStore, FileRecord, Slot, file_damage
from edge_sdk.bundles.trial import run_trial
from edge_sdk.durable import (
    free_bytes,
    make_folder,
    no_space,
    storage_error,
    sync_file,
    sync_folder,
    write_atomic,
)
from edge_sdk.errors import (
    ConfigurationError,
    NoBundleError,
    SplitedgeError,
    StorageError,
    UpdateRefusedError,
)
from edge_sdk.identity import Identity
from edge_sdk.manifest import (
    MANIFEST_NAME,
    BundleManifest,
    check_bundle_name,
    check_file_name,
)
from edge_sdk.state import StateLock

CONNECT_S: Final = 5.0
READ_S: Final = 15.0
CHUNK_BYTES: Final = 65_536
ATTEMPTS: Final = 4  # per file and run; each goes on where the one before broke off
RESERVE_BYTES: Final = 262_144  # left to metadata, active.json and the agent's own files
ANSWER_BYTES: Final = 65_536
MAX_FILES: Final = 8  # three graphs, a golden frame, a manifest, and room for a format to come
# no copy of this module is older, so a clock that says so is wrong
EARLIEST: Final = datetime(2026, 1, 1, tzinfo=UTC)
_NO_CHECK_TIME: Final = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, which ssl does not name

logger = logging.getLogger(__name__)


def main() -> None:
    """Run one update and print what came of it."""
    parser = argparse.ArgumentParser(prog="python -m edge_sdk.bundles.update")
    parser.add_argument("--state", type=Path, required=True, help="the agent's state folder")
    parser.add_argument("--bundle", help="MODEL/VERSION/VARIANT; the assigned one when left out")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    outcome = update(arguments.state, arguments.bundle)
    sys.stdout.buffer.write(outcome.to_json())


def update(state: Path, bundle: str | None = None) -> UpdateOutcome:
    """Bring the device to `bundle`, or to the one the server assigns it; see `install.run_update`.

    Every failure that a disk, a link or a server can cause is an outcome, not an exception.
    """
    job = _Job(state, bundle)
    try:
        with StateLock(state, "update"):
            return job.run()
    except (DownloadError, RepositoryError) as err:
        return job.outcome(*_judge(err))
    except StorageError as err:
        return job.storage_outcome(err)
    except SplitedgeError as err:
        return job.outcome("refused", str(err))
    except OSError as err:  # tuf writes its own metadata
        return job.storage_outcome(storage_error(state / "tuf" / "metadata", RESERVE_BYTES, err))


class Server(FetcherInterface):
    """The server over HTTP: our credential, its pinned authority, no redirects, bounded waits."""

    def __init__(self, identity: Identity, *, check_dates: bool) -> None:
        """Connect lazily.

        Args:
            check_dates: False while our clock is plainly wrong; skips nothing but the dates, and
                only for a pinned authority.
        Raises: ConfigurationError if the authority's file cannot be used.
        """
        self._headers = {"Authorization": identity.authorization, "Accept-Encoding": "identity"}
        self._pool = urllib3.PoolManager(
            ssl_context=_tls(identity, check_dates=check_dates),
            timeout=urllib3.Timeout(connect=CONNECT_S, read=READ_S),
            retries=urllib3.Retry(2, redirect=0, status=0, backoff_factor=0.2),
        )
        self.date: datetime | None = None

    @contextlib.contextmanager
    def get(
        self, url: str, headers: Mapping[str, str] | None = None
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """The streamed response to one GET, whatever its status.

        Raises: DownloadError for whatever the network does, inside the block too.
        """
        try:
            # a redirect would carry the credential elsewhere
            response = self._pool.request(
                "GET",
                url,
                headers={**self._headers, **(headers or {})},
                preload_content=False,
                decode_content=False,  # what was signed is what must come
                redirect=False,
            )
        except urllib3.exceptions.HTTPError as err:
            raise DownloadError(f"{url}: {_cause(err)}") from err
        self.date = _date(response.headers.get("Date")) or self.date
        try:
            yield response
        except urllib3.exceptions.HTTPError as err:
            raise DownloadError(f"{url}: {_cause(err)}") from err
        finally:
            response.close()

    def download_bytes(self, url: str, max_length: int) -> bytes:
        """Like the base, but in memory: the system's folder for temporary files may be full."""
        chunks, length = [], 0
        for chunk in self.fetch(url):
            length += len(chunk)
            if length > max_length:
                raise DownloadLengthMismatchError(f"{url}: more than {max_length} bytes")
            chunks.append(chunk)
        return b"".join(chunks)

    def _fetch(self, url: str) -> Iterator[bytes]:
        with self.get(url) as response:
            if response.status != 200:
                raise DownloadHTTPError(f"{url}: HTTP {response.status}", response.status)
            yield from response.stream(CHUNK_BYTES)


def _judge(err: DownloadError | RepositoryError) -> tuple[Status, str]:
    """Whether the server is away or sent something to refuse, and why."""
    if isinstance(err, ExpiredMetadataError):
        return "unreachable", f"no fresh metadata: {err}; check the server and this device's clock"
    if isinstance(err, DownloadHTTPError) and err.status_code in (401, 403):
        return "refused", f"{err}: the server does not accept this device's credential; enrol again"
    if isinstance(err, RepositoryError):
        return "refused", f"signed metadata: {err}"
    if isinstance(err, DownloadLengthMismatchError):
        return "refused", str(err)
    return "unreachable", str(err)


class _Job:
    """One update: what is known so far, so that any failure can be told in full."""

    def __init__(self, state: Path, bundle: str | None) -> None:
        self._state = state
        self._bundle = bundle
        self._store = BundleStore(state)
        self._metadata = state / "tuf" / "metadata"
        self._incoming = state / "slots" / "incoming"
        self._fresh_path = state / "tuf" / "fresh.json"
        self._fresh_at = _read_time(self._fresh_path)

    def outcome(self, status: Status, reason: str = "") -> UpdateOutcome:
        """`status` with all that is known."""
        fresh = None if self._fresh_at is None else self._fresh_at.isoformat(timespec="seconds")
        return UpdateOutcome(status, self._bundle, reason, fresh)

    def storage_outcome(self, err: StorageError) -> UpdateOutcome:
        """`no_space` where it was space that was missing."""
        if err.needed_bytes is None:
            return self.outcome("refused", str(err))
        fresh = self.outcome("no_space").fresh_at
        sizes = (err.needed_bytes, err.available_bytes)
        return UpdateOutcome("no_space", self._bundle, str(err), fresh, *sizes)

    def run(self) -> UpdateOutcome:
        """Refresh, compare, fetch, try, commit."""
        identity = Identity.load(self._state)
        now = datetime.now(UTC)
        floor = max(EARLIEST, self._fresh_at or EARLIEST)
        server = Server(identity, check_dates=now >= floor)
        if self._bundle is None:
            self._bundle = _assigned(server, identity)
        if now < floor:
            logger.warning("clock untrusted: it says %s, last seen %s", now, floor)
            now = max(floor, server.date or floor)
        updater = self._refresh(server, identity, now)
        if self._bundle is None:
            return self.outcome("unchanged", "no bundle is assigned to this device")
        record, urls = _wanted(updater, check_bundle_name(self._bundle), identity)
        if self._runs(record):
            return self.outcome("unchanged")
        why = self._store.why_quarantined(record.digest)
        if why is not None:
            raise UpdateRefusedError(f"{record.bundle}: failed on this device before: {why}")
        slot = self._fetch(server, record, urls)
        self._prove(slot, record)
        self._store.commit(slot, record)
        return self.outcome("installed")

    def _refresh(self, server: Server, identity: Identity, now: datetime) -> Updater:
        make_folder(self._metadata)
        available = free_bytes(self._metadata)
        if available < RESERVE_BYTES // 2:
            raise no_space(self._metadata, RESERVE_BYTES // 2, available)
        for left in self._metadata.glob("tmp*"):  # tuf's, of an update that was killed
            left.unlink(missing_ok=True)
        updater = Updater(
            str(self._metadata),
            identity.url("tuf/metadata/"),
            fetcher=server,
            bootstrap=_read_root(self._state / "tuf" / "root.json"),
        )
        # expiry is judged by the best time we have, which is not always the system's; tuf is pinned
        updater._trusted_set.reference_time = now  # noqa: SLF001
        updater.refresh()
        # tuf renames without syncing; what it remembers is what protects against old metadata
        for path in self._metadata.glob("*.json"):
            sync_file(path)
        sync_folder(self._metadata)
        self._fresh_at = now
        write_atomic(self._fresh_path, orjson.dumps({"at": now.isoformat()}))
        return updater

    def _runs(self, record: BundleRecord) -> bool:
        try:
            return self._store.active().digest == record.digest
        except NoBundleError:
            return False

    def _fetch(self, server: Server, record: BundleRecord, urls: Mapping[str, str]) -> Slot:
        """Every file of `record` whole in the inactive slot; what is there already is kept."""
        slot = self._store.inactive_slot()
        folder = self._store.folder(slot)
        make_folder(folder)
        make_folder(self._incoming)
        missing = {
            name: file
            for name, file in record.files.items()
            if file_damage(folder / name, file) is not None
        }
        stale = self._stale(folder, record, missing)
        self._check_space(missing, stale)
        self._store.clear(slot)
        for path in stale:
            _remove(path)
        for name, file in missing.items():
            part = self._incoming / file.sha256
            try:
                _download(server, urls[name], file, part)
            except StorageError:
                _remove(part)  # a full disk hurts the agent too: give back what we took
                raise
            part.replace(folder / name)
        return slot

    def _stale(
        self, folder: Path, record: BundleRecord, missing: Mapping[str, FileRecord]
    ) -> list[Path]:
        parts = {file.sha256 for file in missing.values()}
        kept = record.files.keys() - missing.keys()
        return [
            *(path for path in folder.iterdir() if path.name not in kept),
            *(path for path in self._incoming.iterdir() if path.name not in parts),
        ]

    def _check_space(self, missing: Mapping[str, FileRecord], stale: list[Path]) -> None:
        """Before anything is thrown away for a bundle that would not fit."""
        here = sum(_size(self._incoming / file.sha256) for file in missing.values())
        needed = sum(file.length for file in missing.values()) - here + RESERVE_BYTES
        available = free_bytes(self._incoming) + sum(_size(path) for path in stale)
        if missing and needed > available:
            raise no_space(self._incoming, needed, available)

    def _prove(self, slot: Slot, record: BundleRecord) -> None:
        """Signed is not yet good: what fails its trial is never tried again."""
        folder = self._store.folder(slot)
        _check_manifest(BundleManifest.load(folder), record)
        try:
            run_trial(folder)
        except UpdateRefusedError as err:
            self._store.quarantine(record, str(err))
            raise


def _check_manifest(manifest: BundleManifest, record: BundleRecord) -> None:
    if manifest.bundle != record.bundle:
        raise UpdateRefusedError(f"manifest: expected {record.bundle}, got {manifest.bundle}")
    listed, named = sorted(record.files.keys() - {MANIFEST_NAME}), sorted(set(manifest.files))
    if named != listed:
        raise UpdateRefusedError(f"manifest: expected the signed files {listed}, got {named}")


def _assigned(server: Server, identity: Identity) -> str | None:
    """The bundle the server wants here."""
    url = identity.url(f"api/v1/devices/{identity.device}/assignment")
    try:
        answer = orjson.loads(server.download_bytes(url, ANSWER_BYTES))
        bundle = answer["bundle"]
    except DownloadHTTPError as err:
        if err.status_code == 404:
            return None
        raise
    except (orjson.JSONDecodeError, KeyError, TypeError) as err:
        raise UpdateRefusedError(f'{url}: expected {{"bundle": NAME}} ({err})') from err
    return None if bundle is None else str(bundle)


def _wanted(
    updater: Updater, bundle: str, identity: Identity
) -> tuple[BundleRecord, dict[str, str]]:
    """What the signed metadata says of `bundle`: its files, and where each is fetched."""
    manifest = _target(updater, bundle, MANIFEST_NAME)
    targets = {MANIFEST_NAME: manifest}
    for name in _listed(manifest, bundle):
        targets[check_file_name(name)] = _target(updater, bundle, name)
    files = {name: FileRecord(t.hashes["sha256"], t.length) for name, t in targets.items()}
    base = identity.url(f"tuf/targets/bundles/{bundle}/")
    urls = {name: f"{base}{file.sha256}.{name}" for name, file in files.items()}
    return BundleRecord(bundle, files), urls


def _listed(manifest: TargetFile, bundle: str) -> list[str]:
    """The names of the bundle's other files, as signed with its manifest."""
    custom = manifest.custom
    names = custom.get("files") if isinstance(custom, dict) else None
    if not isinstance(names, list) or not 0 < len(names) < MAX_FILES:
        raise UpdateRefusedError(f"{bundle}: the signed metadata does not list its files")
    if not all(isinstance(name, str) for name in names):
        raise UpdateRefusedError(f"{bundle}: the signed metadata lists files without names")
    return names


def _target(updater: Updater, bundle: str, name: str) -> TargetFile:
    target = updater.get_targetinfo(f"bundles/{bundle}/{name}")
    if target is None or "sha256" not in target.hashes:
        raise UpdateRefusedError(f"{bundle}: {name} is not published (signed) by this server")
    return target


def _download(server: Server, url: str, file: FileRecord, part: Path) -> None:
    """Have the file of `url` at `part`, whole and synced, going on from what is there.

    The URL holds the file's hash, so what is behind it never changes and no `If-Range` is needed:
    the hash over all of it decides in the end.

    Raises: UpdateRefusedError if it is not what was signed; DownloadError; StorageError.
    """
    for attempt in range(ATTEMPTS):
        before = _size(part)
        try:
            _continue(server, url, file, part)
        except DownloadHTTPError:
            raise
        except DownloadLengthMismatchError:
            _remove(part)
            raise
        except DownloadError:
            if attempt == ATTEMPTS - 1 or _size(part) <= before:
                raise
            time.sleep(0.2 * 2**attempt)
            continue
        problem = file_damage(part, file)
        if problem is None:
            sync_file(part)
            return
        _remove(part)
        if before == 0:
            raise UpdateRefusedError(f"{url}: {problem}")
        # the piece we went on from was damaged here, by a power cut say: once more from the start
    raise UpdateRefusedError(f"{url}: never came whole in {ATTEMPTS} attempts")


def _continue(server: Server, url: str, file: FileRecord, part: Path) -> None:
    """Fetch what is missing at the end of `part`."""
    start = _size(part)
    if start >= file.length:
        return
    headers = {"Range": f"bytes={start}-"} if start else {}
    with server.get(url, headers) as response:
        if response.status not in (200, 206):
            raise DownloadHTTPError(f"{url}: HTTP {response.status}", response.status)
        expected = f"bytes {start}-{file.length - 1}/{file.length}"
        if response.status == 200:
            start = 0  # a server without ranges sends it all again
        elif response.headers.get("Content-Range") != expected:
            got = response.headers.get("Content-Range")
            raise DownloadLengthMismatchError(f"{url}: expected {expected}, got {got}")
        _append(_pieces(response), file, part, start)


def _pieces(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """As they arrive: `stream` gathers whole chunks, and loses one when the link breaks."""
    while piece := response.read1(CHUNK_BYTES):
        yield piece


def _append(chunks: Iterator[bytes], file: FileRecord, part: Path, start: int) -> None:
    length = start
    try:
        with part.open("r+b" if start else "wb") as out:
            out.seek(start)
            for chunk in chunks:
                length += len(chunk)
                if length > file.length:
                    raise DownloadLengthMismatchError(f"{part.name}: more than {file.length} bytes")
                out.write(chunk)
    except OSError as err:  # the disk's: urllib3 wraps those of the link
        raise storage_error(part, file.length, err) from err
    if length < file.length:
        raise DownloadError(f"{part.name}: ended after {length} of {file.length} bytes")


def _tls(identity: Identity, *, check_dates: bool) -> ssl.SSLContext | None:
    if not identity.server.startswith("https:"):
        return None
    if identity.ca is None:
        return ssl.create_default_context()
    try:
        context = ssl.create_default_context(cafile=str(identity.ca))
    except (OSError, ssl.SSLError) as err:
        raise ConfigurationError(f"{identity.ca}: not a usable authority ({err})") from err
    if not check_dates:
        context.verify_flags |= _NO_CHECK_TIME
    return context


def _cause(err: BaseException) -> str:
    """urllib3 wraps; people want the inmost reason."""
    reason = getattr(err, "reason", None)
    return str(reason if reason is not None else err)[:300]


def _date(header: str | None) -> datetime | None:
    if header is None:
        return None
    try:
        return parsedate_to_datetime(header).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _read_root(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise UpdateRefusedError(
            f"{path}: cannot be read ({err.strerror}); enrol again to get the server's root"
        ) from err


def _read_time(path: Path) -> datetime | None:
    try:
        return datetime.fromisoformat(orjson.loads(path.read_bytes())["at"]).astimezone(UTC)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _size(path: Path) -> int:
    try:
        return path.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
