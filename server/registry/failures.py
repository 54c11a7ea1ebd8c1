"""Failures of the database, told apart: a full disk, a lock that others hold, a database away."""

from __future__ import annotations

import sqlite3
from typing import Final

from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

# a transaction of some pages, and the log's index of 32 KB
WRITE_BYTES: Final = 131_072

# EFBIG and a failing card show as the second, a file system that became read-only as the third
_NO_SPACE: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY)
_HELD: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
# PostgreSQL calls these disk_full, and lock_not_available, deadlock_detected and
# too_many_connections
_POSTGRESQL_FULL: Final = ("53100",)
_POSTGRESQL_HELD: Final = ("55P03", "40P01", "53300")


def is_disk_full(err: BaseException) -> bool:
    """Whether the database could not be written for want of space, or for a failing disk."""
    return _is(err, _NO_SPACE, _POSTGRESQL_FULL)


def is_held(err: BaseException) -> bool:
    """Whether others held the database for longer than a write may wait."""
    return isinstance(err, PoolTimeoutError) or _is(err, _HELD, _POSTGRESQL_HELD)


def cause_of(err: SQLAlchemyError) -> str:
    """The driver's own words, on one line."""
    return " ".join(str(getattr(err, "orig", None) or err).split())


def _is(err: BaseException, sqlite: tuple[int, ...], postgresql: tuple[str, ...]) -> bool:
    cause = err.orig if isinstance(err, DBAPIError) else err
    if isinstance(cause, sqlite3.Error):
        # the first byte is the kind, the rest tells cases of it apart
        return getattr(cause, "sqlite_errorcode", -1) & 0xFF in sqlite
    return getattr(cause, "sqlstate", None) in postgresql
