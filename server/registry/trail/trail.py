"""The audit log: who did what, from where, with which outcome, and when.

Changes of the registry are written with the change itself, in its transaction. Events (logins and
refusals) are written in batches. Each of the two has its own bound, so that a flood of refusals
pushes out older refusals and no change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from sqlalchemy import Connection, delete, func, insert, or_, select, update

from server.registry.records import AuditEntry
from server.registry.schema import audit
from server.registry.trail.events import Event, Outcome
from server.registry.transactions import CHANGE, EVENT, Transactions, record

ROWS_MOST: Final = 100_000
AGE_MOST_S: Final = 365 * 86_400.0
SHOWN_MOST: Final = 10_000


class AuditTrail:
    """The audit log of one registry; safe from any thread."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def record(self, who: str, what: str, detail: str = "") -> None:
        """Add a change that is made outside of the registry: a key that was used, say."""
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            record(connection, now, who, what, detail)

    def add(
        self, new: Iterable[Event], again: Mapping[int, tuple[int, float]] | None = None
    ) -> list[int]:
        """Write events, in one transaction.

        Args:
            again: for entries that are there and have been repeated: by their ids, how often more,
                and when last.
        Returns: the ids of the new entries, in their order.
        """
        ids = []
        with self._transactions.writing() as connection:
            for event in new:
                values = {**event.to_dict(), "kind": EVENT}
                added = insert(audit).values(**values).returning(audit.c.id)
                ids.append(int(connection.execute(added).scalar_one()))
            for identifier, (more, until) in (again or {}).items():
                connection.execute(
                    update(audit)
                    .where(audit.c.id == identifier)
                    .values(count=audit.c.count + more, until=until)
                )
        return ids

    def prune(self, rows: int = ROWS_MOST, age_s: float = AGE_MOST_S) -> int:
        """Drop the oldest changes and events: what is above `rows` of either, or too old.

        The newest change stays, whatever its age: followers of the registry compare with it.

        Returns: how many entries were dropped.
        """
        oldest_at = self._transactions.now() - age_s
        with self._transactions.reading() as connection:
            lasts = {kind: _last_to_drop(connection, kind, rows) for kind in (CHANGE, EVENT)}
            old = connection.execute(
                select(func.count()).select_from(audit).where(audit.c.at < oldest_at)
            ).scalar_one()
        if not old and not any(lasts.values()):
            return 0
        dropped = 0
        with self._transactions.writing() as connection:
            for kind, last in lasts.items():
                this = audit.c.kind == kind
                newest = connection.execute(select(func.max(audit.c.id)).where(this)).scalar_one()
                above = delete(audit).where(this, audit.c.id <= last)
                aged = delete(audit).where(this, audit.c.at < oldest_at, audit.c.id < (newest or 0))
                dropped += connection.execute(above).rowcount + connection.execute(aged).rowcount
        return dropped

    def entries(
        self,
        limit: int = 100,
        *,
        since: float | None = None,
        after: int | None = None,
        who: str | None = None,
        about: str | None = None,
        what: str | None = None,
        outcome: Outcome | None = None,
    ) -> tuple[AuditEntry, ...]:
        """The newest `limit` entries, newest first.

        Args:
            since: only entries that happened, or were repeated, at that time or later.
            after: only entries with a higher id.
            who: only of this device or person.
            about: only of this device or person, or with this name as a word of the detail.
            what: only of this kind; `device.` names all that begin so.
        """
        until = func.coalesce(audit.c.until, audit.c.at)
        query = select(*_COLUMNS).order_by(audit.c.id.desc()).limit(min(limit, SHOWN_MOST))
        if since is not None:
            query = query.where(until >= since)
        if after is not None:
            query = query.where(audit.c.id > after)
        if who is not None:
            query = query.where(audit.c.who == who)
        if about is not None:
            word = rf"(^|[^a-z0-9-]){re.escape(about)}($|[^a-z0-9-])"
            query = query.where(or_(audit.c.who == about, audit.c.detail.regexp_match(word)))
        if what is not None:
            alike = audit.c.what.startswith(what, autoescape=True)
            query = query.where(alike if what.endswith(".") else audit.c.what == what)
        if outcome is not None:
            query = query.where(audit.c.outcome == outcome)
        with self._transactions.reading() as connection:
            return tuple(AuditEntry(**row) for row in connection.execute(query).mappings())


_COLUMNS: Final[tuple[Any, ...]] = (
    *(audit.c.id, audit.c.at, func.coalesce(audit.c.until, audit.c.at).label("until")),
    *(audit.c.who, audit.c.what, audit.c.source, audit.c.outcome, audit.c["count"]),
    audit.c.detail,
)


def _last_to_drop(connection: Connection, kind: str, rows: int) -> int:
    """Id of the newest entry that is above the bound; 0 if there is none."""
    query = (
        select(audit.c.id)
        .where(audit.c.kind == kind)
        .order_by(audit.c.id.desc())
        .offset(rows)
        .limit(1)
    )
    return connection.execute(query).scalar_one_or_none() or 0
