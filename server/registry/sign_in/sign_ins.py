"""Sign-ins to the dashboard: one-time links, and the sessions that they open.

A row is a link until it is used; then the same row is the session. Only hashes are stored, so what
stands in the registry, or in a backup of it, signs nobody in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import delete, insert, select, update

from server.errors import AuthenticationError, BadRequestError
from server.registry.credentials import new_secret, secret_sha256
from server.registry.schema import sign_ins
from server.registry.transactions import (
    OPERATOR,
    READER,
    Transactions,
    check_id,
    one_row,
    record,
)

LINK_S: Final = 15 * 60.0
SESSION_S: Final = 7 * 86_400.0
LINK_MOST_S: Final = 86_400.0
LINK: Final = "link"
SESSION: Final = "session"

REFUSED_LINK: Final = (
    "this link was used already, or its time is over; `splitedge server dashboard-link` prints"
    " another one"
)


@dataclass(frozen=True, slots=True)
class Session:
    """A person who has signed in.

    Attributes:
        who: `operator`, or `operator:NAME` for a link that was made for somebody; `reader` and
            `reader:NAME` where the link was for reading alone.
        expires_at: UTC seconds since 1970.
    """

    who: str
    expires_at: float

    @property
    def may_act(self) -> bool:
        """Whether the person may change anything."""
        return self.who.partition(":")[0] == OPERATOR


class SignIns:
    """The links and sessions of one registry; safe from any thread."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def new_link(
        self, name: str | None = None, ttl_s: float = LINK_S, *, reads_only: bool = False
    ) -> str:
        """Make a link that signs one person in, once, within `ttl_s` seconds; returns its secret.

        Args:
            name: of the person, for the audit log.
            reads_only: whether the person sees all pages and may change nothing.
        Raises: BadRequestError for a name that is not an id, or `ttl_s` outside (0, 1 day].
        """
        if name is not None:
            check_id(name, "name")
        if not 0 < ttl_s <= LINK_MOST_S:
            raise BadRequestError(
                f"ttl_s: expected more than 0, at most {LINK_MOST_S:.0f} seconds, got {ttl_s}"
            )
        role = READER if reads_only else OPERATOR
        who = role if name is None else f"{role}:{name}"
        secret, now = new_secret(), self._transactions.now()
        with self._transactions.writing() as connection:
            connection.execute(delete(sign_ins).where(sign_ins.c.expires_at <= now))
            connection.execute(
                insert(sign_ins).values(
                    secret_sha256=secret_sha256(secret),
                    kind=LINK,
                    who=who,
                    made_at=now,
                    expires_at=now + ttl_s,
                )
            )
        return secret

    def redeem(self, link: str) -> tuple[Session, str]:
        """Use a link up: its session, and the session's secret, of which only the hash is stored.

        Of several calls with one link exactly one succeeds, even at the same time.

        Raises: AuthenticationError if the link is unknown, used or expired (the text does not say
            which).
        """
        now, secret = self._transactions.now(), new_secret()
        expires_at = now + SESSION_S
        with self._transactions.writing() as connection:
            # condition and change are one statement, so no other call can come between
            used = connection.execute(
                update(sign_ins)
                .where(sign_ins.c.secret_sha256 == secret_sha256(link), sign_ins.c.kind == LINK)
                .where(sign_ins.c.expires_at > now)
                .values(
                    secret_sha256=secret_sha256(secret),
                    kind=SESSION,
                    made_at=now,
                    expires_at=expires_at,
                )
                .returning(sign_ins.c.who)
            ).scalar_one_or_none()
            if used is None:
                raise AuthenticationError(REFUSED_LINK)
            record(connection, now, used, "dashboard.sign-in", "")
        return Session(used, expires_at), secret

    def find(self, secret: str) -> Session | None:
        """The session with that secret; None if there is none, or its time is over."""
        this = sign_ins.c.secret_sha256 == secret_sha256(secret), sign_ins.c.kind == SESSION
        with self._transactions.reading() as connection:
            row = one_row(connection, select(sign_ins).where(*this))
        if row is None or row["expires_at"] <= self._transactions.now():
            return None
        return Session(row["who"], row["expires_at"])

    def end(self, secret: str) -> None:
        """End a session; one that is not known is ignored."""
        this = sign_ins.c.secret_sha256 == secret_sha256(secret), sign_ins.c.kind == SESSION
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            ended = delete(sign_ins).where(*this).returning(sign_ins.c.who)
            who = connection.execute(ended).scalar_one_or_none()
            if who is not None:
                record(connection, now, who, "dashboard.sign-out", "")

    def end_all(self, *, who: str = OPERATOR) -> int:
        """End every session and every unused link; how many sessions there were."""
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            ended = delete(sign_ins).returning(sign_ins.c.kind)
            kinds = list(connection.scalars(ended))
            if kinds:
                count = kinds.count(SESSION)
                record(connection, now, who, "dashboard.sign-out", f"all, {count} sessions")
        return kinds.count(SESSION)
