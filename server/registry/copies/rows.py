"""Copies of a whole registry, between databases of either kind.

A copy is a SQLite file with all rows of one moment. An older copy is migrated when it is loaded, as
an older database is when a server opens it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sqlalchemy import URL, Connection, Engine, Integer, func, insert, select, text
from sqlalchemy.exc import SQLAlchemyError

from edge_sdk.durable import sync_file
from edge_sdk.errors import ConfigurationError
from server.errors import RegistryError
from server.registry.connect import open_engine, parse_url
from server.registry.failures import cause_of
from server.registry.location import RegistryLocation
from server.registry.migrate import current_version, migrate, newest_version
from server.registry.schema import METADATA

ROWS_AT_ONCE: Final = 1_000


def save_copy(location: RegistryLocation, file: Path) -> None:
    """Write all rows of a registry, as they are at one moment, into a new SQLite file.

    The registry may be in use.

    Raises: RegistryError if it cannot be read, or has another version than this program.
    """
    with _engine(location, "reads") as source, _engine(_file(file), "writes") as target:
        version, newest = current_version(source), newest_version()
        if version != newest:
            raise RegistryError(
                f"registry {location}: has version {version}, this program copies version {newest};"
                " start the server of this release once, or use the release that made it"
            )
        migrate(target)
        with _snapshot(source) as old, target.begin() as new:
            _copy(old, new)
    sync_file(file)


def load_copy(file: Path, location: RegistryLocation) -> None:
    """Write the rows of a copy into an empty registry, all or none.

    Args:
        file: brought to this program's version where it is older.
    Raises: RegistryError; ConfigurationError if the registry is not empty.
    """
    with _engine(_file(file), "writes") as source:
        migrate(source)
        with _engine(location, "writes") as target:
            migrate(target)
            with source.connect() as old, target.begin() as new:
                for table in METADATA.sorted_tables:
                    if new.execute(select(table).limit(1)).first() is not None:
                        raise ConfigurationError(
                            f"registry {location}: expected an empty database, its table"
                            f" {table.name} has rows; make a new one with `createdb`"
                        )
                _copy(old, new)
                _count_on(new)


def check_empty(location: RegistryLocation) -> None:
    """Check that a database has no registry yet, before anything is written.

    Raises: ConfigurationError; RegistryError if it cannot be asked.
    """
    if location.file is not None and not location.file.exists():
        return  # to ask would make it
    with _engine(location, "reads") as engine:
        if current_version(engine) is not None:
            raise ConfigurationError(
                f"registry {location}: expected an empty database, it has a registry already; make"
                " a new one with `createdb`"
            )


def is_outdated(location: RegistryLocation) -> bool:
    """Whether a database waits for its migration, which the next start of a server makes.

    Raises: RegistryError if it cannot be opened.
    """
    with _engine(location, "reads") as engine:
        return current_version(engine) != newest_version()


def faults(location: RegistryLocation) -> list[str]:
    """Sentences on what is wrong with a database; it is only read.

    Raises: RegistryError if it cannot be opened.
    """
    with _engine(location, "reads") as engine:
        version, newest = current_version(engine), newest_version()
        found = []
        if version is None or version > (newest or ""):
            found.append(
                f"it has version {version}, this program knows versions up to {newest}; use the"
                " newer splitedge that migrated it"
            )
        if engine.dialect.name == "sqlite":
            with engine.connect() as connection:
                said = connection.scalars(text("PRAGMA integrity_check")).all()
                if said != ["ok"]:
                    found.append(f"it is damaged ({said[0]}); restore a backup")
                if connection.execute(text("PRAGMA foreign_key_check")).first() is not None:
                    found.append("rows refer to others that are not there; restore a backup")
        return found


def newest_entry(location: RegistryLocation) -> float | None:
    """UTC seconds of the newest change that the registry notes; None in an empty one.

    Raises: RegistryError.
    """
    audit = METADATA.tables["audit"]
    with _engine(location, "reads") as engine, engine.connect() as connection:
        newest: float | None = connection.execute(select(func.max(audit.c.at))).scalar_one()
        return newest


def _copy(source: Connection, target: Connection) -> None:
    for table in METADATA.sorted_tables:  # what others refer to comes first
        found = source.execution_options(yield_per=ROWS_AT_ONCE).execute(select(table))
        for rows in found.mappings().partitions():
            target.execute(insert(table), [dict(row) for row in rows])


def _count_on(target: Connection) -> None:
    """Let PostgreSQL give the numbers after those that were copied."""
    if target.dialect.name != "postgresql":
        return
    for table in METADATA.sorted_tables:
        column = table.autoincrement_column
        if column is None or not isinstance(column.type, Integer):
            continue
        highest = target.execute(select(func.max(column))).scalar_one()
        if highest is not None:
            sequence = func.pg_get_serial_sequence(table.name, column.name)
            target.execute(select(func.setval(sequence, highest)))


@contextmanager
def _snapshot(engine: Engine) -> Iterator[Connection]:
    """A transaction that shows one moment; SQLite has no other kind."""
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection = connection.execution_options(isolation_level="REPEATABLE READ")  # noqa: PLW2901 - the same connection
        yield connection


@contextmanager
def _engine(location: RegistryLocation, use: str) -> Iterator[Engine]:
    engine = open_engine(location.address, "reads" if use == "reads" else "writes")
    try:
        yield engine
    except SQLAlchemyError as err:
        raise RegistryError(f"registry {location}: {cause_of(err)}") from err
    finally:
        engine.dispose()


def _file(file: Path) -> RegistryLocation:
    return RegistryLocation(parse_url(URL.create("sqlite", database=str(file))))
