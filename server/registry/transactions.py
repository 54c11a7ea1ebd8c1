"""Transactions on the registry's database; the parts of the registry share them.

A reading transaction takes no lock. What SQLAlchemy raises leaves as a RegistryError, without the
cause, because peers read the text.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Self

from sqlalchemy import Connection, Select, insert
from sqlalchemy.exc import SQLAlchemyError

from edge_sdk.wire.topics import ID_PATTERN
from server.errors import BadRequestError, RegistryError
from server.registry.connect import READS, open_engine
from server.registry.migrate import migrate
from server.registry.schema import audit

logger = logging.getLogger(__name__)

MAX_ID: Final = 63


class Transactions:
    """The connections to one database.

    Args:
        url: of a database that already has this program's version.
        clock: UTC seconds since 1970.
    Raises: ConfigurationError.
    """

    def __init__(self, url: str, *, clock: Callable[[], float] = time.time) -> None:
        self.now = clock
        self._engine = open_engine(url)
        self._reader = self._engine.execution_options(**{READS: True})

    @classmethod
    def open(cls, url: str, *, clock: Callable[[], float] = time.time) -> Self:
        """Create the database or bring it up to date, and open it.

        Raises: ConfigurationError for the URL; RegistryError if the database cannot be opened or is
            newer than this program.
        """
        opened = cls(url, clock=clock)
        try:
            migrate(opened._engine)
        except SQLAlchemyError as err:
            opened.close()
            shown = opened._engine.url.render_as_string(hide_password=True)
            cause = str(getattr(err, "orig", None) or err)
            raise RegistryError(f"registry {shown}: cannot be opened: {cause}") from err
        except BaseException:
            opened.close()
            raise
        return opened

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that will not write."""
        with _our_errors(), self._reader.connect() as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that is kept if its block ends without an exception."""
        with _our_errors(), self._engine.begin() as connection:
            yield connection


def one_row(connection: Connection, query: Select[Any]) -> Mapping[str, Any] | None:
    """The only row of a query by column names; None if there is none."""
    row = connection.execute(query).mappings().one_or_none()
    return None if row is None else {str(key): value for key, value in row.items()}


def record(connection: Connection, at: float, who: str, what: str, detail: str) -> None:
    """Add an entry to the audit trail."""
    connection.execute(insert(audit).values(at=at, who=who, what=what, detail=detail))


def printable(text: str, most: int) -> str:
    """A device's words on one line of at most `most` characters, without what moves a cursor."""
    letters = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(letters.split())[:most]


def check_id(value: str, what: str) -> None:
    """Check the id of a device, a fleet or a model.

    Raises: BadRequestError naming `what`.
    """
    if not ID_PATTERN.fullmatch(value):
        raise BadRequestError(
            f"{what}: expected 1 to {MAX_ID} of a-z, 0-9 and '-', got {value[:100]!r}"
        )


@contextlib.contextmanager
def _our_errors() -> Iterator[None]:
    try:
        yield
    except SQLAlchemyError as err:
        # the cause names hosts and paths, so it is only logged
        logger.exception("registry: the database failed")
        raise RegistryError("registry: the database cannot be used now; see its log") from err
