"""Migrations: whole or not at all, after a backup, and never backwards."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, inspect, text

from server.errors import RegistryError
from server.registry.connect import open_engine
from server.registry.database import Registry
from server.registry.migrate import SCRIPTS, alembic_config, migrate
from server.registry.records import FleetModel
from server.registry.schema import METADATA

if TYPE_CHECKING:
    from tests.serving.postgresql import PostgreSql

NEXT_VERSION = '''"""A later version of the program: another column, another table."""

import sqlalchemy as sa
from alembic import op

revision = "{later}"
down_revision = "{newest}"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("devices", sa.Column("site", sa.String(63)))
    op.execute("UPDATE devices SET site = 'shed'")
    {between}
    op.create_table("sites", sa.Column("id", sa.String(63), primary_key=True))
'''
NEWEST = max(path.name[1:5] for path in (SCRIPTS / "versions").glob("v*.py"))
LATER = f"{int(NEWEST) + 1:04d}"
STALL = 'print("half", flush=True); import time; time.sleep(60)'
MIGRATE = (
    "import sys; from pathlib import Path; from server.registry.connect import open_engine;"
    "from server.registry.migrate import migrate; migrate(open_engine(sys.argv[1]), "
    "*map(Path, sys.argv[2:]))"
)

# four processes leave one line together, and each opens the same new database
OPEN_AT_ONCE = """
import os, sys, time
from server.registry.database import Registry

start, children = time.monotonic() + 0.05, []
for _ in range(4):
    child = os.fork()
    if child == 0:
        time.sleep(max(0.0, start - time.monotonic()))
        Registry.open(sys.argv[1])
        os._exit(0)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
"""


@pytest.fixture
def url(registry_url: str) -> str:
    """A registry of this version with one device, on each kind of database."""
    registry = Registry.open(registry_url)
    registry.redeem_token(registry.create_token(), "pi", {})
    registry.close()
    return registry_url


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database without a single table."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/new/registry.db"
        return
    instance: PostgreSql = request.getfixturevalue("postgresql")
    name = instance.new_database("template0")
    yield instance.url(name)
    instance.drop(name)


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    engine = open_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A registry of this version with one device, in a SQLite file."""
    file = tmp_path / "registry.db"
    registry = Registry.open(f"sqlite:///{file}")
    registry.redeem_token(registry.create_token(), "pi", {})
    registry.close()
    return file


@pytest.fixture
def file_engine(file: Path) -> Iterator[Engine]:
    engine = open_engine(f"sqlite:///{file}")
    yield engine
    engine.dispose()


def later_program(tmp_path: Path, between: str = "") -> Path:
    """The migrations of a program one version ahead of this one."""
    scripts = tmp_path / "later 100%"
    shutil.copytree(SCRIPTS, scripts, ignore=shutil.ignore_patterns("__pycache__"))
    text = NEXT_VERSION.format(between=between, later=LATER, newest=NEWEST)
    (scripts / "versions" / f"v{LATER}_sites.py").write_text(text)
    return scripts


def state(url: str | Path) -> tuple[str, list[str], bool]:
    """Version, device ids, and whether anything of version LATER is there."""
    engine = open_engine(f"sqlite:///{url}" if isinstance(url, Path) else url, "reads")
    with engine.connect() as connection:
        version = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
        ids = connection.scalars(text("SELECT id FROM devices ORDER BY id")).all()
        columns = [column["name"] for column in inspect(connection).get_columns("devices")]
        tables = inspect(connection).get_table_names()
        if engine.dialect.name == "sqlite":
            assert connection.scalars(text("PRAGMA integrity_check")).all() == ["ok"]
    engine.dispose()
    return str(version), list(ids), "sites" in tables or "site" in columns


def test_the_migrations_make_exactly_the_tables_of_the_schema(engine: Engine) -> None:
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_server_default": True})
        assert compare_metadata(context, METADATA) == []


def test_a_new_version_keeps_the_rows(engine: Engine, url: str, tmp_path: Path) -> None:
    migrate(engine, later_program(tmp_path))
    assert state(url) == (LATER, ["pi"], True)


def test_a_new_version_keeps_a_copy_of_the_old_file(
    file_engine: Engine, file: Path, tmp_path: Path
) -> None:
    migrate(file_engine, later_program(tmp_path))
    assert state(file) == (LATER, ["pi"], True)
    backup = tmp_path / f"registry.db.bak-{NEWEST}"
    assert backup.stat().st_mode & 0o777 == 0o600
    assert state(backup) == (NEWEST, ["pi"], False)
    registry = Registry.open(f"sqlite:///{backup}")
    assert registry.device("pi").id == "pi"
    registry.close()


