"""Transactions on the registry's database; the parts of the registry share them.

A reading transaction takes no lock and waits for no write. What SQLAlchemy raises leaves as a
RegistryError, without the cause, because peers read the text.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final, Self

from sqlalchemy import URL, Connection, Select, insert, text
from sqlalchemy.exc import SQLAlchemyError

from edge_sdk.durable import free_bytes
from edge_sdk.wire.topics import ID_PATTERN
from server.errors import BadRequestError, RegistryError, gist
from server.registry.connect import open_engine, sqlite_file
from server.registry.failures import WRITE_BYTES, cause_of, is_disk_full, is_held
from server.registry.migrate import current_version, migrate, newest_version
from server.registry.schema import audit

logger = logging.getLogger(__name__)

MAX_ID: Final = 63
# kinds of entries of the audit log: what changed the registry, and what peers did
CHANGE: Final = "change"
EVENT: Final = "event"

OPERATOR: Final = "operator"
READER: Final = "reader"  # of the dashboard, who changes nothing

_SOURCE: Final = ContextVar("source", default="server")
_ACTOR: Final[ContextVar[Callable[[], str | None]]] = ContextVar("actor", default=lambda: None)
_CHANGES: Final = "changes"  # of a transaction that writes
CHECKPOINT_WAIT_MS: Final = 1_000
# any fixed number
_POSTGRESQL_LOCK: Final = 0x61756474


class Transactions:
    """The connections to one database.

    Args:
        url: of a database that already has this program's version.
        clock: UTC seconds since 1970.
    Raises: ConfigurationError.
    """

    def __init__(self, url: str | URL, *, clock: Callable[[], float] = time.time) -> None:
        self.now = clock
        self._writer = open_engine(url)
        self._reader = open_engine(url, "reads")
        self._complaint = _Complaint()

    @classmethod
    def open(cls, url: str | URL, *, clock: Callable[[], float] = time.time) -> Self:
        """Create the database or bring it up to date, and open it.

        One that is up to date is opened without a write, so on a full disk too.

        Raises: ConfigurationError for the URL; RegistryError if the database cannot be opened or is
            newer than this program.
        """
        opened = cls(url, clock=clock)
        try:
            if current_version(opened._reader) != newest_version():
                migrate(opened._writer)
        except SQLAlchemyError as err:
            opened.close()
            shown = opened._writer.url.render_as_string(hide_password=True)
            raise RegistryError(f"registry {shown}: cannot be opened: {cause_of(err)}") from err
        except BaseException:
            opened.close()
            raise
        return opened

    def checkpoint(self) -> None:
        """Write what is in SQLite's log to the database itself, within about a second.

        SQLite does so by itself when the last program closes the database; another program may
        have it open. A failure is logged: the log keeps what was committed.
        """
        if sqlite_file(self._writer.url) is None:
            return
        try:
            with self._writer.connect() as connection:
                raw = connection.connection
                raw.cursor().execute(f"PRAGMA busy_timeout={CHECKPOINT_WAIT_MS}")
                raw.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
                connection.invalidate()  # its timeout is another one now
        except SQLAlchemyError as err:
            logger.warning("registry: the log is not folded in: %s", cause_of(err))
        except sqlite3.Error as err:
            logger.warning("registry: the log is not folded in: %s", err)

    def close(self) -> None:
        """Close the connections."""
        self._reader.dispose()
        self._writer.dispose()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that will not write; it waits for no write, and works on a full disk."""
        with self._our_errors("reading"), self._reader.connect() as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that is kept if its block ends without an exception."""
        with self._our_errors("writing"), self._writer.begin() as connection:
            changes: list[dict[str, Any]] = []
            connection.info[_CHANGES] = changes
            yield connection
            _add(connection, changes)

    @contextlib.contextmanager
    def _our_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as err:
            known = True
            if is_held(err):
                told = f"registry: another program holds the database, {what} must wait; try again"
            elif is_disk_full(err):
                told = f"registry: nothing can be written: {self._space()}"
            else:
                told, known = "registry: the database cannot be used now; see its log", False
            # the cause names hosts and paths, so it is only logged
            ours = RegistryError(told)
            self._complaint.say(what, ours, err, traceback=not known)
            raise ours from err
        self._complaint.withdraw(what)

    def _space(self) -> str:
        """Bytes that a write needs, and those that there are, in words."""
        file = sqlite_file(self._writer.url)
        if file is None:
            return "the disk of PostgreSQL is full; free some space there"
        return (
            f"needs {WRITE_BYTES / 1e6:.3f} MB, has {free_bytes(file.parent) / 1e6:,.3f} MB; free"
            " some space on the server's disk, or replace the disk if it is failing"
        )


class _Complaint:
    """Says a trouble of the database once, until it is over; a full disk must not grow a log."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said: dict[str, str] = {}  # by what failed, without the numbers

    def say(self, what: str, told: RegistryError, err: SQLAlchemyError, *, traceback: bool) -> None:
        """Log the trouble with its cause, unless it was the last that was said."""
        kind = gist(told)
        with self._lock:
            known = self._said.get(what) == kind
            self._said[what] = kind
        if not known:
            logger.error("%s (%s)", told, cause_of(err), exc_info=err if traceback else None)

    def withdraw(self, what: str) -> None:
        """Say that the trouble is over, if there was one."""
        if what not in self._said:
            return
        with self._lock:
            said = self._said.pop(what, None)
        if said is not None:
            logger.info("registry: %s works again", what)


