"""The registry of tokens, devices and, as its catalogue, models. Safe from any thread.

Every method is one transaction. The call that makes a secret returns it; only its hash is stored.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self

import orjson
from sqlalchemy import Connection, and_, delete, func, insert, not_, or_, select, update
from sqlalchemy.exc import IntegrityError

from edge_sdk.wire.topics import ID_PATTERN
from server.errors import (
    AuthenticationError,
    BadRequestError,
    TokenError,
    UnknownDeviceError,
)
from server.registry.capabilities import Capabilities
from server.registry.catalogue import ModelCatalogue
from server.registry.credentials import is_secret, new_secret, secret_sha256
from server.registry.records import AuditEntry, Device, Token
from server.registry.reports import DeviceReports
from server.registry.schema import audit, devices, tokens
from server.registry.transactions import MAX_ID, Transactions, check_id, one_row, record

logger = logging.getLogger(__name__)

MAX_NOTE: Final = 200
MAX_BUNDLE: Final = 160
MAX_DEPTH: Final = 999
MAX_PROFILE_BYTES: Final = 16_384
MAX_TOKEN_TTL_S: Final = 30 * 86_400.0
# without it, heartbeats of 500 devices every few seconds would each be a synced write
TOUCH_RESOLUTION_S: Final = 10.0
# user names of the API and of brokers that no device may have
RESERVED_IDS: Final = frozenset({"backend", "operator", "server"})

_NO_SHA256: Final = secret_sha256("")


class Registry:
    """The registry in one database; a program gets it by `open`.

    Attributes:
        catalogue: the models, their versions, and the model of each fleet.
        reports: what devices report on their bundles.
        capabilities: what the devices measured, what failed, and what the operator pinned.
    """

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions
        self.catalogue = ModelCatalogue(transactions)
        self.reports = DeviceReports(transactions)
        self.capabilities = Capabilities(transactions)

    @classmethod
    def open(cls, url: str, *, clock: Callable[[], float] = time.time) -> Self:
        """Create the database or bring it up to date, and open it.

        Args:
            clock: UTC seconds since 1970.
        Raises: ConfigurationError for the URL; RegistryError if the database cannot be opened or is
            newer than this program.
        """
        return cls(Transactions.open(url, clock=clock))

    def close(self) -> None:
        """Close the database's connections."""
        self._transactions.close()

    # tokens

    def create_token(self, fleet: str = "default", ttl_s: float = 3600.0, note: str = "") -> str:
        """Make an enrolment token, which works once within `ttl_s` seconds; returns its secret.

        Raises: BadRequestError for a fleet that is not an id, for `ttl_s` outside (0, 30 days], or
            for a note that is longer than 200 characters or not printable.
        """
        check_id(fleet, "fleet")
        if not 0 < ttl_s <= MAX_TOKEN_TTL_S:
            raise BadRequestError(
                f"ttl_s: expected more than 0, at most {MAX_TOKEN_TTL_S:.0f} seconds, got {ttl_s}"
            )
        if len(note) > MAX_NOTE or not note.isprintable():
            raise BadRequestError(f"note: expected at most {MAX_NOTE} printable characters")
        token, now = new_secret(), self._transactions.now()
        with self._transactions.writing() as connection:
            connection.execute(
                insert(tokens).values(
                    token_sha256=secret_sha256(token),
                    fleet=fleet,
                    note=note,
                    created_at=now,
                    expires_at=now + ttl_s,
                )
            )
            record(connection, now, "operator", "token.create", f"fleet={fleet} note={note}")
        return token

    def tokens(self) -> tuple[Token, ...]:
        """All tokens ever made, oldest first."""
        with self._transactions.reading() as connection:
            query = select(tokens).order_by(tokens.c.created_at)
            return tuple(Token(**row) for row in connection.execute(query).mappings())

    def redeem_token(
        self, token: str, wanted: str | None, profile: Mapping[str, Any]
    ) -> tuple[Device, str]:
        """Enrol a device: use up the token, and make an identity and its credential.

        If another device has the id `wanted`, -2, -3... is added. Of several calls with one token
        exactly one succeeds, even at the same time.

        Returns: the device, and its credential, of which only the hash is stored.
        Raises: TokenError if the token is unknown, used or expired (the text does not say which);
            BadRequestError for an id or a profile that cannot be stored.
        """
        if wanted is not None:
            check_id(wanted, "device")
        _check_profile(profile)
        now, credential, token_sha256 = self._transactions.now(), new_secret(), secret_sha256(token)
        with self._transactions.writing() as connection:
            # condition and change are one statement, so no other call can come between
            used = connection.execute(
                update(tokens)
                .where(tokens.c.token_sha256 == token_sha256)
                .where(tokens.c.used_at.is_(None), tokens.c.expires_at > now)
                .values(used_at=now)
            )
            if used.rowcount != 1:
                raise TokenError("token: unknown, used or expired; ask for a new one")
            this_token = tokens.c.token_sha256 == token_sha256
            fleet = connection.execute(select(tokens.c.fleet).where(this_token)).scalar_one()
            device = _insert_device(
                connection,
                wanted or f"device-{secrets.token_hex(4)}",
                {
                    "fleet": fleet,
                    "credential_sha256": secret_sha256(credential),
                    "profile": dict(profile),
                    "enrolled_at": now,
                },
            )
            connection.execute(update(tokens).where(this_token).values(used_by=device.id))
            record(connection, now, device.id, "device.enrol", f"fleet={fleet}")
        return device, credential

    def undo_enrolment(self, device: Device, token: str) -> None:
        """Undo `redeem_token`: the token works again, and the device is deleted.

        Use it only if the credential was not handed out.
        """
        now = self._transactions.now()
        used = and_(tokens.c.token_sha256 == secret_sha256(token), tokens.c.used_by == device.id)
        with self._transactions.writing() as connection:
            connection.execute(update(tokens).where(used).values(used_at=None, used_by=None))
            connection.execute(delete(devices).where(devices.c.id == device.id))
            record(connection, now, device.id, "device.enrol.undo", f"fleet={device.fleet}")

    # devices

    def authenticate(self, device_id: str, credential: str) -> Device:
        """The device with that id, if the credential is right.

        Raises: AuthenticationError if it is wrong, or if the device was revoked.
        """
        with self._transactions.reading() as connection:
            device = _find_device(connection, device_id)
        # an unknown id takes as long as a wrong credential
        expected = _NO_SHA256 if device is None else device.credential_sha256
        matches = is_secret(credential, expected)
        if device is None or not matches:
            raise AuthenticationError("unknown device or wrong credential; enrol this device")
        if device.revoked_at is not None:
            raise AuthenticationError(f"device {device.id}: revoked; enrol it with a new token")
        return device

    def device(self, device_id: str) -> Device:
        """The device with that id, revoked or not.

        Raises: UnknownDeviceError.
        """
        with self._transactions.reading() as connection:
            return _need_device(connection, device_id)

    def devices(self, fleet: str | None = None) -> tuple[Device, ...]:
        """All devices, or those of one fleet, revoked ones included, by id.

        Raises: BadRequestError for a fleet that is not an id.
        """
        query = select(devices).order_by(devices.c.id)
        if fleet is not None:
            check_id(fleet, "fleet")
            query = query.where(devices.c.fleet == fleet)
        with self._transactions.reading() as connection:
            return tuple(Device(**row) for row in connection.execute(query).mappings())

    def revoke(self, device_id: str, *, who: str = "operator") -> Device:
        """Revoke a device: it is refused from now on. A second call changes nothing.

        Raises: UnknownDeviceError.
        """
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            before = _need_device(connection, device_id)
            if before.revoked_at is not None:
                return before
            this_device = devices.c.id == device_id
            connection.execute(update(devices).where(this_device).values(revoked_at=now))
            record(connection, now, who, "device.revoke", device_id)
            return _need_device(connection, device_id)

    def assign(
        self, device_id: str, depth: int | None, bundle: str | None, *, who: str = "server"
    ) -> Device:
        """Store the depth and bundle that a device should run; None removes them.

        Raises: UnknownDeviceError; BadRequestError for a depth outside 0..999 or a bundle name
            above 160 characters.
        """
        if depth is not None and not 0 <= depth <= MAX_DEPTH:
            raise BadRequestError(f"depth: expected 0 to {MAX_DEPTH}, got {depth}")
        if bundle is not None and (len(bundle) > MAX_BUNDLE or not bundle.isprintable()):
            raise BadRequestError(f"bundle: expected at most {MAX_BUNDLE} printable characters")
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            before = _need_device(connection, device_id)
            if (before.depth, before.bundle) == (depth, bundle):
                return before
            this_device = devices.c.id == device_id
            connection.execute(
                update(devices).where(this_device).values(depth=depth, bundle=bundle)
            )
            detail = f"{device_id} depth={depth} bundle={bundle}"
            record(connection, now, who, "device.assign", detail)
            return _need_device(connection, device_id)

    def touch(self, *device_ids: str) -> None:
        """Store that these devices were seen now, to within `TOUCH_RESOLUTION_S`.

        Unknown ids are ignored. A call writes nothing if all of them were seen just before.
        """
        now = self._transactions.now()
        # a last_seen ahead of the clock is due too: the clock was set back
        fresh = devices.c.last_seen.between(now - TOUCH_RESOLUTION_S, now)
        due = and_(devices.c.id.in_(device_ids), or_(devices.c.last_seen.is_(None), not_(fresh)))
        with self._transactions.reading() as connection:
            ids = connection.scalars(select(devices.c.id).where(due)).all()
        if ids:
            with self._transactions.writing() as connection:
                connection.execute(
                    update(devices).where(devices.c.id.in_(ids)).values(last_seen=now)
                )

    def update_profile(self, device_id: str, profile: Mapping[str, Any]) -> Device:
        """Replace the device's profile.

        Raises: UnknownDeviceError; BadRequestError for a profile that cannot be stored.
        """
        _check_profile(profile)
        with self._transactions.writing() as connection:
            this_device = devices.c.id == _need_device(connection, device_id).id
            connection.execute(update(devices).where(this_device).values(profile=dict(profile)))
            return _need_device(connection, device_id)

    # audit

    def last_change(self) -> int:
        """A number that grows with every entry of the trail: enrolments, revocations, models...

        It is cheap to read, so a follower of the registry reads the rest only when it has grown.
        """
        with self._transactions.reading() as connection:
            return connection.execute(select(func.max(audit.c.id))).scalar_one() or 0

    def audit(self, limit: int = 100) -> tuple[AuditEntry, ...]:
        """The last `limit` entries of the trail, newest first."""
        columns = (audit.c.at, audit.c.who, audit.c.what, audit.c.detail)
        query = select(*columns).order_by(audit.c.id.desc()).limit(limit)
        with self._transactions.reading() as connection:
            return tuple(AuditEntry(**row) for row in connection.execute(query).mappings())


