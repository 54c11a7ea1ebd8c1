"""The bundles of a device: two slots, one of them active, and the other one to roll back to.

    {state}/slots/a, {state}/slots/b    the files of one bundle each
    {state}/active.json                 the active slot, and the files of each slot, by SHA-256
    {state}/quarantine.json             bundles that failed on this device, and why

A new bundle is written into the inactive slot and becomes active when active.json is replaced:
before the rename the device has the old bundle, after it the new one. Files are hashed again at
each start, so damage by a worn card is found before they run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal

import orjson

from edge_sdk.durable import locked_folder, make_folder, sync_file, sync_folder, write_atomic
from edge_sdk.errors import (
    BundleError,
    ConfigurationError,
    NoBundleError,
    SplitedgeError,
    StorageError,
)
from edge_sdk.manifest import BundleManifest, check_bundle_name, check_file_name, read_json

Slot = Literal["a", "b"]

ACTIVE_NAME: Final = "active.json"
QUARANTINE_NAME: Final = "quarantine.json"

# starts of a bundle that was never healthy; the next start rolls back
MAX_UNPROVEN_STARTS: Final = 3
HASH_SHORTEST: Final = 6
_KEPT_QUARANTINED: Final = 100
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_OPTIONS: Final = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The expected content of one file: SHA-256 in hex, length in bytes."""

    sha256: str
    length: int

    def __post_init__(self) -> None:
        if not _SHA256.fullmatch(self.sha256) or self.length < 0:
            raise ValueError(f"expected a SHA-256 and a length, got {self.sha256}, {self.length}")