def one_row(connection: Connection, query: Select[Any]) -> Mapping[str, Any] | None:
    """The only row of a query by column names; None if there is none."""
    row = connection.execute(query).mappings().one_or_none()
    return None if row is None else {str(key): value for key, value in row.items()}


def all_rows(connection: Connection, query: Select[Any]) -> list[dict[str, Any]]:
    """All rows of a query by column names; for many rows it is twice as fast as `mappings`."""
    found = connection.execute(query)
    names = tuple(found.keys())
    return [dict(zip(names, row, strict=True)) for row in found]


def record(connection: Connection, at: float, who: str, what: str, detail: str) -> None:
    """Add a change to the audit log as its transaction ends, from the source of `acting_from`.

    Args:
        who: a device, "server", or OPERATOR, as `acting` takes it.
    """
    values = {"at": at, "until": at, "who": acting(who), "what": what, "detail": detail}
    connection.info[_CHANGES].append({**values, "source": _SOURCE.get(), "kind": CHANGE})


def acting(who: str) -> str:
    """The name under which a change is kept: for OPERATOR the actor of `acting_from`, if any."""
    return (_ACTOR.get()() or OPERATOR) if who == OPERATOR else who


def take_turns(connection: Connection, key: int) -> None:
    """Wait until no other transaction that took its turn for the same `key` is under way.

    It matters on PostgreSQL; on SQLite, writers take turns anyway.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": key})


def _add(connection: Connection, changes: list[dict[str, Any]]) -> None:
    """Add a transaction's changes to the audit log, as the last thing that it does.

    Their ids grow in the order of commits, because followers of the registry read only what is
    above the last id. On PostgreSQL a lock sees to it; nothing else is locked after it, so it
    causes no deadlock. On SQLite, writers take turns anyway.
    """
    if not changes:
        return
    take_turns(connection, _POSTGRESQL_LOCK)
    connection.execute(insert(audit), changes)


@contextlib.contextmanager
def acting_from(source: str, who: Callable[[], str | None] = lambda: None) -> Iterator[None]:
    """Changes inside the block come from `source`: an address, or a command's user.

    Args:
        who: asked at each change of the operator's: the key or the person that acts for the
            operator, or None.
    """
    before, actor = _SOURCE.set(source), _ACTOR.set(who)
    try:
        yield
    finally:
        _SOURCE.reset(before)
        _ACTOR.reset(actor)


def check_id(value: str, what: str) -> str:
    """Return the id of a device, a fleet or a model, if it is one.

    Raises: BadRequestError naming `what`.
    """
    if not ID_PATTERN.fullmatch(value):
        raise BadRequestError(
            f"{what}: expected 1 to {MAX_ID} of a-z, 0-9 and '-', got {value[:100]!r}"
        )
    return value
