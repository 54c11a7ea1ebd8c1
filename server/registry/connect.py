"""Connections to the registry's database, with the settings that SQLite and PostgreSQL need.

Reads and writes have connections of their own, so that reads never wait for writes. No wait is
longer than `WRITE_WAIT_S` at each step: for a connection, and for the database's lock.

SQLite keeps committed data through a kill or a power cut (WAL, synchronous FULL) and checks foreign
keys. It has one connection that writes, because it takes one write at a time. A writing transaction
takes the write lock at its begin: if it read first and took the lock later, it would fail at once
after a write by another, without waiting. BEGIN is sent by us, not by the driver, so that a
migration is one transaction too.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import ConnectionPoolEntry

from edge_sdk.durable import make_folder, storage_error
from edge_sdk.errors import ConfigurationError
from server.registry.failures import is_disk_full

# far above a write's own time, and short enough for a device that waits for the answer
WRITE_WAIT_S: Final = 3.0
CONNECT_S: Final = 5
WAL_RETRY_S: Final = 0.01
POSTGRESQL: Final = "postgresql+psycopg"

Use = Literal["reads", "writes"]

_EXPECTED: Final = "expected postgresql://USER@HOST/NAME or sqlite:///FILE"
_FROZEN: Final = "frozen"  # of a connection that shows the database without opening its log


def open_engine(url: str | URL, use: Use = "writes") -> Engine:
    """An engine for the database behind `url`; nothing is connected yet.

    A SQLite file is created where missing, readable by its owner only.

    Raises: ConfigurationError for an unsupported database; StorageError for the file.
    """
    parsed = parse_url(url)
    if parsed.drivername == POSTGRESQL:
        return _open_postgresql(parsed)
    path = sqlite_file(parsed)
    assert path is not None
    _make_file(path)
    # a write waits here until the one before it has ended
    pool = {"pool_size": 1, "max_overflow": 0} if use == "writes" else {}
    engine = create_engine(parsed, hide_parameters=True, pool_timeout=WRITE_WAIT_S, **pool)
    connect = _connect_to_write if use == "writes" else _connect_to_read

    def on_do_connect(
        _dialect: object, entry: ConnectionPoolEntry, words: list[str], options: dict[str, Any]
    ) -> sqlite3.Connection:
        connection = connect(Path(words[0]), options)
        entry.info[_FROZEN] = _is_frozen(connection)
        return connection

    event.listen(engine, "do_connect", on_do_connect)
    event.listen(engine, "checkin", _on_checkin)
    event.listen(engine, "begin", _on_begin_write if use == "writes" else _on_begin_read)
    return engine


def parse_url(url: str | URL) -> URL:
    """The URL of a database that the registry can use; `postgresql://` gets our driver.

    Raises: ConfigurationError, which never shows the URL: it may hold a password.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as err:  # a port that is no number
        raise ConfigurationError(f"registry: {_EXPECTED}, got another URL") from err
    name = parsed.drivername
    if name in ("postgresql", "postgres", POSTGRESQL):
        if not parsed.database:
            raise ConfigurationError("registry: the URL names no database; add /NAME to it")
        password = parsed.query.get("password")  # libpq takes it there too
        if isinstance(password, str):
            parsed = parsed.set(password=password).difference_update_query(["password"])
        return parsed.set(drivername=POSTGRESQL)
    file = sqlite_file(parsed)
    if name.partition("+")[0] == "sqlite" and file is not None:
        return parsed.set(database=str(file.absolute()))
    raise ConfigurationError(f"registry: {_EXPECTED}, got a URL of {name} without a file")


def sqlite_file(url: URL) -> Path | None:
    """The file behind a SQLite URL; None for other databases, or for one in memory."""
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return None
    return Path(str(url.database))


def _open_postgresql(url: URL) -> Engine:
    # a connection to a host that has vanished ends within seconds, as does a wait for a lock
    settings = {
        "application_name": "splitedge",
        "connect_timeout": CONNECT_S,
        "tcp_user_timeout": 1000 * CONNECT_S,
        "options": f"-c lock_timeout={round(1000 * WRITE_WAIT_S)}",
    }
    try:
        return create_engine(
            url,
            # parameters stay out of error texts, so hashes and profiles stay out of logs
            hide_parameters=True,
            pool_pre_ping=True,
            pool_timeout=WRITE_WAIT_S,
            connect_args={key: one for key, one in settings.items() if key not in url.query},
        )
    except ModuleNotFoundError as err:
        raise ConfigurationError(
            f"registry: the driver {err.name} is not installed; pip install 'psycopg[binary]'"
        ) from err


def _make_file(path: Path) -> None:
    make_folder(path.parent, mode=0o700)
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as err:
        raise storage_error(path, 0, err) from err


def _connect_to_write(path: Path, options: dict[str, Any]) -> sqlite3.Connection:
    connection: sqlite3.Connection = sqlite3.connect(path, **options)
    try:
        _set_up(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_to_read(path: Path, options: dict[str, Any]) -> sqlite3.Connection:
    """A connection that cannot write; on a full disk too."""
    try:
        connection = _connect_to_write(path, options)
    except sqlite3.OperationalError as err:
        # the log needs an index of 32 KB beside it, for which there is no room
        if not is_disk_full(err):
            raise
        return _connect_frozen(path, options)
    connection.execute("PRAGMA query_only=ON")
    return connection


def _connect_frozen(path: Path, options: dict[str, Any]) -> sqlite3.Connection:
    """The database as it is now, without the files beside it that SQLite would have to write.

    The connection serves one transaction. With space again, the next one is an ordinary one.
    """
    log = path.with_name(f"{path.name}-wal")
    try:
        logged = log.stat().st_size > 0
    except OSError:
        logged = False
    if not logged:
        name = f"file:{quote(str(path))}?mode=ro&immutable=1"
        frozen: sqlite3.Connection = sqlite3.connect(name, **{**options, "uri": True})
        frozen.isolation_level = None
        return frozen
    # The server was killed, and its last commits are only in the log. With the lock for itself
    # alone, SQLite keeps the log's index in memory.
    copy: sqlite3.Connection = sqlite3.connect(":memory:", **options)
    with contextlib.closing(sqlite3.connect(path, **options)) as alone:
        alone.execute(f"PRAGMA busy_timeout={round(1000 * WRITE_WAIT_S)}")
        alone.execute("PRAGMA locking_mode=EXCLUSIVE")
        alone.backup(copy)
    copy.isolation_level = None
    return copy


def _is_frozen(connection: sqlite3.Connection) -> bool:
    mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
    return bool(mode != "wal")


def _set_up(connection: sqlite3.Connection) -> None:
    connection.isolation_level = None  # the driver begins no transaction of its own
    connection.execute(f"PRAGMA busy_timeout={round(1000 * WRITE_WAIT_S)}")
    _use_wal(connection)
    for pragma in ("synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch to the write-ahead log.

    SQLite does not apply its busy timeout here: of two programs that open a new database at once,
    one is refused immediately.
    """
    give_up = time.monotonic() + WRITE_WAIT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as err:
            primary_code = err.sqlite_errorcode & 0xFF  # the rest tells kinds of it apart
            if primary_code != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
            time.sleep(WAL_RETRY_S)
        else:
            return


def _on_checkin(_connection: DBAPIConnection | None, entry: ConnectionPoolEntry) -> None:
    if entry.info.get(_FROZEN):
        entry.invalidate(soft=True)


def _on_begin_read(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")


def _on_begin_write(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
