"""Outbox: queries without a reply, stored on disk until the application has their late answers.

`{state}/outbox.db` holds each query's tensor as a frame, later its answer in place of the frame. A
query that `put` accepted survives a kill and a power cut (write-ahead log, synchronous=FULL: one
fsync a commit), and is deleted only when the application acknowledges it by id. MQTT's QoS 1 gives
no such guarantee: a broker that is killed loses messages it acknowledged.

The order is that of `put`; the clock may jump. A second query or answer with one id is ignored.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import orjson

from edge_sdk.answers.prediction import SERVER, LateAnswer, Prediction
from edge_sdk.errors import SplitedgeError, StorageError
from edge_sdk.manifest import BundleManifest
from edge_sdk.wire.frames import Limits, Tensor, pack_request, unpack

logger = logging.getLogger(__name__)

OUTBOX_NAME: Final = "outbox.db"
ROWS_MAX: Final = 10_000
BYTES_MAX: Final = 64_000_000

# Errors of a row that a worn card damaged, or that an earlier splitedge wrote.
_UNREADABLE: Final = (SplitedgeError, ValueError, TypeError, LookupError)
_VERSION: Final = 1
_SCHEMA: Final = """
CREATE TABLE bundle (name TEXT PRIMARY KEY, manifest BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE query (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    asked_at REAL NOT NULL,
    bundle TEXT NOT NULL REFERENCES bundle (name),
    uncertainty REAL,   -- NULL for nan
    threshold REAL NOT NULL,
    frame BLOB,     -- NULL once answered
    answer BLOB     -- JSON; NULL until answered
);
CREATE INDEX unanswered ON query (position) WHERE answer IS NULL;
"""


@dataclass(frozen=True, slots=True)
class QueuedQuery:
    """One query that waits for the server's answer.

    Attributes:
        asked_at: seconds since 1970, by the device's clock.
        manifest: of the bundle that made the query, which may not be the one that runs now.
        tensor: the smashed data to send.
        uncertainty, threshold: of the exit head and its gate at that time.
    """

    id: str
    asked_at: float
    manifest: BundleManifest
    tensor: Tensor
    uncertainty: float
    threshold: float


@dataclass(frozen=True, slots=True)
class Answer:
    """The server's answer to one query, or the reason why there will be none."""

    label: int = -1
    probabilities: Sequence[float] = ()
    latency_ms: float = 0.0
    reason: str = ""


class Outbox:
    """The queries of one state folder, readable by its owner only. May be used by several threads.

    While the disk is full, read-only or missing each call raises StorageError; no restart is needed
    afterwards. A damaged file is renamed and a new one is created.

    Args:
        rows_max, bytes_max: a new query is refused above either limit; answers that are not
            acknowledged count as rows.
    """

    def __init__(
        self, state: Path, *, rows_max: int = ROWS_MAX, bytes_max: int = BYTES_MAX
    ) -> None:
        self._path = state / OUTBOX_NAME
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._limits = Limits(frame_bytes=bytes_max, elements=bytes_max)
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._rows = 0
        self._bytes = 0
        self._closed = False

    def put(self, query: QueuedQuery) -> bool:
        """Store a query; on return it is on the disk.

        Returns: False if the outbox is full.
        Raises: StorageError.
        """
        frame = pack_request({}, [query.tensor])
        name = query.manifest.bundle
        with self._transaction() as database:
            if self._rows >= self._rows_max or self._bytes + len(frame) > self._bytes_max:
                return False
            known = database.execute("SELECT 1 FROM bundle WHERE name = ?", (name,)).fetchone()
            if known is None:
                manifest = query.manifest.to_json()
                database.execute("INSERT INTO bundle VALUES (?, ?)", (name, manifest))
            done = database.execute(
                "INSERT OR IGNORE INTO query (id, asked_at, bundle, uncertainty, threshold, frame)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (query.id, query.asked_at, name, query.uncertainty, query.threshold, frame),
            )
            database.execute("COMMIT")
            self._rows += done.rowcount
            self._bytes += done.rowcount * len(frame)
        return True

    def waiting(self, at_most: int) -> list[QueuedQuery]:
        """The oldest queries without an answer.

        A query that cannot be read is answered with the reason: else it would block the others.

        Raises: StorageError.
        """
        while True:
            readable, broken = self._oldest(at_most)
            if not broken:
                return readable
            self.answer(broken)

    def _oldest(self, at_most: int) -> tuple[list[QueuedQuery], list[tuple[str, Answer]]]:
        with self._transaction() as database:
            rows = database.execute(
                "SELECT id, asked_at, manifest, frame, uncertainty, threshold"
                " FROM query JOIN bundle ON bundle = name"
                " WHERE answer IS NULL ORDER BY position LIMIT ?",
                (at_most,),
            ).fetchall()
        read = _manifests()
        readable: list[QueuedQuery] = []
        broken: list[tuple[str, Answer]] = []
        for identifier, asked_at, manifest, frame, uncertainty, threshold in rows:
            try:
                tensor = unpack(frame, self._limits).tensors[0]
                known = read(manifest)
            except _UNREADABLE as err:
                logger.warning("query=%s cannot be read: %s", identifier, err)
                broken.append((identifier, Answer(reason=f"the query cannot be read: {err}")))
            else:
                number = _number(uncertainty)
                readable.append(QueuedQuery(identifier, asked_at, known, tensor, number, threshold))
        return readable, broken

    def unanswered(self) -> int:
        """Number of queries without an answer.

        Raises: StorageError.
        """
        with self._transaction() as database:
            count: int = database.execute(
                "SELECT count(*) FROM query WHERE answer IS NULL"
            ).fetchone()[0]
        return count

    def answer(self, answers: Sequence[tuple[str, Answer]]) -> None:
        """Replace queries by their answers; unknown and answered ids are ignored.

        Raises: StorageError; then no answer is stored.
        """
        with self._transaction() as database:
            freed = 0
            for identifier, answer in answers:
                row = database.execute(
                    "SELECT coalesce(length(frame), 0) FROM query WHERE id = ? AND answer IS NULL",
                    (identifier,),
                ).fetchone()
                if row is None:
                    continue
                database.execute(
                    "UPDATE query SET answer = ?, frame = NULL WHERE id = ?",
                    (orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), identifier),
                )
                freed += row[0]
            database.execute("COMMIT")
            self._bytes -= freed

    def answers(self) -> list[LateAnswer]:
        """The answers that are not acknowledged yet, in the order of their queries.

        An answer that cannot be read says so in its `reason`.

        Raises: StorageError.
        """
        with self._transaction() as database:
            rows = database.execute(
                "SELECT id, asked_at, manifest, uncertainty, threshold, answer"
                " FROM query JOIN bundle ON bundle = name"
                " WHERE answer IS NOT NULL ORDER BY position"
            ).fetchall()
        read = _manifests()
        return [
            _late_answer(
                answer,
                read,
                manifest,
                identifier=identifier,
                asked_at=asked_at,
                uncertainty=_number(uncertainty),
                threshold=threshold,
            )
            for identifier, asked_at, manifest, uncertainty, threshold, answer in rows
        ]

    def acknowledge(self, identifier: str) -> bool:
        """Delete an answered query.

        Returns: whether there was an answer with that id.
        Raises: StorageError.
        """
        with self._transaction() as database:
            done = database.execute(
                "DELETE FROM query WHERE id = ? AND answer IS NOT NULL", (identifier,)
            )
            database.execute("COMMIT")
            self._rows -= done.rowcount
        return done.rowcount > 0

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._closed = True
            self._disconnect()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """The database in a transaction, which is rolled back unless the block commits it."""
        with self._lock:
            if self._closed:
                raise StorageError(f"{self._path}: the outbox is closed")
            try:
                database = self._database or self._open()
                self._database = database
                database.execute("BEGIN")
                try:
                    yield database
                finally:
                    if database.in_transaction:
                        database.execute("ROLLBACK")
            except sqlite3.Error as err:
                self._disconnect()  # the next call opens the file again
                raise StorageError(
                    f"{self._path}: {err}; free some space, or check the card and its mount"
                ) from err

    def _disconnect(self) -> None:
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.close()
            self._database = None

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except sqlite3.OperationalError:
            raise  # a fault of the disk, not of the file
        except sqlite3.DatabaseError as err:
            aside = self._path.with_name(f"{OUTBOX_NAME}.damaged")
            logger.error("%s: %s; renamed to %s", self._path, err, aside.name)  # noqa: TRY400 - the traceback would say nothing more
            try:
                self._path.replace(aside)
                for ending in ("-wal", "-shm"):
                    self._path.with_name(OUTBOX_NAME + ending).unlink(missing_ok=True)
            except OSError as failure:
                raise StorageError(f"{self._path}: damaged, and {failure}") from failure
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        # a query may be a camera image; SQLite gives its other files the mode of this one
        with contextlib.suppress(OSError):
            self._path.touch(mode=0o600)
            self._path.chmod(0o600)
        # one connection under one lock; autocommit, so that each transaction is explicit
        database = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")
            version: int = database.execute("PRAGMA user_version").fetchone()[0]
            if version > _VERSION:
                raise StorageError(
                    f"{self._path}: written by a later version of splitedge; update splitedge"
                )
            if version == 0:
                database.executescript(
                    f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;"
                )
            self._rows, self._bytes = database.execute(
                "SELECT count(*), coalesce(sum(length(frame)), 0) FROM query"
            ).fetchone()
            # manifests of bundles without a query
            database.execute("DELETE FROM bundle WHERE name NOT IN (SELECT bundle FROM query)")
        except (sqlite3.Error, SplitedgeError):
            database.close()
            raise
        return database


