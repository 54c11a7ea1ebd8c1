"""Alerts of one registry: those that are open, and the history of those that were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import ColumnElement, Connection, delete, insert, or_, select, update

from server.errors import BadRequestError
from server.registry.alerts.alert import Alert, Changes
from server.registry.schema import alerts
from server.registry.trail.events import printable
from server.registry.transactions import Transactions, record

KEPT_S: Final = 90 * 86_400.0
ROWS_MOST: Final = 20_000
SHOWN_MOST: Final = 10_000
TEXT_MOST: Final = 400
SILENCE_MOST_S: Final = 366 * 86_400.0


class Alerts:
    """The alerts of one registry; safe from any thread."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def open(self) -> list[Alert]:
        """The open alerts, oldest first."""
        with self._transactions.reading() as connection:
            return _read(connection, alerts.c.closed_at.is_(None))

    def recent(self, limit: int = 100) -> list[Alert]:
        """The newest alerts, open and closed, newest first."""
        query = select(alerts).order_by(alerts.c.id.desc()).limit(min(limit, SHOWN_MOST))
        with self._transactions.reading() as connection:
            return [Alert(**row) for row in connection.execute(query).mappings()]

    def apply(self, new: Changes) -> tuple[list[Alert], list[Alert]]:
        """Write changes, in one transaction; an alert that is open already is left as it is.

        Returns: the alerts that opened, and those that closed.
        """
        if not (new.opening or new.closing or new.telling):
            return [], []
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            opened = []
            for finding in new.opening:
                this = (alerts.c.kind == finding.kind) & (alerts.c.about == finding.about)
                newest = select(alerts).where(this).order_by(alerts.c.id.desc()).limit(1)
                row = connection.execute(newest).mappings().first()
                before = None if row is None else Alert(**row)
                if before is not None and before.closed_at is None:
                    continue
                # an earlier alert may have a silence that was ended since
                silence = (before and before.silenced_until) or 0.0
                values = {
                    "kind": finding.kind,
                    "about": finding.about,
                    "text": printable(finding.text, TEXT_MOST),
                    "level": finding.level,
                    "opened_at": now,
                    "silenced_until": silence if silence > now else None,
                }
                made = connection.execute(insert(alerts).values(values).returning(alerts))
                opened.append(Alert(**made.mappings().one()))
            ids = [alert.id for alert in new.closing]
            ended = alerts.c.id.in_(ids) & alerts.c.closed_at.is_(None)
            closed = _read(connection, ended)
            connection.execute(update(alerts).where(ended).values(closed_at=now))
            for identifier, finding in new.telling.items():
                text = printable(finding.text, TEXT_MOST)
                told = update(alerts).where(alerts.c.id == identifier)
                connection.execute(told.values(text=text, level=finding.level))
        return opened, closed

    def silence(
        self, kind: str, about: str, seconds: float, *, who: str = "operator"
    ) -> list[Alert]:
        """Tell nobody about open alerts for a time; 0 ends a silence. It holds if one opens again.

        Args:
            kind: of the alerts; "" for all kinds.
        Returns: the alerts.
        Raises: BadRequestError if there is no such open alert, or for another time.
        """
        if not 0 <= seconds <= SILENCE_MOST_S:
            raise BadRequestError(f"silence: expected 0 s to 366 days, got {seconds:g} s")
        now = self._transactions.now()
        until = now + seconds if seconds else None
        this = (alerts.c.about == about) & alerts.c.closed_at.is_(None)
        if kind:
            this &= alerts.c.kind == kind
        with self._transactions.writing() as connection:
            found = _read(connection, this)
            if not found:
                raise BadRequestError(
                    f"{about[:80]}: no open alert{f' of the kind {kind[:40]}' if kind else ''};"
                    " `splitedge server alerts` shows those that are"
                )
            connection.execute(update(alerts).where(this).values(silenced_until=until))
            kinds = ", ".join(one.kind for one in found)
            detail = f"{about}: {kinds}" + (f" for {seconds:.0f} s" if seconds else "")
            record(connection, now, who, "alert.silence" if seconds else "alert.hear", detail)
            return _read(connection, this)

    def prune(self, rows: int = ROWS_MOST, age_s: float = KEPT_S) -> int:
        """Drop closed alerts that are too old, or above `rows` in all, oldest first.

        Returns: how many were dropped.
        """
        oldest = self._transactions.now() - age_s
        closed = alerts.c.closed_at.is_not(None)
        query = select(alerts.c.id).where(closed).order_by(alerts.c.id.desc())
        with self._transactions.reading() as connection:
            last = connection.scalars(query.offset(rows).limit(1)).first()
            aged = connection.scalars(
                select(alerts.c.id).where(closed, alerts.c.closed_at < oldest).limit(1)
            ).first()
        if last is None and aged is None:
            return 0
        with self._transactions.writing() as connection:
            above = or_(alerts.c.id <= (last or 0), alerts.c.closed_at < oldest)
            return connection.execute(delete(alerts).where(closed, above)).rowcount


def _read(connection: Connection, this: ColumnElement[bool]) -> list[Alert]:
    query = select(alerts).where(this).order_by(alerts.c.id)
    rows: Sequence[Alert] = [Alert(**row) for row in connection.execute(query).mappings()]
    return list(rows)
