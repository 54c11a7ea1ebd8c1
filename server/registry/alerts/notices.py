"""Notices: what the receivers of alerts are told, kept until each receiver has it.

A notice is made once for each alert, receiver and state, so a server that starts again knows what
was told and goes on with what was not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from sqlalchemy import Connection, Select, delete, exists, insert, literal, or_, select, update
from sqlalchemy.exc import IntegrityError

from server.registry.alerts.alert import Alert
from server.registry.schema import alert_notices, alerts
from server.registry.transactions import Transactions

logger = logging.getLogger(__name__)

State = Literal["open", "closed"]
OPEN: Final[State] = "open"
CLOSED: Final[State] = "closed"
WAITING_MOST: Final = 1_000  # for each receiver

_notice = alert_notices.c


@dataclass(frozen=True, slots=True)
class Notice:
    """A message about an alert to one receiver.

    Attributes:
        receiver: its name, of 16 characters at most.
        state: "open" or "closed".
        alert: as it is now.
    """

    id: int
    receiver: str
    state: str
    alert: Alert


class Notices:
    """The notices of one registry; safe from any thread."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def make(self, receivers: Iterable[str]) -> None:
        """Make the notices that are missing.

        An open alert that is not silenced is told as open. An alert that is over is told as closed
        to whom it was told as open, silenced or not.
        """
        now = self._transactions.now()
        wanted = [query for name in receivers for query in (_opened(name, now), _closed(name))]
        with self._transactions.reading() as connection:
            missing = [row for query in wanted for row in _rows(connection, query)]
        if not missing:
            return
        with self._transactions.writing() as connection:
            for query in wanted:  # again: another process may have made some
                for row in _rows(connection, query):
                    _add(connection, row, now)

    def waiting(self, receiver: str) -> list[Notice]:
        """Notices that a receiver has not got, oldest first; WAITING_MOST of them are kept."""
        this = (_notice.receiver == receiver) & _notice.done_at.is_(None)
        query = (
            select(_notice.id.label("notice"), _notice.state, *alerts.c)
            .join(alerts, alerts.c.id == _notice.alert)
            .where(this)
            .order_by(_notice.id)
        )
        with self._transactions.reading() as connection:
            rows = [dict(row) for row in connection.execute(query).mappings()]
        found = [
            Notice(row.pop("notice"), receiver, row.pop("state"), Alert(**row)) for row in rows
        ]
        above = found[: max(0, len(found) - WAITING_MOST)]
        if above:
            logger.warning(
                "%s of alerts: more than %d messages wait; the oldest %d are given up",
                receiver,
                WAITING_MOST,
                len(above),
            )
            self.done([notice.id for notice in above])
        return found[len(above) :]

    def done(self, ids: Sequence[int]) -> None:
        """Note that these have been told, or have been given up."""
        if not ids:
            return
        this = _notice.id.in_(ids) & _notice.done_at.is_(None)
        with self._transactions.writing() as connection:
            connection.execute(
                update(alert_notices).where(this).values(done_at=self._transactions.now())
            )

    def keep_only(self, receivers: Sequence[str]) -> None:
        """Forget the notices of receivers that are no more; one that comes back is new."""
        others = _notice.receiver.not_in(receivers)
        with self._transactions.reading() as connection:
            if connection.execute(select(_notice.id).where(others).limit(1)).first() is None:
                return
        with self._transactions.writing() as connection:
            connection.execute(delete(alert_notices).where(others))


def _opened(receiver: str, now: float) -> Select[Any]:
    """The open alerts, not silenced, of which the receiver was not told."""
    heard = or_(alerts.c.silenced_until.is_(None), alerts.c.silenced_until <= now)
    return _missing(receiver, OPEN).where(alerts.c.closed_at.is_(None), heard)


def _closed(receiver: str) -> Select[Any]:
    """The alerts that are over, of which the receiver was told that they are open."""
    told = exists().where(
        _notice.alert == alerts.c.id, _notice.receiver == receiver, _notice.state == OPEN
    )
    return _missing(receiver, CLOSED).where(alerts.c.closed_at.is_not(None), told)


def _missing(receiver: str, state: State) -> Select[Any]:
    made = exists().where(
        _notice.alert == alerts.c.id, _notice.receiver == receiver, _notice.state == state
    )
    columns = (
        alerts.c.id.label("alert"),
        literal(receiver).label("receiver"),
        literal(state).label("state"),
    )
    return select(*columns).where(~made).order_by(alerts.c.id)


def _add(connection: Connection, row: dict[str, Any], now: float) -> None:
    try:
        with connection.begin_nested():
            connection.execute(insert(alert_notices).values(**row, made_at=now))
    except IntegrityError:  # on PostgreSQL, another process made it at the same moment
        logger.debug("alert=%s receiver=%s is made already", row["alert"], row["receiver"])


def _rows(connection: Connection, query: Select[Any]) -> list[dict[str, Any]]:
    return [dict(row) for row in connection.execute(query).mappings()]
