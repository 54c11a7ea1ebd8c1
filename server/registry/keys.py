"""API keys: what a program that is no device shows to the API, each with its scopes.

A key is `sek_` and 256 random bits; only its hash is stored, by which it is found.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Collection
from typing import Any, Final

from sqlalchemy import Connection, insert, select, update
from sqlalchemy.exc import IntegrityError

from server.errors import AuthenticationError, BadRequestError, ConflictError, UnknownKeyError
from server.registry.credentials import new_secret, secret_sha256
from server.registry.records import SCOPES, ApiKey, Scope
from server.registry.schema import keys
from server.registry.transactions import OPERATOR, Transactions, check_id, one_row, record

PREFIX: Final = "sek_"  # by which people and scanners of leaked secrets know one
# names in one key: a request compares its model with them
NAMES_MOST: Final = 32

_LIMITS: Final = ("requests", "rows", "bytes")


class ApiKeys:
    """The API keys of one registry; safe from any thread."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions
        self._lock = threading.Lock()
        self._used: dict[str, tuple[int, float]] = {}  # by hash: how often, when last

    def create(
        self,
        scopes: Collection[Scope],
        *,
        name: str | None = None,
        models: Collection[str] = (),
        fleets: Collection[str] = (),
        ttl_s: float | None = None,
        requests: float | None = None,
        rows: float | None = None,
        bytes: float | None = None,  # noqa: A002 - the word of SenderLimits
        who: str = OPERATOR,
    ) -> tuple[ApiKey, str]:
        """Make a key.

        Args:
            models, fleets: the models that it may ask, and the fleets whose model it may ask.
            ttl_s: seconds until it expires; None for never.
            requests, rows, bytes: its limits a second; None as for all senders.
        Returns: the key's record, and the key itself, of which only the hash is stored.
        Raises: BadRequestError for what makes no key; ConflictError for a name that is taken.
        """
        name = f"key-{secrets.token_hex(4)}" if name is None else name
        check_id(name, "name")
        limits = {"requests": requests, "rows": rows, "bytes": bytes}
        _check(scopes, models, fleets, {"ttl_s": ttl_s, **limits})
        now, key = self._transactions.now(), PREFIX + new_secret()
        made = ApiKey(
            key_sha256=secret_sha256(key),
            name=name,
            scopes=tuple(scope for scope in SCOPES if scope in scopes),
            models=tuple(sorted(set(models))),
            fleets=tuple(sorted(set(fleets))),
            created_at=now,
            expires_at=None if ttl_s is None else now + ttl_s,
            requests=requests,
            rows=rows,
            bytes=bytes,
        )
        with self._transactions.writing() as connection:
            try:
                with connection.begin_nested():
                    connection.execute(insert(keys).values(**_columns(made)))
            except IntegrityError as err:
                raise ConflictError(
                    f"key {name}: exists; revoke it with `splitedge server keys revoke {name}`, or"
                    " take another name"
                ) from err
            record(connection, now, who, "key.create", _detail(made))
        return made, key

    def all(self) -> tuple[ApiKey, ...]:
        """All keys ever made, oldest first."""
        with self._transactions.reading() as connection:
            query = select(keys).order_by(keys.c.created_at)
            return tuple(_key(dict(row)) for row in connection.execute(query).mappings())

    def authenticate(self, key: str) -> ApiKey:
        """The record of a key; its use is counted.

        Raises: AuthenticationError if it is unknown, revoked or expired.
        """
        now = self._transactions.now()
        sha256 = secret_sha256(key)
        with self._transactions.reading() as connection:
            row = one_row(connection, select(keys).where(keys.c.key_sha256 == sha256))
        if row is None:
            raise AuthenticationError("unknown key; ask the operator of this server for one")
        found = _key(dict(row))
        if found.revoked_at is not None:
            raise AuthenticationError(f"key {found.name}: revoked; ask the operator for another")
        if found.expires_at is not None and found.expires_at <= now:
            raise AuthenticationError(f"key {found.name}: expired; ask the operator for another")
        self.count_use(found)
        return found

    def count_use(self, key: ApiKey) -> None:
        """Count a use of a key; `write_uses` writes it."""
        now = self._transactions.now()
        with self._lock:
            self._used[key.key_sha256] = self._used.get(key.key_sha256, (0, now))[0] + 1, now

    def revoke(self, name: str, *, who: str = OPERATOR) -> None:
        """Revoke the key of that name; queries with it are refused within a second.

        Raises: UnknownKeyError if no key of that name is valid.
        """
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            this = keys.c.name == name, keys.c.revoked_at.is_(None)
            if connection.execute(update(keys).where(*this).values(revoked_at=now)).rowcount == 0:
                raise UnknownKeyError(
                    f"key {name[:63]!r}: no key of that name is valid; `splitedge server keys"
                    " list` shows them"
                )
            record(connection, now, who, "key.revoke", name)

    def write_uses(self) -> None:
        """Write how often keys were used since the last call.

        Raises: RegistryError; the counts are kept for the next call then.
        """
        with self._lock:
            used, self._used = self._used, {}
        if not used:
            return
        try:
            with self._transactions.writing() as connection:
                for sha256, (count, at) in used.items():
                    _add_uses(connection, sha256, count, at)
        except BaseException:
            with self._lock:
                for sha256, (count, at) in used.items():
                    more, last = self._used.get(sha256, (0, at))
                    self._used[sha256] = count + more, last
            raise


def _add_uses(connection: Connection, sha256: str, count: int, at: float) -> None:
    this = keys.c.key_sha256 == sha256
    added = {"uses": keys.c.uses + count, "used_at": at}
    connection.execute(update(keys).where(this).values(**added))


def _check(
    scopes: Collection[Scope],
    models: Collection[str],
    fleets: Collection[str],
    numbers: dict[str, float | None],
) -> None:
    """Raises: BadRequestError."""
    unknown = [scope for scope in scopes if scope not in SCOPES]
    if unknown or not scopes:
        got = ", ".join(unknown) or "none"
        raise BadRequestError(f"scopes: expected some of {', '.join(SCOPES)}, got {got}")
    for what, names in (("model", models), ("fleet", fleets)):
        for name in names:
            check_id(name, what)
        if len(names) > NAMES_MOST:
            raise BadRequestError(f"{what}s: expected at most {NAMES_MOST}, got {len(names)}")
    if (models or fleets) and "infer" not in scopes:
        raise BadRequestError("models and fleets bound the scope infer, which this key has not")
    for what, number in numbers.items():
        if number is not None and not 0 < number < float("inf"):
            raise BadRequestError(f"{what}: expected more than 0, got {number}")


def _columns(key: ApiKey) -> dict[str, Any]:
    lists = {"scopes": list(key.scopes), "models": list(key.models), "fleets": list(key.fleets)}
    rest = ("key_sha256", "name", "created_at", "expires_at", "uses", *_LIMITS)
    return {**{name: getattr(key, name) for name in rest}, **lists}


def _key(row: dict[str, Any]) -> ApiKey:
    lists = {name: tuple(row[name]) for name in ("scopes", "models", "fleets")}
    return ApiKey(**{**row, **lists})


def _detail(key: ApiKey) -> str:
    parts = [key.name, f"scopes={','.join(key.scopes)}"]
    parts += [f"models={','.join(key.models)}"] if key.models else []
    parts += [f"fleets={','.join(key.fleets)}"] if key.fleets else []
    return " ".join(parts)