def _insert_device(connection: Connection, wanted: str, values: Mapping[str, Any]) -> Device:
    while True:  # it ends: an id is refused only if another enrolment has just taken it
        device_id = _free_id(connection, wanted)
        try:
            with connection.begin_nested():
                connection.execute(insert(devices).values(id=device_id, **values))
        except IntegrityError:
            logger.debug("device=%s was taken at the same time", device_id)
        else:
            return _need_device(connection, device_id)


def _free_id(connection: Connection, wanted: str) -> str:
    # leaves room for a suffix of seven digits; ids have no % or _, which LIKE would expand
    alike = devices.c.id.startswith(wanted[: MAX_ID - 8])
    taken = RESERVED_IDS.union(connection.scalars(select(devices.c.id).where(alike)))
    candidate, number = wanted, 1
    while candidate in taken:
        number += 1
        suffix = f"-{number}"
        candidate = wanted[: MAX_ID - len(suffix)] + suffix
    return candidate


def _find_device(connection: Connection, device_id: str) -> Device | None:
    # other text is not looked up: a database may refuse it
    if not ID_PATTERN.fullmatch(device_id):
        return None
    row = one_row(connection, select(devices).where(devices.c.id == device_id))
    return None if row is None else Device(**row)


def _need_device(connection: Connection, device_id: str) -> Device:
    device = _find_device(connection, device_id)
    if device is None:
        raise UnknownDeviceError(f"device {device_id[:MAX_ID]!r}: not enrolled here")
    return device


def registry_file(state: Path) -> Path:
    """File of the registry in a server's state folder."""
    return state / "registry.db"


def open_registry(state: Path) -> Registry:
    """The registry of the server with this state folder.

    Raises: RegistryError if it cannot be opened or is newer than this program.
    """
    return Registry.open(f"sqlite:///{registry_file(state)}")


def _check_profile(profile: Mapping[str, Any]) -> None:
    # JSON that other readers read differently is refused: NaN, half a surrogate pair, integers that
    # a double cannot hold, nesting above 254
    plain = dict(profile)
    try:
        text = orjson.dumps(plain, option=orjson.OPT_STRICT_INTEGER)
        exact = orjson.loads(text) == plain
    except orjson.JSONEncodeError:
        text, exact = b"", False
    if not exact:
        raise BadRequestError("profile: expected plain JSON: finite numbers, valid Unicode text")
    if len(text) > MAX_PROFILE_BYTES:
        raise BadRequestError(
            f"profile: expected at most {MAX_PROFILE_BYTES} bytes of JSON, got {len(text)}"
        )
