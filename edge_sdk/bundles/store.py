"""The bundles on this device: two slots, one of them active, and a way back.

    {state}/slots/a, {state}/slots/b    the files of one bundle each
    {state}/active.json                 the active slot, and what each slot holds, by SHA-256
    {state}/quarantine.json             bundles that were tried here and failed, and why

A new bundle is written into the inactive slot and becomes active by replacing active.json: before
the rename the device has the old bundle, after it the new one. Files are hashed again at each
start, so what a worn card did to them meanwhile is found before they run.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import orjson

from edge_sdk.durable import make_folder, sync_file, sync_folder, write_atomic
from edge_sdk.errors import BundleError, NoBundleError, SplitedgeError, StorageError
from edge_sdk.manifest import BundleManifest, check_bundle_name, check_file_name, read_json

Slot = Literal["a", "b"]

ACTIVE_NAME: Final = "active.json"
QUARANTINE_NAME: Final = "quarantine.json"

# starts of a bundle that never lived through its health window: the next one goes back
MAX_UNPROVEN_STARTS: Final = 3
_KEPT_QUARANTINED: Final = 100
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_OPTIONS: Final = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What one file must be: SHA-256 in hex, length in bytes."""

    sha256: str
    length: int

    def __post_init__(self) -> None:
        if not _SHA256.fullmatch(self.sha256) or self.length < 0:
            raise ValueError(f"expected a SHA-256 and a length, got {self.sha256}, {self.length}")


