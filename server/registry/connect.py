"""Connections to the registry's database, with the manners that SQLite needs.

SQLite keeps what was committed through a kill or a power cut (WAL, synchronous FULL), checks
foreign keys, and takes the write lock when a transaction begins: one that reads first and asks
for it later is refused at once if anybody wrote in between, however long it would have waited.
BEGIN is ours, not the driver's, so that a migration is one transaction too.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Final

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import ConnectionPoolEntry

from edge_sdk.durable import make_folder
from edge_sdk.errors import ConfigurationError

BUSY_TIMEOUT_MS: Final = 10_000
READS: Final = "registry_reads"  # execution option of connections that will not write

_EXPECTED: Final = "expected sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/NAME"


def open_engine(url: str) -> Engine:
    """An engine for the database behind `url`; nothing is connected yet.

    A SQLite file is created where missing, readable by its owner only.

    Raises: ConfigurationError for a database we cannot serve; StorageError or OSError for the file.
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
    for pragma in (
        f"busy_timeout={BUSY_TIMEOUT_MS}",
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _on_begin(connection: Connection) -> None:
    reads = connection.get_execution_options().get(READS, False)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")