def _late_answer(
    answer: bytes,
    read: Callable[[bytes], BundleManifest],
    manifest: bytes,
    *,
    identifier: str,
    asked_at: float,
    uncertainty: float,
    threshold: float,
) -> LateAnswer:
    try:
        fields = orjson.loads(answer)
        if fields["reason"]:
            return LateAnswer(identifier, None, asked_at, fields["reason"])
        prediction = Prediction(
            label=fields["label"],
            class_name=read(manifest).class_names[fields["label"]],
            probabilities=np.array(fields["probabilities"], np.float32),
            uncertainty=uncertainty,
            threshold=threshold,
            source=SERVER,
            latency_ms=fields["latency_ms"],
            id=identifier,
        )
    except _UNREADABLE as err:
        return LateAnswer(identifier, None, asked_at, f"the answer cannot be read: {err}")
    return LateAnswer(identifier, prediction, asked_at)


def _manifests() -> Callable[[bytes], BundleManifest]:
    """A reader of manifests that parses each once: many rows share few of them."""
    known: dict[bytes, BundleManifest] = {}

    def read(raw: bytes) -> BundleManifest:
        if raw not in known:
            known[raw] = BundleManifest.from_json(raw)
        return known[raw]

    return read


def _number(value: float | None) -> float:
    return math.nan if value is None else value