@dataclass(frozen=True, slots=True)
class BundleRecord:
    """The expected files of a whole bundle, manifest included."""

    bundle: str
    files: Mapping[str, FileRecord]

    def __post_init__(self) -> None:
        check_bundle_name(self.bundle)
        for name in self.files:
            check_file_name(name)

    @property
    def digest(self) -> str:
        """One SHA-256 over the bundle's content without its name; the key of the quarantine."""
        lines = (f"{name} {file.sha256}\n" for name, file in sorted(self.files.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @property
    def size_bytes(self) -> int:
        """Size of all files together."""
        return sum(file.length for file in self.files.values())


@dataclass(frozen=True, slots=True)
class ActiveBundle:
    """The bundle to run; every file was checked.

    Attributes:
        digest: `BundleRecord.digest`.
        fallback: why the bundle that was active before was left; None if this is the same one.
    """

    slot: Slot
    folder: Path
    manifest: BundleManifest
    digest: str
    fallback: str | None = None


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A bundle that failed on this device.

    Attributes:
        digest: `BundleRecord.digest`.
        at: ISO 8601, UTC. until: the end of a quarantine that has one.
    """

    digest: str
    bundle: str
    why: str
    at: str
    until: str | None


class BundleStore:
    """The two slots of a state folder. Several processes may use it at once."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self._slots = state / "slots"

    def folder(self, slot: Slot) -> Path:
        """Folder of that slot's files."""
        return self._slots / slot

    def active(self) -> ActiveBundle:
        """The bundle to run, after hashing its files; the other slot's if they are damaged.

        Raises: NoBundleError saying what was found and what to do.
        """
        with self._locked():
            return self._select(self._read())

    def record(self, slot: Slot) -> BundleRecord | None:
        """The files that slot should hold; `damage` says whether it does."""
        return self._read().slots.get(slot)

    def inactive_slot(self) -> Slot:
        """The slot for a new bundle."""
        return _other(self._read().active) if self._read().slots else "a"

    def damage(self, slot: Slot, record: BundleRecord) -> str | None:
        """The first difference of the slot's files from `record`; None if there is none."""
        if self.folder(slot).is_symlink():
            return f"slots/{slot}: expected a folder, got a link, which is not followed"
        for name, file in record.files.items():
            problem = file_damage(self.folder(slot) / name, file)
            if problem is not None:
                return problem
        return None

    def clear(self, slot: Slot) -> None:
        """Prepare an inactive slot for writing: nothing rolls back to it any more.

        Raises: BundleError if that slot is active; StorageError.
        """
        make_own_folder(self.folder(slot))
        with self._locked():
            table = self._read()
            if slot not in table.slots:
                return
            _check_inactive(table, slot)
            slots = {name: record for name, record in table.slots.items() if name != slot}
            self._write(replace(table, slots=slots))

    def commit(self, slot: Slot, record: BundleRecord) -> None:
        """Make `slot` the active one, after its files are synced to the disk and checked.

        Raises: BundleError if a file is damaged or the slot is active already; StorageError.
        """
        for name in record.files:
            sync_file(self.folder(slot) / name)
        sync_folder(self.folder(slot))
        sync_folder(self._slots)
        problem = self.damage(slot, record)
        if problem is not None:
            raise BundleError(f"{problem}; update again")
        with self._locked():
            table = self._read()
            _check_inactive(table, slot)
            self._write(_SlotTable(slot, {**table.slots, slot: record}, unproven_starts=0))

    def roll_back(
        self, why: str, *, hold_s: float | None = None, digest: str | None = None
    ) -> ActiveBundle:
        """Quarantine the active bundle and make the other slot's the active one.

        Args:
            hold_s: how long the bundle stays in quarantine; None for ever.
            digest: of the bundle to leave. Another one that an update has made active since stays.
        Raises: NoBundleError if there is no other bundle; StorageError.
        """
        with self._locked():
            table = self._read()
            record = table.slots.get(table.active)
            if record is None:
                raise NoBundleError(f"{self.state}: no active bundle to roll back; update first")
            if digest in (None, record.digest):
                self._quarantine(record.digest, record.bundle, why, hold_s)
            return self._select(table)

    def count_start(self) -> None:
        """Count a start of the active bundle, before it runs.

        A bundle that was started MAX_UNPROVEN_STARTS times and never confirmed is taken to crash
        the agent: the next call quarantines it, and `active` rolls back. Without another bundle it
        stays: any bundle is better than none. `forget_start` takes back a start that ended well.

        Raises: StorageError.
        """
        with self._locked():
            table = self._read()
            record = table.slots.get(table.active)
            if record is None or table.unproven_starts is None:
                return
            if table.unproven_starts < MAX_UNPROVEN_STARTS:
                self._write(replace(table, unproven_starts=table.unproven_starts + 1))
                return
            if self._has_way_back(table):
                why = f"{table.unproven_starts} starts and never healthy"
                self._quarantine(record.digest, record.bundle, why, None)

    def forget_start(self) -> None:
        """Take the last `count_start` back: the agent ended without a crash.

        Raises: StorageError.
        """
        with self._locked():
            table = self._read()
            if table.unproven_starts:
                self._write(replace(table, unproven_starts=table.unproven_starts - 1))

    def has_way_back(self) -> bool:
        """Whether the inactive slot holds a bundle that could run."""
        with self._locked():
            return self._has_way_back(self._read())

    def confirm(self, digest: str) -> None:
        """Mark the bundle with that content as healthy.

        Another one that an update has made active since has yet to run.

        Raises: StorageError.
        """
        with self._locked():
            table = self._read()
            record = table.slots.get(table.active)
            proven = record is not None and record.digest == digest
            if proven and table.unproven_starts is not None:
                self._write(replace(table, unproven_starts=None))

    def quarantine(self, record: BundleRecord, why: str, *, hold_s: float | None = None) -> None:
        """Refuse this content from now on, or for `hold_s` seconds.

        Raises: StorageError.
        """
        make_folder(self._slots)
        with self._locked():
            self._quarantine(record.digest, record.bundle, why, hold_s)

    def is_quarantined(self, digest: str) -> bool:
        """Whether a bundle with that content failed on this device."""
        return self.why_quarantined(digest) is not None

    def why_quarantined(self, digest: str) -> str | None:
        """Why a bundle with that content is quarantined; None if it is not, or not any more."""
        entry = self._read_quarantine().get(digest)
        if entry is None or _is_over(entry):
            return None
        return str(entry.get("why"))

    def quarantined(self) -> list[Quarantined]:
        """The bundles that are quarantined now, oldest first."""
        entries = sorted(self._read_quarantine().items(), key=lambda item: str(item[1].get("at")))
        return [_quarantined(key, entry) for key, entry in entries if not _is_over(entry)]

    def lift(self, name: str) -> list[Quarantined]:
        """Take a bundle out of quarantine: the next update may install it again.

        Args:
            name: `MODEL/VERSION/VARIANT`, or the first characters of the content's hash.
        Returns: what was lifted; nothing if no such bundle is quarantined.
        Raises: ConfigurationError for a hash that is shorter than HASH_SHORTEST; StorageError.
        """
        if "/" not in name and len(name) < HASH_SHORTEST:
            raise ConfigurationError(
                f"quarantine: expected a bundle or at least {HASH_SHORTEST} characters of its hash,"
                f" got {name[:100]!r}"
            )
        with locked_folder(self._slots):
            entries = self._read_quarantine()
            lifted = [
                _quarantined(key, entry)
                for key, entry in entries.items()
                if name == entry.get("bundle") or ("/" not in name and key.startswith(name))
            ]
            if lifted:
                gone = {one.digest for one in lifted}
                kept = {key: entry for key, entry in entries.items() if key not in gone}
                write_atomic(self.state / QUARANTINE_NAME, orjson.dumps(kept, option=_OPTIONS))
        return lifted

    def _locked(self) -> AbstractContextManager[None]:
        """Exclusive access to active.json, for at most the time to hash two bundles."""
        return locked_folder(self._slots)

    def _select(self, table: _SlotTable) -> ActiveBundle:
        """The first slot with a bundle that can run, starting with the active one.

        A bundle in quarantine for a time alone is taken if there is no other one.
        """
        problems: list[str] = []
        for for_ever in (False, True):
            for slot in (table.active, _other(table.active)):
                record = table.slots.get(slot)
                if record is None:
                    continue
                problem = self._why_unusable(slot, record, for_ever=for_ever)
                if problem is None:
                    return self._activate(table, slot, "; ".join(problems) or None)
                if not for_ever:
                    problems.append(f"slot {slot}, {record.bundle}: {problem}")
        found = "; ".join(problems) or "no bundle is installed"
        raise NoBundleError(f"{self.state}: {found}; run `splitedge agent update`")

    def _has_way_back(self, table: _SlotTable) -> bool:
        slot = _other(table.active)
        record = table.slots.get(slot)
        return record is not None and self._why_unusable(slot, record) is None

    def _why_unusable(
        self, slot: Slot, record: BundleRecord, *, for_ever: bool = False
    ) -> str | None:
        """Why a slot's bundle cannot run; `for_ever` leaves out a quarantine that has an end."""
        why = self.why_quarantined(record.digest)
        if why is not None and not (for_ever and self._has_end(record.digest)):
            return f"quarantined ({why})"
        problem = self.damage(slot, record)
        if problem is not None:
            return problem
        try:
            BundleManifest.load(self.folder(slot))
        except BundleError as err:  # undamaged, but written for another version of splitedge
            return str(err)
        return None

    def _has_end(self, digest: str) -> bool:
        return "until" in self._read_quarantine().get(digest, {})

    def _activate(self, table: _SlotTable, slot: Slot, fallback: str | None) -> ActiveBundle:
        record = table.slots[slot]
        if slot != table.active:
            logger.warning("bundle=%s falling back: %s", record.bundle, fallback)
            try:
                self._write(replace(table, active=slot, unproven_starts=None))
            except StorageError as err:  # it runs all the same, and is chosen at the next start
                logger.warning("bundle=%s the fallback was not saved: %s", record.bundle, err)
        folder = self.folder(slot)
        return ActiveBundle(slot, folder, BundleManifest.load(folder), record.digest, fallback)

    def _read(self) -> _SlotTable:
        path = self.state / ACTIVE_NAME
        try:
            return read_json(path.read_bytes(), _slot_table)
        except FileNotFoundError:
            return _SlotTable("a", {})
        except (OSError, SplitedgeError) as err:
            # the slots' files are still there: an update finds them undamaged and only commits
            logger.warning("%s: unreadable, taken as no bundle (%s)", path, err)
            return _SlotTable("a", {})

    def _write(self, table: _SlotTable) -> None:
        write_atomic(self.state / ACTIVE_NAME, orjson.dumps(asdict(table), option=_OPTIONS))

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

    def _quarantine(self, digest: str, bundle: str, why: str, hold_s: float | None) -> None:
        now = datetime.now(UTC)
        entries = self._read_quarantine()
        entries[digest] = {"bundle": bundle, "why": why, "at": now.isoformat(timespec="seconds")}
        if hold_s is not None:
            until = (now + timedelta(seconds=hold_s)).isoformat(timespec="seconds")
            entries[digest]["until"] = until
        logger.warning(
            "bundle=%s quarantined%s: %s",
            *(bundle, "" if hold_s is None else f" for {hold_s:.0f} s", why),
        )
        newest = sorted(entries.items(), key=lambda item: str(item[1].get("at")))
        kept = dict(newest[-_KEPT_QUARANTINED:])
        write_atomic(self.state / QUARANTINE_NAME, orjson.dumps(kept, option=_OPTIONS))


def make_own_folder(folder: Path) -> None:
    """Make a folder of the store if it is missing; a link in its place is removed, not followed.

    An update removes what it does not know in these folders.

    Raises: StorageError.
    """
    if folder.is_symlink():
        folder.unlink()
    make_folder(folder)


def file_damage(path: Path, record: FileRecord) -> str | None:
    """The difference between the file at `path` and its record, in words; None if there is none."""
    try:
        # a symbolic link could point elsewhere by the time the file is loaded
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


def _quarantined(digest: str, entry: Mapping[str, Any]) -> Quarantined:
    until = entry.get("until")
    return Quarantined(
        digest=digest,
        bundle=str(entry.get("bundle")),
        why=str(entry.get("why")),
        at=str(entry.get("at")),
        until=None if until is None else str(until),
    )


def _is_over(entry: Mapping[str, Any]) -> bool:
    """Whether a quarantine with an end has ended; a clock that was set back ends it too."""
    try:
        until = datetime.fromisoformat(entry["until"])
        at = datetime.fromisoformat(entry["at"])
        return not at <= datetime.now(UTC) < until
    except (KeyError, TypeError, ValueError):
        return False


@dataclass(frozen=True, slots=True)
class _SlotTable:
    """Content of active.json.

    Attributes:
        unproven_starts: starts of the active bundle; None once it is confirmed.
    """

    active: Slot
    slots: Mapping[Slot, BundleRecord]
    unproven_starts: int | None = None


def _slot_table(data: dict[str, Any]) -> _SlotTable:
    starts = data["unproven_starts"]
    slots = {_slot(slot): _record(record) for slot, record in data["slots"].items()}
    return _SlotTable(_slot(data["active"]), slots, None if starts is None else int(starts))


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


def _check_inactive(table: _SlotTable, slot: Slot) -> None:
    if table.active == slot and slot in table.slots:
        raise BundleError(f"slot {slot} became the active one meanwhile; update again")
