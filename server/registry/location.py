"""Location of a state folder's registry: a file in it, or a database by URL.

The URL is kept in `{state}/registry.json`, so that every command that has the state folder finds
the registry. A password is never kept there: it comes from the URL that was given, a file that is
named there, PGPASSWORD, or ~/.pgpass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import orjson
from sqlalchemy import URL
from sqlalchemy.exc import SQLAlchemyError

from edge_sdk.durable import write_atomic
from edge_sdk.errors import ConfigurationError
from server.errors import RegistryError
from server.registry.connect import open_engine, parse_url, sqlite_file
from server.registry.failures import cause_of
from server.registry.migrate import current_version, newest_version

LOCATION_NAME: Final = "registry.json"


@dataclass(frozen=True, slots=True)
class RegistryLocation:
    """The place of a registry.

    Attributes:
        url: with the password, if the URL that was given had one; so it is not shown.
        password_file: file of one line, the password of the user in the URL.
    """

    url: URL = field(repr=False)
    password_file: Path | None = None

    @classmethod
    def parse(cls, text: str, password_file: Path | None = None) -> Self:
        """Read `postgresql://USER@HOST/NAME` or `sqlite:///FILE`.

        Raises: ConfigurationError.
        """
        url = parse_url(text)
        if password_file is not None:
            if url.get_backend_name() != "postgresql" or url.password is not None:
                raise ConfigurationError(
                    "--registry-password-file needs --registry postgresql://USER@HOST/NAME, without"
                    " a password; give both, or neither"
                )
            password_file = password_file.absolute()
        return cls(url, password_file)

    @classmethod
    def in_folder(cls, state: Path) -> Self:
        """The file in a state folder, the place of a registry that nobody put elsewhere."""
        return cls(parse_url(URL.create("sqlite", database=str(registry_file(state)))))

    @classmethod
    def of(cls, state: Path) -> Self:
        """The place that the state folder names; else the file in it.

        Raises: ConfigurationError if the note of it cannot be read.
        """
        path = state / LOCATION_NAME
        try:
            noted = orjson.loads(path.read_bytes())
            file = noted["password_file"]
            return cls.parse(noted["url"], None if file is None else Path(file))
        except FileNotFoundError:
            return cls.in_folder(state)
        except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as err:
            raise ConfigurationError(
                f"{path}: cannot be read ({err}); start the server with --registry to write it"
            ) from err

    def save(self, state: Path) -> None:
        """Note the place in the state folder, without a password.

        Raises: StorageError.
        """
        path = state / LOCATION_NAME
        if self.same_database(type(self).in_folder(state)):
            path.unlink(missing_ok=True)
            return
        file = None if self.password_file is None else str(self.password_file)
        content = orjson.dumps({"url": self._without_password, "password_file": file})
        if not path.exists() or path.read_bytes() != content:
            write_atomic(path, content, mode=0o600)

    def same_database(self, other: RegistryLocation) -> bool:
        """Whether both are one database; its users and their passwords may differ."""
        return self._place == other._place

    @property
    def file(self) -> Path | None:
        """The SQLite file; None for PostgreSQL."""
        return sqlite_file(self.url)

    @property
    def address(self) -> URL:
        """The URL to connect with.

        Raises: ConfigurationError if the password cannot be read.
        """
        if self.password_file is None:
            return self.url
        try:
            text = self.password_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as err:
            raise ConfigurationError(
                f"{self.password_file}: the registry's password cannot be read ({err})"
            ) from err
        if not text or "\n" in text:
            raise ConfigurationError(
                f"{self.password_file}: expected one line with a password, got another text"
            )
        return self.url.set(password=text)

    def __str__(self) -> str:
        return self._without_password

    @property
    def _place(self) -> tuple[object, ...]:
        url = self.url
        elsewhere = url.query.get("host"), url.query.get("port")  # libpq takes them there too
        return (url.drivername, url.host, url.port, url.database, *elsewhere)

    @property
    def _without_password(self) -> str:
        # `URL.set` takes None for "as it was"
        url = self.url
        driver = url.get_backend_name()
        plain = URL.create(driver, url.username, None, url.host, url.port, url.database, url.query)
        return plain.render_as_string()


def registry_file(state: Path) -> Path:
    """File of the registry in a server's state folder, where nobody put it elsewhere."""
    return state / "registry.db"


def has_registry(state: Path) -> bool:
    """Whether a server has made its registry, here or elsewhere."""
    return (state / LOCATION_NAME).is_file() or registry_file(state).is_file()


def existing_location(state: Path) -> RegistryLocation:
    """The place that the state folder names, where a registry was made; else the file in it.

    Raises: ConfigurationError if nothing is there any more: a new registry would have no devices;
        RegistryError if the database cannot be asked.
    """
    location = RegistryLocation.of(state)
    if (state / LOCATION_NAME).is_file() and _is_empty(location):
        raise ConfigurationError(
            f"registry {location}: it is empty or not there, but {state / LOCATION_NAME} says that"
            " the registry of this server is there; mount its disk, or restore a backup by"
            " `splitedge server restore` into a new state folder"
        )
    return location


def settle(state: Path, given: RegistryLocation | None) -> RegistryLocation:
    """The registry's place for the next start: the one that was given, else as last time.

    Raises: ConfigurationError if the state folder has its registry elsewhere, and the given
        database is empty: its devices would be strangers there; or if nothing is there any more.
    """
    if given is None:
        return existing_location(state)
    if has_registry(state):
        last = RegistryLocation.of(state)
        if not last.same_database(given) and _is_empty(given):
            raise ConfigurationError(
                f"--registry {given}: it is empty, and the registry of {state} is {last}; to move"
                " it, run `splitedge server backup` on this state, then `splitedge server restore`"
                " with --registry into a new state folder"
            )
    return given


def check_made(location: RegistryLocation) -> None:
    """Check that a registry is there, of this program's version, before one only reads it.

    Raises: ConfigurationError saying what to start first; RegistryError if it cannot be asked.
    """
    if _is_empty(location):
        raise ConfigurationError(
            f"--registry {location}: no registry is there; start `splitedge server api` first,"
            " which makes it"
        )
    engine = open_engine(location.address, "reads")
    try:
        found, wanted = current_version(engine), newest_version()
    except SQLAlchemyError as err:
        raise RegistryError(f"registry {location}: cannot be opened: {cause_of(err)}") from err
    finally:
        engine.dispose()
    if found != wanted:
        raise ConfigurationError(
            f"--registry {location}: it has version {found}, this program needs {wanted}; start"
            " `splitedge server api` of this release first, which brings it up to date, or a"
            " backend of the API's release"
        )


def _is_empty(location: RegistryLocation) -> bool:
    """Raises: RegistryError if the database cannot be asked."""
    if location.file is not None and not location.file.exists():
        return True
    engine = open_engine(location.address, "reads")
    try:
        return current_version(engine) is None
    except SQLAlchemyError as err:
        raise RegistryError(f"registry {location}: cannot be opened: {cause_of(err)}") from err
    finally:
        engine.dispose()
