"""The right to write a registry as its server: one process has it, and a second one is told which.

PostgreSQL: an advisory lock of the database, held by a connection of its own. SQLite: a lock of the
kernel on a file beside the database. Both are free again when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from typing import IO, Final, Protocol

from sqlalchemy import URL, Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError

from edge_sdk.durable import make_folder, storage_error
from edge_sdk.errors import StateInUseError
from server.errors import RegistryError
from server.registry.connect import open_engine
from server.registry.failures import cause_of
from server.registry.location import RegistryLocation

LOCK_SUFFIX: Final = ".server.lock"
# "splt" and "srv" in ASCII: an advisory lock of others of the same database has another key
KEY: Final = (0x73706C74, 0x00737276)
NAME_MOST: Final = 63  # bytes of PostgreSQL's application_name
# A machine that lost its power says no goodbye: PostgreSQL notices it after these, in 25 s.
ALIVE: Final = "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3"

_TAKE: Final = text("SELECT pg_try_advisory_lock(:first, :second)")
_HOLDER: Final = text(
    "SELECT activity.application_name FROM pg_locks AS locks"
    " JOIN pg_stat_activity AS activity ON activity.pid = locks.pid"
    " WHERE locks.locktype = 'advisory' AND locks.granted AND locks.objsubid = 2"
    " AND locks.classid = :first AND locks.objid = :second"
    " AND locks.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


class WriterLock(Protocol):
    """The right to write, until `release` or the end of the process."""

    @property
    def lost(self) -> bool:
        """Whether another server took it while the database was away."""

    def keep(self) -> None:
        """See that it is still held, and take it again after the database was away.

        Raises: StateInUseError where another server has it now; RegistryError.
        """

    def release(self) -> None:
        """Give it back. A second call does nothing."""


def take_writer_lock(location: RegistryLocation) -> WriterLock:
    """Take the right to write a registry.

    Raises: StateInUseError naming the server that has it; RegistryError if the database cannot be
        asked; StorageError.
    """
    if location.file is not None:
        return _FileLock(location)
    return _AdvisoryLock(location)


class _FileLock:
    def __init__(self, location: RegistryLocation) -> None:
        assert location.file is not None
        path = location.file.with_name(location.file.name + LOCK_SUFFIX)
        make_folder(path.parent, mode=0o700)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as err:
            raise storage_error(path, 0, err) from err
        self._file: IO[str] = os.fdopen(handle, "r+")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._file.read(200).strip()
            self._file.close()
            raise _in_use(location, holder) from None
        # the name only informs a second server: on a full disk the lock works without it
        with contextlib.suppress(OSError):
            self._file.truncate(0)
            self._file.write(f"{_own_name()}\n")
            self._file.flush()

    @property
    def lost(self) -> bool:
        return False

    def keep(self) -> None:
        pass  # the kernel keeps it

    def release(self) -> None:
        self._file.close()


class _AdvisoryLock:
    def __init__(self, location: RegistryLocation) -> None:
        self.lost = False
        self._location = location
        self._engine: Engine = open_engine(_with_name(location), "writes")
        self._connection: Connection | None = None
        try:
            self.keep()
        except BaseException:
            self.release()
            raise

    def keep(self) -> None:
        try:
            if self._connection is not None and not self._answers():
                self._drop()
            if self._connection is None:
                self._take()
        except SQLAlchemyError as err:
            self._drop()
            raise RegistryError(
                f"registry {self._location}: cannot be asked: {cause_of(err)}"
            ) from err

    def release(self) -> None:
        self._drop()
        self._engine.dispose()

    def _answers(self) -> bool:
        """Whether the connection that holds the lock is alive; the lock ends with it."""
        assert self._connection is not None
        try:
            self._connection.execute(text("SELECT 1"))
        except SQLAlchemyError:
            return False
        return True

    def _take(self) -> None:
        key = {"first": KEY[0], "second": KEY[1]}
        # no transaction stays open: an idle one would hold back the database's clean-up
        connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        try:
            taken = connection.execute(_TAKE, key).scalar_one()
            holder = "" if taken else connection.execute(_HOLDER, key).scalars().first()
        except BaseException:
            connection.close()
            raise
        self.lost = not taken
        if not taken:
            connection.close()
            raise _in_use(self._location, (holder or "").partition(": ")[2])
        self._connection = connection

    def _drop(self) -> None:
        if self._connection is None:
            return
        with contextlib.suppress(SQLAlchemyError):
            self._connection.invalidate()  # not back into the pool: the lock is the session's
            self._connection.close()
        self._connection = None


def _with_name(location: RegistryLocation) -> URL:
    """The address of the database, with the name by which a second server is told of this one."""
    name = f"splitedge server: {_own_name()}".encode()[:NAME_MOST].decode(errors="ignore")
    url = location.address
    options = url.query.get("options", "")
    return url.update_query_dict(
        {"application_name": name, "options": f"{options} {ALIVE}".strip()}
    )


def _own_name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _in_use(location: RegistryLocation, holder: str) -> StateInUseError:
    return StateInUseError(
        f"registry {location}: {holder or 'another server'} already writes to it and signs; stop"
        " that one first, or start `splitedge server backend` here, which answers queries and"
        " writes nothing"
    )
