"""Migration of a registry's database to this program's version, in full or not at all."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, text

from edge_sdk.durable import sync_file, sync_folder
from server.errors import RegistryError
from server.registry.connect import sqlite_file

logger = logging.getLogger(__name__)

SCRIPTS: Final = Path(__file__).parent / "migrations"

# any fixed number: two servers that start at once both lock it
_POSTGRESQL_LOCK: Final = 0x73706C74


def current_version(engine: Engine) -> str | None:
    """The version of the database, None for an empty one; it is only read."""
    with engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def newest_version(scripts: Path = SCRIPTS) -> str | None:
    """The version that this program migrates databases to."""
    return ScriptDirectory.from_config(alembic_config(scripts)).get_current_head()


def migrate(engine: Engine, scripts: Path = SCRIPTS) -> None:
    """Upgrade the database to the newest version in `scripts`, in one transaction.

    An existing SQLite file is first copied to `{name}.bak-{its version}`; a PostgreSQL database is
    backed up by its administrator. Two programs that start at once take turns.

    Raises: RegistryError naming both versions if the database is newer than this program.
    """
    config = alembic_config(scripts)
    script = ScriptDirectory.from_config(config)
    known = {revision.revision for revision in script.walk_revisions()}
    newest = script.get_current_head()
    with engine.begin() as connection:
        _take_turns(connection)
        current = MigrationContext.configure(connection).get_current_revision()
        if current == newest:
            return
        file = sqlite_file(engine.url)
        if current is not None:
            if current not in known:
                raise _newer(engine, current, newest)
            if file is not None:
                backup = file.with_name(f"{file.name}.bak-{current}")
                _copy(file, backup)
                logger.info("registry: version %s kept as %s", current, backup)
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    if current is None:
        logger.info("registry: made, version %s", newest)
    else:
        logger.info("registry: migrated from version %s to %s", current, newest)


def alembic_config(scripts: Path = SCRIPTS) -> Config:
    """Alembic's settings, without its command line and ini file."""
    config = Config()
    config.set_main_option("script_location", str(scripts).replace("%", "%%"))
    config.set_main_option("recursive_version_locations", "true")  # `versions` has folders
    return config


def _take_turns(connection: Connection) -> None:
    # on SQLite, BEGIN IMMEDIATE has already taken the lock
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _POSTGRESQL_LOCK})


def _newer(engine: Engine, current: str, newest: str | None) -> RegistryError:
    file = sqlite_file(engine.url)
    backups = [] if file is None else sorted(file.parent.glob(f"{file.name}.bak-*"))
    older = (
        f", or restore {backups[-1]}" if backups else ", or restore a backup that you made before"
    )
    return RegistryError(
        f"registry: the database has version {current}, this program knows versions up to "
        f"{newest}; start the newer splitedge that migrated it{older}"
    )


def _copy(source: Path, target: Path) -> None:
    """Copy a live database by SQLite's own function, which reads the write-ahead log too."""
    temporary = target.with_name(f"{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    os.close(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    # a second connection, because the one with the write lock cannot be copied from
    with (
        contextlib.closing(sqlite3.connect(source)) as old,
        contextlib.closing(sqlite3.connect(temporary)) as new,
    ):
        old.backup(new)
    sync_file(temporary)
    temporary.replace(target)
    sync_folder(target.parent)
