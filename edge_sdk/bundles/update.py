"""The updater: fetch a signed bundle, prove it, make it active.

`python -P -m edge_sdk.bundles.update --state DIR [--bundle NAME]` prints one line, an
UpdateOutcome. With `--measure NAME` it only tries and measures that bundle, and installs nothing.

The signed repository says what a bundle is (repository.py). This module fetches the files into the
inactive slot, has the bundle tried in a child process, and commits.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import orjson

from edge_sdk.bundles.download import (
    ServerClient,
    StatusError,
    download,
    remove,
    size_bytes,
)
from edge_sdk.bundles.measurements import Measurements
from edge_sdk.bundles.memory_failures import HOLD_S, tell_failure
from edge_sdk.bundles.repository import PublishedBundle, SignedRepository
from edge_sdk.bundles.run_update import Status, UpdateOutcome
from edge_sdk.bundles.store import (
    ActiveBundle,
    BundleRecord,
    BundleStore,
    FileRecord,
    Slot,
    file_damage,
    make_own_folder,
)
from edge_sdk.bundles.trial import run_trial
from edge_sdk.bundles.update_report import report_update
from edge_sdk.durable import free_bytes, make_folder, no_space, storage_error, write_atomic
from edge_sdk.errors import (
    LinkError,
    NoBundleError,
    OutOfMemoryError,
    SplitedgeError,
    StateInUseError,
    StorageError,
    UpdateRefusedError,
)
from edge_sdk.http import ResponseTooLargeError
from edge_sdk.identity import Identity
from edge_sdk.installation import BUILD_DATE, clock_is_wrong
from edge_sdk.logs.line_format import CHILD_FORM, log_to_stderr
from edge_sdk.manifest import MANIFEST_NAME, BundleManifest, check_bundle_name
from edge_sdk.membership.rotation import current_identity
from edge_sdk.state import StateLock

RESERVE_BYTES: Final = 262_144  # left to metadata, active.json and the agent's own files
ANSWER_BYTES: Final = 65_536
# Two clocks that differ by less agree.
CLOCKS_AGREE: Final = timedelta(days=1)

BUSY: Final = (
    "another update or a measurement of bundles is under way on this device; try again when it is"
    " done, which takes minutes at most on a fast link"
)

logger = logging.getLogger(__name__)


def main() -> None:
    """Run one update and print its outcome."""
    parser = argparse.ArgumentParser(prog="python -m edge_sdk.bundles.update")
    parser.add_argument("--state", type=Path, required=True, help="the agent's state folder")
    parser.add_argument("--bundle", help="MODEL/VERSION/VARIANT; the assigned one when left out")
    parser.add_argument("--measure", action="append", default=[], help="MODEL/VERSION/VARIANT")
    arguments = parser.parse_args()
    log_to_stderr(logging.WARNING, CHILD_FORM, text=True)
    if arguments.measure:
        sys.stdout.buffer.write(measure(arguments.state, arguments.measure).to_json())
        return
    outcome = update(arguments.state, arguments.bundle)
    sys.stdout.buffer.write(outcome.to_json())
    report_update(arguments.state, outcome)


def update(state: Path, bundle: str | None = None) -> UpdateOutcome:
    """Bring the device to `bundle`, or to the one the server assigns it; see `run_update`.

    Every failure that a disk, a link or a server can cause is an outcome, not an exception.
    """
    return _outcome_of(_Update(state, bundle), _Update.run)


def measure(state: Path, bundles: Sequence[str]) -> UpdateOutcome:
    """Try and measure bundles that this device does not run, and report what they take here.

    Their files are kept until the next update, which may want them.
    """

    def run(job: _Update) -> UpdateOutcome:
        return job.measure(bundles)

    return _outcome_of(_Update(state, None), run)


def _outcome_of(job: _Update, run: Callable[[_Update], UpdateOutcome]) -> UpdateOutcome:
    try:
        with StateLock(job.state, "update"):
            return run(job)
    except StateInUseError:
        return job.outcome("busy", BUSY)
    except LinkError as err:
        return job.link_outcome(err)
    except StorageError as err:
        return job.storage_outcome(err)
    except SplitedgeError as err:
        return job.outcome("refused", str(err))
    except OSError as err:  # tuf writes its own metadata
        return job.storage_outcome(
            storage_error(job.state / "tuf" / "metadata", RESERVE_BYTES, err)
        )


class _Update:
    """One update: what is known so far, so that any failure can be told in full."""

    def __init__(self, state: Path, bundle: str | None) -> None:
        self.state = state
        self._bundle = bundle
        self._store = BundleStore(state)
        self._measurements = Measurements(state)
        self._metadata = state / "tuf" / "metadata"
        self._incoming = state / "slots" / "incoming"
        self._fresh_path = state / "tuf" / "fresh.json"
        self._fresh_at = _read_time(self._fresh_path)

    def outcome(self, status: Status, reason: str = "") -> UpdateOutcome:
        """An outcome with all that is known."""
        fresh = None if self._fresh_at is None else self._fresh_at.isoformat(timespec="seconds")
        return UpdateOutcome(status, self._bundle, reason, fresh)

    def link_outcome(self, err: LinkError) -> UpdateOutcome:
        """`unreachable`, or `refused` where the server does not accept this device."""
        if isinstance(err, StatusError) and err.status == 403:
            return self.outcome("refused", str(err))
        if isinstance(err, StatusError) and err.status == 401:
            why = f"{err}: the server does not accept this device's credential; enrol again"
            return self.outcome("refused", why)
        return self.outcome("unreachable", str(err))

    def storage_outcome(self, err: StorageError) -> UpdateOutcome:
        """`no_space` where space was missing, `refused` for any other fault of the disk."""
        if err.needed_bytes is None:
            return self.outcome("refused", str(err))
        fresh = self.outcome("no_space").fresh_at
        sizes = (err.needed_bytes, err.available_bytes)
        return UpdateOutcome("no_space", self._bundle, str(err), fresh, *sizes)

    def run(self) -> UpdateOutcome:
        """Refresh, compare, fetch, try, commit."""
        identity, client = self._connect()
        # first, because the server assigns by what it knows of this device
        self._measurements.report(identity)
        if self._bundle is None:
            self._bundle = _assigned_bundle(client, identity)
        repository = self._refresh(client, identity)
        if self._bundle is None:
            return self.outcome("unchanged", "no bundle is assigned to this device")
        published = repository.bundle(check_bundle_name(self._bundle))
        record = published.record
        if self._is_active(record):
            self._measure_active(record)
            self._measurements.report(identity)
            return self.outcome("unchanged")
        why = self._store.why_quarantined(record.digest)
        if why is not None:
            raise UpdateRefusedError(f"{record.bundle}: failed on this device before: {why}")
        slot = self._fetch(client, published)
        self._prove(slot, record)
        self._store.commit(slot, record)
        self._measurements.report(identity)
        return self.outcome("installed")

    def measure(self, bundles: Sequence[str]) -> UpdateOutcome:
        """Fetch and measure bundles without installing them; those that were need no fetch."""
        identity, client = self._connect()
        repository = self._refresh(client, identity)
        for name in bundles:
            published = repository.bundle(check_bundle_name(name))
            record = published.record
            if self._store.is_quarantined(record.digest):
                logger.warning("bundle=%s failed on this device before: not measured", name)
            elif self._measurements.of(record.digest) is None:
                self._try_beside(client, published)
        self._measurements.report(identity)
        return self.outcome("unchanged")

    def _try_beside(self, client: ServerClient, published: PublishedBundle) -> None:
        """Try a bundle in a folder of its own, which is no slot, and leave its files for later."""
        folder = self._incoming / "measured"
        make_own_folder(self._incoming)
        remove(folder)
        make_folder(folder)
        needed = sum(file.length for file in published.record.files.values()) + RESERVE_BYTES
        if needed > free_bytes(folder):
            raise no_space(folder, needed, free_bytes(folder))
        try:
            for name, file in published.record.files.items():
                part = self._incoming / file.sha256
                download(client, published.urls[name], file, part)
                _link(part, folder / name)
            self._prove_in(folder, published.record, self._sibling(published.record))
        finally:
            remove(folder)

    def _sibling(self, record: BundleRecord) -> ActiveBundle | None:
        """The active bundle, if it is of the same model, so that both take the same input."""
        active = self._store.active()
        model = record.bundle.rpartition("/")[0]
        return active if active.manifest.bundle.rpartition("/")[0] == model else None

    def _connect(self) -> tuple[Identity, ServerClient]:
        identity = current_identity(self.state)
        return identity, ServerClient(identity, check_dates=self._trusts(datetime.now(UTC)))

    def _trusts(self, clock: datetime) -> bool:
        """Whether the clock may be right: not before the last time seen, nor plainly wrong."""
        return clock >= self._floor and not clock_is_wrong(clock)

    @property
    def _floor(self) -> datetime:
        """A time that has passed: a clock that says an earlier one is wrong."""
        return max(BUILD_DATE, self._fresh_at or BUILD_DATE)

    def _refresh(self, client: ServerClient, identity: Identity) -> SignedRepository:
        clock = now = datetime.now(UTC)
        if not self._trusts(clock):
            logger.warning("clock untrusted: it says %s, last seen %s", clock, self._floor)
            date = client.date
            now = date if date is not None and self._trusts(date) else self._floor
        make_folder(self._metadata)
        available = free_bytes(self._metadata)
        if available < RESERVE_BYTES // 2:
            raise no_space(self._metadata, RESERVE_BYTES // 2, available)
        seen = _signed_version(self._metadata / "timestamp.json")
        try:
            repository = self._open(client, identity, now)
        except LinkError:
            if seen is None or not self._floor_was_wrong(client, clock):
                raise
            repository, now = self._open(client, identity, clock), clock
            # what this device has seen before never comes back to life
            if _signed_version(self._metadata / "timestamp.json") == seen:
                raise
            logger.warning("the clock went back from %s to %s", self._floor, clock)
        self._fresh_at = now
        write_atomic(self._fresh_path, orjson.dumps({"at": now.isoformat()}))
        return repository

    def _open(self, client: ServerClient, identity: Identity, now: datetime) -> SignedRepository:
        root = self.state / "tuf" / "root.json"
        return SignedRepository(client, identity, self._metadata, root, now)

    def _floor_was_wrong(self, client: ServerClient, clock: datetime) -> bool:
        """Whether the last time seen came of clocks that had jumped: server and clock say so."""
        date = client.date
        return (
            date is not None
            and clock < self._floor
            and not clock_is_wrong(clock)
            and abs(clock - date) < CLOCKS_AGREE
        )

    def _is_active(self, record: BundleRecord) -> bool:
        try:
            return self._store.active().digest == record.digest
        except NoBundleError:
            return False

    def _fetch(self, client: ServerClient, published: PublishedBundle) -> Slot:
        """Every file of the bundle whole in the inactive slot; those whole already are kept."""
        record = published.record
        slot = self._store.inactive_slot()
        folder = self._store.folder(slot)
        make_own_folder(folder)
        make_own_folder(self._incoming)
        missing = {
            name: file
            for name, file in record.files.items()
            if file_damage(folder / name, file) is not None
        }
        stale = self._stale(folder, record, missing)
        self._check_space(missing, stale)
        self._store.clear(slot)
        for path in stale:
            remove(path)
        for name, file in missing.items():
            part = self._incoming / file.sha256
            try:
                download(client, published.urls[name], file, part)
            except StorageError:
                remove(part)  # a full disk hurts the agent too: give back what we took
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
        """Refuse a bundle that would not fit, before anything is removed for it."""
        here = sum(size_bytes(self._incoming / file.sha256) for file in missing.values())
        needed = sum(file.length for file in missing.values()) - here + RESERVE_BYTES
        available = free_bytes(self._incoming) + sum(size_bytes(path) for path in stale)
        if missing and needed > available:
            raise no_space(self._incoming, needed, available)

    def _prove(self, slot: Slot, record: BundleRecord) -> None:
        """Try the bundle: signed is not yet good. What fails its trial is never tried again."""
        self._prove_in(self._store.folder(slot), record)

    def _prove_in(
        self, folder: Path, record: BundleRecord, beside: ActiveBundle | None = None
    ) -> None:
        _check_manifest(BundleManifest.load(folder), record)
        try:
            report = run_trial(folder, None if beside is None else beside.folder)
        except OutOfMemoryError as err:
            if beside is not None:  # two bundles at once took it: that says little of this one
                raise UpdateRefusedError(f"{record.bundle}: {err}") from err
            # memory comes and goes: another time it may fit, and till then a smaller bundle does
            self._store.quarantine(record, str(err), hold_s=HOLD_S)
            tell_failure(self.state, record.bundle, str(err))
            raise UpdateRefusedError(str(err)) from err
        except UpdateRefusedError as err:
            self._store.quarantine(record, str(err))
            raise
        if beside is not None and report.beside is not None:
            self._measurements.keep_times(beside.digest, report.beside)
        # the first counts: later trials run at busier times, and the agent reports changes itself
        if self._measurements.of(record.digest) is None:
            self._measurements.keep(record.digest, report.measurement)

    def _measure_active(self, record: BundleRecord) -> None:
        """Measure the running bundle, if that was not done when it was installed."""
        if self._measurements.of(record.digest) is not None:
            return
        try:
            report = run_trial(self._store.active().folder)
        except (
            UpdateRefusedError,
            OutOfMemoryError,
        ) as err:  # it runs, so it stays; the next update tries again
            logger.warning("bundle=%s cannot be measured: %s", record.bundle, err)
            return
        self._measurements.keep(record.digest, report.measurement)


def _link(source: Path, target: Path) -> None:
    """A second name for a file; a copy on a file system without them."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _check_manifest(manifest: BundleManifest, record: BundleRecord) -> None:
    if manifest.bundle != record.bundle:
        raise UpdateRefusedError(f"manifest: expected {record.bundle}, got {manifest.bundle}")
    listed, named = sorted(record.files.keys() - {MANIFEST_NAME}), sorted(set(manifest.files))
    if named != listed:
        raise UpdateRefusedError(f"manifest: expected the signed files {listed}, got {named}")


def _assigned_bundle(client: ServerClient, identity: Identity) -> str | None:
    """The bundle that the server assigns to this device; None where it assigns none."""
    url = identity.url(f"api/v1/devices/{identity.device}/assignment")
    try:
        answer = orjson.loads(client.read(url, ANSWER_BYTES))
        bundle = answer["bundle"]
    except StatusError as err:
        if err.status == 404:
            return None
        raise
    except ResponseTooLargeError as err:
        raise UpdateRefusedError(str(err)) from err
    except (orjson.JSONDecodeError, KeyError, TypeError) as err:
        raise UpdateRefusedError(f'{url}: expected {{"bundle": NAME}} ({err})') from err
    return None if bundle is None else str(bundle)


def _signed_version(path: Path) -> int | None:
    """The version of metadata that was verified before; None where there is none."""
    try:
        return int(orjson.loads(path.read_bytes())["signed"]["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read_time(path: Path) -> datetime | None:
    try:
        return datetime.fromisoformat(orjson.loads(path.read_bytes())["at"]).astimezone(UTC)
    except (OSError, ValueError, KeyError, TypeError):
        return None


if __name__ == "__main__":
    main()
