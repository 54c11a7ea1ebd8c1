"""Connections to the registry's database, with the settings that SQLite needs.

SQLite keeps committed data through a kill or a power cut (WAL, synchronous FULL) and checks foreign
keys. A transaction takes the write lock at its begin: if it read first and took the lock later, it
would fail at once after a write by another, without waiting for the timeout. BEGIN is sent by us,
not by the driver, so that a migration is one transaction too.
"""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path
from typing import Final

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import ConnectionPoolEntry

from edge_sdk.durable import make_folder
from edge_sdk.errors import ConfigurationError

BUSY_TIMEOUT_MS: Final = 10_000
WAL_RETRY_S: Final = 0.01
READS: Final = "registry_reads"  # execution option of connections that will not write

_EXPECTED: Final = "expected sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/NAME"


def open_engine(url: str) -> Engine:
    """An engine for the database behind `url`; nothing is connected yet.

    A SQLite file is created where missing, readable by its owner only.

    Raises: ConfigurationError for an unsupported database; StorageError or OSError for the file.
    """
    try:
        parsed = make_url(url)
        # parameters stay out of error texts, so hashes and profiles stay out of logs
        engine = create_engine(parsed, hide_parameters=True, pool_pre_ping=True)
    except ArgumentError as err:
        raise ConfigurationError(f"registry: {_EXPECTED}, got another URL") from err
    except ModuleNotFoundError as err:
        raise ConfigurationError(
            f"registry: the driver {err.name} is not installed; pip install 'psycopg[binary]'"
        ) from err
    if engine.dialect.name == "postgresql":
        return engine
    path = sqlite_file(parsed)
    if path is None:
        raise ConfigurationError(f"registry: {_EXPECTED}, got {engine.dialect.name} without a file")
    make_folder(path.parent, mode=0o700)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    event.listen(engine, "connect", _on_connect)
    event.listen(engine, "begin", _on_begin)
    return engine


def sqlite_file(url: URL) -> Path | None:
    """The file behind a SQLite URL; None for other databases, or for one in memory."""
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return None
    return Path(str(url.database))


def _on_connect(connection: sqlite3.Connection, _entry: ConnectionPoolEntry) -> None:
    connection.isolation_level = None  # the driver begins no transaction of its own
    connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    _use_wal(connection)
    for pragma in ("synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch to the write-ahead log.

    SQLite does not apply its busy timeout here: of two programs that open a new database at once,
    one is refused immediately.
    """
    give_up = time.monotonic() + BUSY_TIMEOUT_MS / 1e3
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


def _on_begin(connection: Connection) -> None:
    reads = connection.get_execution_options().get(READS, False)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")