def test_the_copy_holds_what_is_only_in_the_write_ahead_log(
    file_engine: Engine, file: Path, tmp_path: Path
) -> None:
    registry = Registry.open(f"sqlite:///{file}")
    registry.redeem_token(registry.create_token(), "late", {})
    assert (tmp_path / "registry.db-wal").stat().st_size > 0
    migrate(file_engine, later_program(tmp_path))
    registry.close()
    assert state(tmp_path / f"registry.db.bak-{NEWEST}")[1] == ["late", "pi"]


def test_opening_again_changes_nothing_and_copies_nothing(file: Path, tmp_path: Path) -> None:
    Registry.open(f"sqlite:///{file}").close()
    assert [path.name for path in tmp_path.iterdir()] == ["registry.db"]


def test_a_newer_database_is_refused_by_both_versions(
    engine: Engine, url: str, tmp_path: Path
) -> None:
    """FAULTS row 31: the versions are named, and nothing is changed."""
    migrate(engine, later_program(tmp_path))
    engine.dispose()
    with pytest.raises(RegistryError) as caught:
        Registry.open(url)
    told = str(caught.value)
    assert f"has version {LATER}, this program knows versions up to {NEWEST}" in told
    assert "start the newer splitedge" in told
    assert state(url) == (LATER, ["pi"], True)


def test_a_new_registry_is_made_and_not_migrated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "server.registry.migrate"):
        Registry.open(f"sqlite:///{tmp_path}/new.db").close()
    assert caplog.messages == [f"registry: made, version {NEWEST}"]


def test_the_way_back_from_a_newer_file_is_the_copy_of_the_old(
    file_engine: Engine, file: Path, tmp_path: Path
) -> None:
    """FAULTS row 31: the copy made before the migration is named, and opens."""
    migrate(file_engine, later_program(tmp_path))
    file_engine.dispose()
    backup = tmp_path / f"registry.db.bak-{NEWEST}"
    with pytest.raises(RegistryError, match=f"restore {backup}"):
        Registry.open(f"sqlite:///{file}")
    registry = Registry.open(f"sqlite:///{backup}")
    assert [device.id for device in registry.devices()] == ["pi"]
    registry.close()


def test_a_migration_that_fails_leaves_the_old_version(
    engine: Engine, url: str, tmp_path: Path
) -> None:
    with pytest.raises(ZeroDivisionError):
        migrate(engine, later_program(tmp_path, between="1 / 0"))
    assert state(url) == (NEWEST, ["pi"], False)
    engine.dispose()
    Registry.open(url).close()


def test_a_server_killed_in_a_migration_leaves_the_old_version(url: str, tmp_path: Path) -> None:
    """FAULTS row 20: kill -9 between two changes of a migration."""
    scripts = later_program(tmp_path, between=STALL)
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", MIGRATE, url, str(scripts)],
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        readable, _, _ = select.select([child.stdout], [], [], 30)
        assert readable
        assert os.read(child.stdout.fileno(), 4) == b"half"
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert state(url) == (NEWEST, ["pi"], False)
    # and the next start carries it through
    engine = open_engine(url)
    migrate(engine, later_program(tmp_path / "again"))
    engine.dispose()
    assert state(url) == (LATER, ["pi"], True)


def test_programs_that_start_at_once_take_turns(empty_url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", OPEN_AT_ONCE, empty_url],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("[0, 0, 0, 0]\n", "")
    assert state(empty_url) == (NEWEST, [], False)


def at_version(file: Path, version: str) -> sqlite3.Connection:
    """A new registry as the program of that version makes it."""
    engine = open_engine(f"sqlite:///{file}")
    config = alembic_config()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, version)
    engine.dispose()
    return sqlite3.connect(file)


def test_fleets_keep_the_model_that_they_had_before_there_were_assignments(tmp_path: Path) -> None:
    file = tmp_path / "registry.db"
    before = at_version(file, "0001")
    with before:
        device = "INSERT INTO devices VALUES (?, ?, 'c', '{}', 1, 'cnn/2/d1', 1.0, NULL, NULL)"
        before.executemany(device, [("pi-1", "barn"), ("pi-2", "shed"), ("pi-3", "shed")])
        published = [("cnn", 1, 0, 10.0), ("cnn", 2, 1, 30.0), ("vit", 1, 1, 20.0)]
        before.executemany("INSERT INTO models VALUES (?, ?, ?, ?)", published)
    before.close()
    registry = Registry.open(f"sqlite:///{file}")
    catalogue = registry.catalogue
    # it was: the active version of the name published last
    assert catalogue.fleets() == (
        FleetModel("barn", "cnn", 2, pinned=False, assigned=True),
        FleetModel("shed", "cnn", 2, pinned=False, assigned=True),
    )
    assert registry.device("pi-1").bundle == "cnn/2/d1"
    now, left = catalogue.roll_back("cnn")
    assert (str(now), str(left)) == ("cnn/1", "cnn/2")
    registry.close()
