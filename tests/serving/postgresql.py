"""A real PostgreSQL for tests: one instance on a free port, a fresh database for each test."""

from __future__ import annotations

import itertools
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, create_engine, text
from sqlalchemy.exc import OperationalError

from server.registry.database import Registry
from tests.waiting import wait_until

USER = "splitedge"
TEMPLATE = "registry_of_this_version"


class PostgreSql:
    """A running instance; its user logs in with a password.

    Attributes:
        password: of the user `splitedge`. password_file: a file with it.
    """

    def __init__(self, port: int, password: str, password_file: Path) -> None:
        self.password = password
        self.password_file = password_file
        self._port = port
        self._numbers = itertools.count(1)
        self._admin: Engine = create_engine(
            self._url("postgres").set(drivername="postgresql+psycopg"),
            isolation_level="AUTOCOMMIT",
        )

    def answers(self) -> bool:
        """Whether it takes logins."""
        try:
            self.do("SELECT 1")
        except OperationalError:
            return False
        return True

    def do(self, statement: str) -> None:
        """Run a statement as its administrator."""
        with self._admin.connect() as connection:
            connection.execute(text(statement))

    def make_template(self) -> None:
        """Make an empty registry once, which new databases copy."""
        name = self.new_database("template0")
        Registry.open(self.url(name)).close()
        self.do(f"ALTER DATABASE {name} RENAME TO {TEMPLATE}")

    def new_database(self, template: str = TEMPLATE) -> str:
        """The name of a new database: an empty registry, or a copy of `template`."""
        name = f"test_{next(self._numbers)}"
        self.do(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def drop(self, name: str) -> None:
        """Delete a database, whoever is connected."""
        self.do(f"DROP DATABASE {name} WITH (FORCE)")

    def url(self, database: str) -> str:
        """URL with the password."""
        return self._url(database).render_as_string(hide_password=False)

    def url_without_password(self, database: str) -> str:
        """URL as an operator writes it."""
        return f"postgresql://{USER}@127.0.0.1:{self._port}/{database}"

    def close(self) -> None:
        """Close the administrator's connections."""
        self._admin.dispose()

    def _url(self, database: str) -> URL:
        host = "127.0.0.1"
        return URL.create("postgresql", USER, self.password, host, self._port, database)


@contextmanager
def running_postgresql() -> Iterator[PostgreSql]:
    """An instance of the installed PostgreSQL, until the end of the block.

    It refuses to run as root, so root runs it as another user.
    """
    with tempfile.TemporaryDirectory(prefix="splitedge-pg-") as name:
        folder = Path(name)
        password_file = folder / "password"
        password_file.write_text(f"{secrets.token_urlsafe(16)}\n")
        user = _another_user()
        if user is not None:
            for path in (folder, password_file):
                os.chown(path, user.pw_uid, user.pw_gid)
        data, port = str(folder / "data"), _free_port()
        make = [_program("initdb"), "--pgdata", data, "--username", USER, "--no-sync"]
        make += ["--auth=scram-sha-256", "--pwfile", str(password_file), "--encoding=UTF8"]
        made = subprocess.run(
            [*make, "--locale=C"],
            cwd=folder, capture_output=True, text=True, check=False, **_as(user),
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        settings = {
            "listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": folder,
            "fsync": "off", "shared_buffers": "16MB", "max_connections": 100,
        }  # fmt: skip
        words = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        log = folder / "log"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [_program("postgres"), "-D", data, *words],
                cwd=folder, stderr=stderr, **_as(user),
            )  # fmt: skip
        instance = PostgreSql(port, password_file.read_text().strip(), password_file)
        try:
            wait_until(instance.answers, log.read_text, 30)
            instance.make_template()
            yield instance
        finally:
            instance.close()
            process.send_signal(signal.SIGQUIT)  # at once: its data are deleted anyway
            process.wait(20)


def _program(name: str) -> str:
    """A program of the newest PostgreSQL; Debian keeps them out of PATH."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_version, reverse=True)
    path = os.pathsep.join([*map(str, places), os.environ["PATH"]])
    found = shutil.which(name, path=path)
    assert found is not None, "install PostgreSQL to run the tests of the registry"
    return found


def _version(folder: Path) -> float:
    name = folder.parent.name
    return float(name) if name.replace(".", "", 1).isdigit() else 0.0


def _another_user() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    return names.get("postgres") or names["nobody"]


def _as(user: pwd.struct_passwd | None) -> dict[str, Any]:
    """How a child process is started as another user."""
    if user is None:
        return {}
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
