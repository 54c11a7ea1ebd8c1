"""The catalogue of models: their published versions, and the one of each name that is active.

Every method is one transaction.
"""

from __future__ import annotations

import logging
from typing import Final

from sqlalchemy import Connection, insert, select, update
from sqlalchemy.exc import IntegrityError

from server.errors import BadRequestError, UnknownModelError
from server.registry.records import ModelVersion
from server.registry.schema import models
from server.registry.transactions import MAX_ID, Transactions, check_id, record

logger = logging.getLogger(__name__)

MAX_VERSION: Final = 999_999_999


class ModelCatalogue:
    """The models of one registry; safe from any thread."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def publish(self, name: str, version: int, *, who: str = "server") -> ModelVersion:
        """Store a new version, which is not active yet; a second call changes nothing.

        Raises: BadRequestError for a name that is not an id or a version outside 1..999999999.
        """
        check_id(name, "model")
        if not 1 <= version <= MAX_VERSION:
            raise BadRequestError(f"version: expected 1 to {MAX_VERSION}, got {version}")
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            try:
                with connection.begin_nested():
                    connection.execute(
                        insert(models).values(
                            name=name, version=version, active=False, published_at=now
                        )
                    )
                record(connection, now, who, "model.publish", f"{name}/{version}")
            except IntegrityError:
                logger.debug("model=%s version=%s was published before", name, version)
            return _need_model(connection, name, version)

    def versions(self) -> tuple[ModelVersion, ...]:
        """Every published version, by name and version."""
        with self._transactions.reading() as connection:
            return _all_models(connection)

    def activate(self, name: str, version: int, *, who: str = "operator") -> ModelVersion:
        """Make that version the active one of its name, in place of any other.

        Raises: UnknownModelError naming the published versions.
        """
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            if _need_model(connection, name, version).active:
                return _need_model(connection, name, version)
            of_name = models.c.name == name
            # rows may be locked one by one: in one order, or two activations would deadlock
            rows = select(models.c.version).where(of_name).order_by(models.c.version)
            connection.execute(rows.with_for_update())
            connection.execute(update(models).where(of_name, models.c.active).values(active=False))
            connection.execute(
                update(models).where(of_name, models.c.version == version).values(active=True)
            )
            record(connection, now, who, "model.activate", f"{name}/{version}")
            return _need_model(connection, name, version)


def _all_models(connection: Connection) -> tuple[ModelVersion, ...]:
    query = select(models).order_by(models.c.name, models.c.version)
    return tuple(ModelVersion(**row) for row in connection.execute(query).mappings())


def _need_model(connection: Connection, name: str, version: int) -> ModelVersion:
    there = _all_models(connection)
    for model in there:
        if (model.name, model.version) == (name, version):
            return model
    known = ", ".join(f"{model.name}/{model.version}" for model in there) or "none"
    raise UnknownModelError(f"model {name[:MAX_ID]}/{version}: not published; available: {known}")