@dataclass(frozen=True, slots=True)
class BundleRecord:
    """What a whole bundle must be, the manifest included."""

    bundle: str
    files: Mapping[str, FileRecord]

    def __post_init__(self) -> None:
        check_bundle_name(self.bundle)
        for name in self.files:
            check_file_name(name)

    @property
    def digest(self) -> str:
        """One SHA-256 for the bundle's content, whatever its name; what is quarantined."""
        lines = (f"{name} {file.sha256}\n" for name, file in sorted(self.files.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @property
    def size_bytes(self) -> int:
        """Of all files together."""
        return sum(file.length for file in self.files.values())


@dataclass(frozen=True, slots=True)
class ActiveBundle:
    """The bundle to run, every file found whole.

    Attributes:
        digest: `BundleRecord.digest`.
        fallback: why this is not the bundle that was active before; None if it is.
    """

    slot: Slot
    folder: Path
    manifest: BundleManifest
    digest: str
    fallback: str | None = None


class BundleStore:
    """The two slots in a state folder. Safe to use from several processes at once."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self._slots = state / "slots"

    def folder(self, slot: Slot) -> Path:
        """Where the files of that slot are, or are to be put."""
        return self._slots / slot

    def active(self) -> ActiveBundle:
        """The bundle to run, after hashing its files; the other slot's if they are damaged.

        Raises: NoBundleError saying what was found and what to do.
        """
        with self._locked():
            return self._select(self._read())

    def record(self, slot: Slot) -> BundleRecord | None:
        """What that slot is meant to hold; says nothing of its files' health (see `damage`)."""
        return self._read().slots.get(slot)

    def inactive_slot(self) -> Slot:
        """The slot a new bundle goes into."""
        return _other(self._read().active) if self._read().slots else "a"

    def damage(self, slot: Slot, record: BundleRecord) -> str | None:
        """The first thing wrong with the slot's files against `record`, None if all are whole."""
        for name, file in record.files.items():
            problem = file_damage(self.folder(slot) / name, file)
            if problem is not None:
                return problem
        return None

    def clear(self, slot: Slot) -> None:
        """Before an inactive slot is written: nothing falls back to it from here on.

        Raises: BundleError if that slot is active; StorageError.
        """
        make_folder(self.folder(slot))
        with self._locked():
            ledger = self._read()
            if slot not in ledger.slots:
                return
            _check_inactive(ledger, slot)
            slots = {name: record for name, record in ledger.slots.items() if name != slot}
            self._write(replace(ledger, slots=slots))

    def commit(self, slot: Slot, record: BundleRecord) -> None:
        """Make `slot` the active one, once its files are proved whole and on the disk.

        Raises: BundleError if they are not, or the slot is active already; StorageError.
        """
        for name in record.files:
            sync_file(self.folder(slot) / name)
        sync_folder(self.folder(slot))
        sync_folder(self._slots)
        problem = self.damage(slot, record)
        if problem is not None:
            raise BundleError(f"{problem}; update again")
        with self._locked():
            ledger = self._read()
            _check_inactive(ledger, slot)
            self._write(_Ledger(slot, {**ledger.slots, slot: record}, unproven_starts=0))

    def roll_back(self, why: str) -> ActiveBundle:
        """Quarantine the active bundle and make the other slot's the active one.

        Raises: NoBundleError if there is nothing to go back to; StorageError.
        """
        with self._locked():
            ledger = self._read()
            record = ledger.slots.get(ledger.active)
            if record is None:
                raise NoBundleError(f"{self.state}: no active bundle to go back from; update first")
            self._quarantine(record.digest, record.bundle, why)
            return self._select(ledger)

    def count_start(self) -> None:
        """Note that an agent is about to run the active bundle.

        A bundle that was started MAX_UNPROVEN_STARTS times and never confirmed takes the agent down
        with it: the next call quarantines it, and `active` goes back. Not where there is nothing to
        go back to: any bundle is better than none. A start that ended well is taken back by
        `forget_start`.

        Raises: StorageError.
        """
        with self._locked():
            ledger = self._read()
            record = ledger.slots.get(ledger.active)
            if record is None or ledger.unproven_starts is None:
                return
            if ledger.unproven_starts < MAX_UNPROVEN_STARTS:
                self._write(replace(ledger, unproven_starts=ledger.unproven_starts + 1))
                return
            if self._has_way_back(ledger):
                why = f"{ledger.unproven_starts} starts and never healthy"
                self._quarantine(record.digest, record.bundle, why)

    def forget_start(self) -> None:
        """Take the last `count_start` back: the agent ended as it was told to, and well.

        Raises: StorageError.
        """
        with self._locked():
            ledger = self._read()
            if ledger.unproven_starts:
                self._write(replace(ledger, unproven_starts=ledger.unproven_starts - 1))

    def has_way_back(self) -> bool:
        """Whether the inactive slot holds a bundle that could run in place of the active one."""
        with self._locked():
            return self._has_way_back(self._read())

    def confirm(self) -> None:
        """Note that the active bundle lived through its health window.

        Raises: StorageError.
        """
        with self._locked():
            ledger = self._read()
            if ledger.slots and ledger.unproven_starts is not None:
                self._write(replace(ledger, unproven_starts=None))

    def quarantine(self, record: BundleRecord, why: str) -> None:
        """Never install this content again.

        Raises: StorageError.
        """
        make_folder(self._slots)
        with self._locked():
            self._quarantine(record.digest, record.bundle, why)

    def is_quarantined(self, digest: str) -> bool:
        """Whether a bundle of that content failed on this device."""
        return self.why_quarantined(digest) is not None

    def why_quarantined(self, digest: str) -> str | None:
        """Why a bundle of that content was quarantined; None if it was not."""
        entry = self._read_quarantine().get(digest)
        return None if entry is None else str(entry.get("why"))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone with active.json; held for as long as it takes to hash two bundles at most."""
        try:
            # a folder can be locked as it is, on a read-only disk too
            handle = os.open(self._slots, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield  # nothing was ever installed, so there is nothing to guard
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _select(self, ledger: _Ledger) -> ActiveBundle:
        """The first slot that may run and is whole, the active one first."""
        problems: list[str] = []
        for slot in (ledger.active, _other(ledger.active)):
            record = ledger.slots.get(slot)
            if record is None:
                continue
            problem = self._unfit(slot, record)
            if problem is None:
                return self._activate(ledger, slot, "; ".join(problems) or None)
            problems.append(f"slot {slot}, {record.bundle}: {problem}")
        found = "; ".join(problems) or "no bundle is installed"
        raise NoBundleError(f"{self.state}: {found}; run `splitedge agent update`")

    def _has_way_back(self, ledger: _Ledger) -> bool:
        slot = _other(ledger.active)
        record = ledger.slots.get(slot)
        return record is not None and self._unfit(slot, record) is None

    def _unfit(self, slot: Slot, record: BundleRecord) -> str | None:
        why = self.why_quarantined(record.digest)
        if why is not None:
            return f"quarantined ({why})"
        problem = self.damage(slot, record)
        if problem is not None:
            return problem
        try:
            BundleManifest.load(self.folder(slot))
        except BundleError as err:  # whole, but written for another version of splitedge
            return str(err)
        return None

    def _activate(self, ledger: _Ledger, slot: Slot, fallback: str | None) -> ActiveBundle:
        record = ledger.slots[slot]
        if slot != ledger.active:
            logger.warning("bundle=%s falling back: %s", record.bundle, fallback)
            try:
                self._write(replace(ledger, active=slot, unproven_starts=None))
            except StorageError as err:  # runs all the same, and is chosen again at the next start
                logger.warning("bundle=%s the fallback could not be noted: %s", record.bundle, err)
        folder = self.folder(slot)
        return ActiveBundle(slot, folder, BundleManifest.load(folder), record.digest, fallback)

    def _read(self) -> _Ledger:
        path = self.state / ACTIVE_NAME
        try:
            return read_json(path.read_bytes(), _ledger)
        except FileNotFoundError:
            return _Ledger("a", {})
        except (OSError, SplitedgeError) as err:
            # the slots' files are still there: an update finds them whole and only commits
            logger.warning("%s: unreadable, taken as no bundle (%s)", path, err)
            return _Ledger("a", {})

    def _write(self, ledger: _Ledger) -> None:
        write_atomic(self.state / ACTIVE_NAME, orjson.dumps(asdict(ledger), option=_OPTIONS))

    def _read_quarantine(self) -> dict[str, dict[str, Any]]:
        path = self.state / QUARANTINE_NAME
        try:
            entries = orjson.loads(path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, orjson.JSONDecodeError) as err:
            logger.warning("%s: unreadable, taken as empty (%s)", path, err)
            return {}
        if not isinstance(entries, dict):
            return {}
        return {key: entry for key, entry in entries.items() if isinstance(entry, dict)}

    def _quarantine(self, digest: str, bundle: str, why: str) -> None:
        logger.warning("bundle=%s quarantined: %s", bundle, why)
        entries = self._read_quarantine()
        entries[digest] = {
            "bundle": bundle,
            "why": why,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        newest = sorted(entries.items(), key=lambda item: str(item[1].get("at")))
        kept = dict(newest[-_KEPT_QUARANTINED:])
        write_atomic(self.state / QUARANTINE_NAME, orjson.dumps(kept, option=_OPTIONS))


def file_damage(path: Path, record: FileRecord) -> str | None:
    """What is wrong with the file at `path`, None if it is just what the record says."""
    try:
        # a link could point anywhere by the time it is loaded
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            length = os.fstat(file.fileno()).st_size
            if length != record.length:
                return f"{path.name}: expected {record.length} bytes, got {length}"
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as err:
        return f"{path.name}: cannot be read ({err.strerror})"
    if digest != record.sha256:
        return f"{path.name}: expected SHA-256 {record.sha256:.12}…, got {digest:.12}…"
    return None


@dataclass(frozen=True, slots=True)
class _Ledger:
    """active.json. `unproven_starts`: None once the active bundle is confirmed."""

    active: Slot
    slots: Mapping[Slot, BundleRecord]
    unproven_starts: int | None = None


def _ledger(data: dict[str, Any]) -> _Ledger:
    starts = data["unproven_starts"]
    slots = {_slot(slot): _record(record) for slot, record in data["slots"].items()}
    return _Ledger(_slot(data["active"]), slots, None if starts is None else int(starts))


def _record(data: Mapping[str, Any]) -> BundleRecord:
    files = {
        str(name): FileRecord(str(file["sha256"]), int(file["length"]))
        for name, file in data["files"].items()
    }
    return BundleRecord(str(data["bundle"]), files)


def _slot(value: object) -> Slot:
    if value not in ("a", "b"):
        raise ValueError(f"expected slot a or b, got {value!r:.20}")
    return value


def _other(slot: Slot) -> Slot:
    return "b" if slot == "a" else "a"


def _check_inactive(ledger: _Ledger, slot: Slot) -> None:
    if ledger.active == slot and slot in ledger.slots:
        raise BundleError(f"slot {slot} became the active one meanwhile; update again")
