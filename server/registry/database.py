"""The registry of tokens, devices and, as its catalogue, models. Safe from any thread.

Every method is one transaction. The call that makes a secret returns it; only its hash is stored.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Self

import orjson
from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    and_,
    delete,
    func,
    insert,
    not_,
    or_,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from edge_sdk.wire.topics import ID_PATTERN
from server.errors import (
    ApprovalError,
    AuthenticationError,
    BadRequestError,
    TokenError,
)
from server.registry.alerts.notices import Notices
from server.registry.alerts.store import Alerts
from server.registry.capabilities import Capabilities
from server.registry.catalogue import ModelCatalogue
from server.registry.credentials import is_secret, mosquitto_hash, new_secret, secret_sha256
from server.registry.keys import ApiKeys
from server.registry.location import RegistryLocation, existing_location
from server.registry.membership import Membership, end_tokens_of
from server.registry.records import Device, Token
from server.registry.reports import DeviceReports
from server.registry.rollouts.store import Rollouts
from server.registry.schema import audit, devices, tokens
from server.registry.selection.tags import Tags
from server.registry.selection.titles import NAMES_LOCK, Titles, folded, unknown_device
from server.registry.sign_in.sign_ins import SignIns
from server.registry.telemetry.history import TelemetryHistory
from server.registry.trail.trail import AuditTrail
from server.registry.transactions import (
    CHANGE,
    MAX_ID,
    OPERATOR,
    READER,
    Transactions,
    all_rows,
    check_id,
    one_row,
    record,
    take_turns,
)

logger = logging.getLogger(__name__)

MAX_NOTE: Final = 200
MAX_TOKENS: Final = 10_000  # made at once
MAX_BUNDLE: Final = 160
MAX_DEPTH: Final = 999
MAX_PROFILE_BYTES: Final = 16_384
MAX_TOKEN_TTL_S: Final = 30 * 86_400.0
# without it, heartbeats of 500 devices every few seconds would each be a synced write
TOUCH_RESOLUTION_S: Final = 10.0
# user names of the API and of brokers that no device may have
RESERVED_IDS: Final = frozenset({"backend", OPERATOR, READER, "server"})

REFUSED_ENROLMENT: Final = "token: unknown, used or expired; ask for a new one"

# columns of a device that an enrolment sets
_OF_ENROLMENT: Final = (
    *("credential_sha256", "mosquitto_hash", "next_sha256", "next_until"),
    *("profile", "enrolled_at", "approved_at", "revoked_at"),
)
_NO_SHA256: Final = secret_sha256("")


class Registry:
    """The registry in one database; a program gets it by `open`.

    Attributes:
        catalogue: the models, their versions, and the model of each fleet.
        reports: what devices report on their bundles.
        capabilities: what the devices measured, what failed, and what the operator pinned.
        trail: the audit log.
        membership: approval of devices, their new credentials, and orders to them.
        tags: the operator's words for devices.
        titles: what people call them.
        keys: the API keys of programs that are no devices.
        telemetry: what the devices did and how they were, thinned with age.
        sign_ins: links to the dashboard, and the sessions that they opened.
        rollouts: new versions on their way to a share of the devices after the other.
        alerts: what someone may have to act on, open and closed.
        notices: what receivers are told of alerts, and what waits.
    """

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions
        self.catalogue = ModelCatalogue(transactions)
        self.reports = DeviceReports(transactions)
        self.capabilities = Capabilities(transactions)
        self.trail = AuditTrail(transactions)
        self.membership = Membership(transactions)
        self.tags = Tags(transactions)
        self.titles = Titles(transactions)
        self.keys = ApiKeys(transactions)
        self.telemetry = TelemetryHistory(transactions)
        self.sign_ins = SignIns(transactions)
        self.rollouts = Rollouts(transactions)
        self.alerts = Alerts(transactions)
        self.notices = Notices(transactions)

    @classmethod
    def open(cls, url: str | URL, *, clock: Callable[[], float] = time.time) -> Self:
        """Create the database or bring it up to date, and open it.

        Args:
            clock: UTC seconds since 1970.
        Raises: ConfigurationError for the URL; RegistryError if the database cannot be opened or is
            newer than this program.
        """
        return cls(Transactions.open(url, clock=clock))

    def checkpoint(self) -> None:
        """Fold a SQLite database's log into its file, which is then complete by itself."""
        self._transactions.checkpoint()

    def close(self) -> None:
        """Close the database's connections."""
        self._transactions.close()

    # tokens

    def create_token(
        self,
        fleet: str = "default",
        ttl_s: float = 3600.0,
        note: str = "",
        *,
        approve: bool = False,
    ) -> str:
        """Make one enrolment token; otherwise as `create_tokens`."""
        return self.create_tokens(1, fleet, ttl_s, note, approve=approve)[0]

    def create_tokens(
        self,
        count: int,
        fleet: str | None = None,
        ttl_s: float = 3600.0,
        note: str = "",
        *,
        approve: bool = False,
        device: str | None = None,
    ) -> list[str]:
        """Make enrolment tokens, each of which works once within `ttl_s` seconds.

        Args:
            count: 1 to 10,000.
            fleet: None takes that of `device`, else `default`.
            approve: whether a device that enrols with one waits for the operator's approval.
            device: the enrolled device that comes back with the token, on a new disk, say: it
                keeps its name, its fleet, and what is known of it.
        Returns: their secrets.
        Raises: BadRequestError for another count, for a fleet that is not an id or not that of
            `device`, for `ttl_s` outside (0, 30 days], or for a note that is longer than 200
            characters or not printable; UnknownDeviceError for `device`.
        """
        if not 1 <= count <= MAX_TOKENS:
            raise BadRequestError(f"count: expected 1 to {MAX_TOKENS} tokens, got {count}")
        fleet = self._fleet_of_tokens(count, fleet, device)
        if not 0 < ttl_s <= MAX_TOKEN_TTL_S:
            raise BadRequestError(
                f"ttl_s: expected more than 0, at most {MAX_TOKEN_TTL_S:.0f} seconds, got {ttl_s}"
            )
        if len(note) > MAX_NOTE or not note.isprintable():
            raise BadRequestError(f"note: expected at most {MAX_NOTE} printable characters")
        made, now = [new_secret() for _ in range(count)], self._transactions.now()
        common = {"fleet": fleet, "note": note, "approve": approve, "device": device}
        times = {"created_at": now, "expires_at": now + ttl_s}
        with self._transactions.writing() as connection:
            connection.execute(
                insert(tokens),
                [{"token_sha256": secret_sha256(one), **common, **times} for one in made],
            )
            parts = [f"fleet={fleet}", f"count={count}" if count > 1 else ""]
            parts += [f"device={device}" if device else "", f"note={note}" if note else ""]
            detail = " ".join(part for part in (*parts, "approve" if approve else "") if part)
            record(connection, now, "operator", "token.create", detail)
        return made

    def _fleet_of_tokens(self, count: int, fleet: str | None, device: str | None) -> str:
        if device is None:
            return check_id(fleet or "default", "fleet")
        its = self.device(device).fleet
        if count != 1 or fleet not in (None, its):
            raise BadRequestError(
                f"device: expected one token, for the fleet {its} in which {device} is, got"
                f" {count} for {fleet or its}"
            )
        return its

    def tokens(self) -> tuple[Token, ...]:
        """All tokens ever made, oldest first."""
        with self._transactions.reading() as connection:
            query = select(tokens).order_by(tokens.c.created_at)
            return tuple(Token(**row) for row in connection.execute(query).mappings())

    def token_works(self, token: str) -> bool:
        """Whether a token would enrol a device now; it is only read."""
        query = (
            select(tokens.c.token_sha256)
            .where(tokens.c.token_sha256 == secret_sha256(token))
            .where(tokens.c.used_at.is_(None), tokens.c.expires_at > self._transactions.now())
        )
        with self._transactions.reading() as connection:
            return connection.execute(query).first() is not None

    def redeem_token(
        self,
        token: str,
        wanted: str | None,
        profile: Mapping[str, Any],
        *,
        approve: bool = False,
        can_wait: bool = True,
    ) -> tuple[Device, str]:
        """Enrol a device; `redeem` without what the device was before."""
        device, credential, _ = self.redeem(
            token, wanted, profile, approve=approve, can_wait=can_wait
        )
        return device, credential

    def redeem(
        self,
        token: str,
        wanted: str | None,
        profile: Mapping[str, Any],
        *,
        approve: bool = False,
        can_wait: bool = True,
    ) -> tuple[Device, str, Device | None]:
        """Enrol a device: use up the token, and make an identity and its credential.

        If another device has the id `wanted`, -2, -3... is added. A token that was made for a
        device gives that device a new credential, and it keeps its id. Of several calls with one
        token exactly one succeeds, even at the same time.

        Args:
            approve: whether the device waits for the operator's approval; the token may ask for it.
            can_wait: False for an agent of a release that does not wait.
        Returns: the device; its credential, of which only the hash is stored; and what the device
            was before, if it came back.
        Raises: TokenError if the token is unknown, used or expired (the text does not say which);
            ApprovalError if the device would have to wait and cannot; BadRequestError for an id or
            a profile that cannot be stored.
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
                raise TokenError(REFUSED_ENROLMENT)
            this_token = tokens.c.token_sha256 == token_sha256
            asked = select(tokens.c.fleet, tokens.c.approve, tokens.c.device).where(this_token)
            fleet, by_token, back = connection.execute(asked).one()
            waits = approve or by_token
            if waits and not can_wait:  # the token is not used: nothing of this is kept
                raise ApprovalError(
                    "this server lets devices in after the operator's approval, for which this"
                    " agent cannot wait: update splitedge on the device; the token stays valid"
                )
            values = {
                "fleet": fleet,
                "credential_sha256": secret_sha256(credential),
                "mosquitto_hash": mosquitto_hash(credential),
                "profile": dict(profile),
                "enrolled_at": now,
                "approved_at": None if waits else now,
            }
            before = None if back is None else _find_device(connection, back)
            if before is not None:
                fresh = {"revoked_at": None, "next_sha256": None, "next_until": None}
                connection.execute(
                    update(devices).where(devices.c.id == before.id).values(**values, **fresh)
                )
                device = _need_device(connection, before.id)
            else:
                name = back or wanted or f"device-{secrets.token_hex(4)}"
                device = _insert_device(connection, name, values)
            connection.execute(update(tokens).where(this_token).values(used_by=device.id))
            detail = f"fleet={fleet}{' again' if back else ''}"
            detail += " waits for approval" if waits else ""
            record(connection, now, device.id, "device.enrol", detail)
        return device, credential, before

    def undo_enrolment(self, device: Device, token: str, before: Device | None = None) -> None:
        """Undo `redeem`: the token works again, and a new device is deleted.

        Use it only if the credential was not handed out.

        Args:
            before: what `redeem` returned: a device that came back has its old credential again.
        """
        now = self._transactions.now()
        used = and_(tokens.c.token_sha256 == secret_sha256(token), tokens.c.used_by == device.id)
        with self._transactions.writing() as connection:
            connection.execute(update(tokens).where(used).values(used_at=None, used_by=None))
            made_for = select(tokens.c.device).where(tokens.c.token_sha256 == secret_sha256(token))
            this_device = devices.c.id == device.id
            if connection.execute(made_for).scalar_one_or_none() is None or before is None:
                connection.execute(delete(devices).where(this_device))
            else:
                # unless something else gave it another credential, or shut it out, meanwhile
                kept = {name: getattr(before, name) for name in _OF_ENROLMENT}
                same = devices.c.credential_sha256 == device.credential_sha256
                still = and_(this_device, same, devices.c.revoked_at.is_(None))
                connection.execute(update(devices).where(still).values(kept))
            record(connection, now, device.id, "device.enrol.undo", f"fleet={device.fleet}")

    # devices

    def authenticate(
        self, device_id: str, credential: str, *, even_unapproved: bool = False
    ) -> Device:
        """The device with that id, if the credential is right.

        While a new credential waits to be confirmed, the old one and the new one are right.

        Args:
            even_unapproved: also a device that waits for approval.
        Raises: AuthenticationError if it is wrong, or if the device was revoked; ApprovalError if
            the device waits for approval.
        """
        with self._transactions.reading() as connection:
            device = _find_device(connection, device_id)
        # an unknown id takes as long as a wrong credential
        expected = _NO_SHA256 if device is None else device.credential_sha256
        matches = is_secret(credential, expected)
        if device is not None and device.next_sha256 is not None and not matches:
            in_time = (device.next_until or 0.0) > self._transactions.now()
            matches = is_secret(credential, device.next_sha256) and in_time
        if device is None or not matches:
            raise AuthenticationError("unknown device or wrong credential; enrol this device")
        if device.revoked_at is not None:
            raise AuthenticationError(f"device {device.id}: revoked; enrol it with a new token")
        if device.approved_at is None and not even_unapproved:
            raise ApprovalError(
                f"device {device.id} waits for approval: ask the operator to run `splitedge server"
                f" devices approve {device.id}`"
            )
        return device

    def device(self, device_id: str) -> Device:
        """The device with that id, revoked or not.

        Raises: UnknownDeviceError.
        """
        with self._transactions.reading() as connection:
            return _need_device(connection, device_id)

    def devices(self, fleet: str | None = None, *, profiles: bool = True) -> tuple[Device, ...]:
        """All devices, or those of one fleet, revoked ones included, by id.

        Args:
            profiles: False leaves the profiles empty, for who reads all devices often: of 500
                devices they take more time than all the rest.
        Raises: BadRequestError for a fleet that is not an id.
        """
        columns = [one for one in devices.c if profiles or one.name != "profile"]
        query = select(*columns).order_by(devices.c.id)
        if fleet is not None:
            check_id(fleet, "fleet")
            query = query.where(devices.c.fleet == fleet)
        none: dict[str, Any] = {} if profiles else {"profile": {}}
        with self._transactions.reading() as connection:
            return tuple(Device(**row, **none) for row in all_rows(connection, query))

    def profiles(self, device_ids: Iterable[str]) -> dict[str, Mapping[str, Any]]:
        """Profiles of these devices, by id; unknown ids are left out."""
        query = select(devices.c.id, devices.c.profile).where(devices.c.id.in_(list(device_ids)))
        with self._transactions.reading() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def revoke(self, device_id: str, *, who: str = "operator") -> Device:
        """Revoke a device: it is refused from now on, and so are tokens with which it comes back.

        A second call changes nothing, but for tokens that were made since.

        Raises: UnknownDeviceError.
        """
        now = self._transactions.now()
        self.device(device_id)
        with self._transactions.writing() as connection:
            # tokens first, in the order in which `redeem` locks
            end_tokens_of(connection, device_id)
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
        before = self.device(device_id)  # nothing is written where nothing changes
        if (before.depth, before.bundle) == (depth, bundle):
            return before
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
        """Store that these devices were seen now, to within `TOUCH_RESOLUTION_S`, and are there.

        Unknown ids are ignored. A call writes nothing if all of them were seen just before.
        """
        now = self._transactions.now()
        # a last_seen ahead of the clock is due too: the clock was set back
        fresh = devices.c.last_seen.between(now - TOUCH_RESOLUTION_S, now)
        stale = or_(devices.c.last_seen.is_(None), not_(fresh), devices.c.gone_at.is_not(None))
        self._write_where(
            and_(devices.c.id.in_(device_ids), stale), {"last_seen": now, "gone_at": None}
        )

    def depart(self, *device_ids: str) -> None:
        """Store that these devices went away now: they said goodbye, or their connections broke.

        Unknown ids, and devices that went away before and were not heard since, are ignored.
        """
        there = and_(devices.c.id.in_(device_ids), devices.c.gone_at.is_(None))
        self._write_where(there, {"gone_at": self._transactions.now()})

    def _write_where(self, due: ColumnElement[bool], values: Mapping[str, float | None]) -> None:
        """Write values to the devices that are due; nothing is written if none is."""
        with self._transactions.reading() as connection:
            ids = connection.scalars(select(devices.c.id).where(due)).all()
        if ids:
            with self._transactions.writing() as connection:
                connection.execute(update(devices).where(devices.c.id.in_(ids)).values(**values))

    def keep_mosquitto_hashes(self, hashes: Mapping[tuple[str, str], str]) -> None:
        """Store the hashes by which Mosquitto checks credentials, for devices that lack them.

        Args:
            hashes: by device and `credential_sha256`; a credential that is no longer the device's
                is passed over.
        """
        with self._transactions.writing() as connection:
            for (device_id, sha256), hashed in hashes.items():
                lacking = and_(
                    devices.c.id == device_id,
                    devices.c.credential_sha256 == sha256,
                    devices.c.mosquitto_hash.is_(None),
                )
                connection.execute(update(devices).where(lacking).values(mosquitto_hash=hashed))

    def update_profile(self, device_id: str, profile: Mapping[str, Any]) -> Device:
        """Replace the device's profile.

        Raises: UnknownDeviceError; BadRequestError for a profile that cannot be stored.
        """
        _check_profile(profile)
        with self._transactions.writing() as connection:
            this_device = devices.c.id == _need_device(connection, device_id).id
            connection.execute(update(devices).where(this_device).values(profile=dict(profile)))
            return _need_device(connection, device_id)

    # changes

    def last_change(self) -> int:
        """A number that grows with every change in the audit log: an enrolment, a revocation...

        It is cheap to read, so a follower of the registry reads the rest only when it has grown.
        """
        with self._transactions.reading() as connection:
            query = select(func.max(audit.c.id)).where(audit.c.kind == CHANGE)
            return connection.execute(query).scalar_one() or 0


def _insert_device(connection: Connection, wanted: str, values: Mapping[str, Any]) -> Device:
    take_turns(connection, NAMES_LOCK)  # no title that equals the id is given meanwhile
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
    # all titles: a database cannot fold them as `give` does
    titles = connection.scalars(select(devices.c.title).where(devices.c.title.is_not(None)))
    taken = RESERVED_IDS.union(
        connection.scalars(select(devices.c.id).where(alike)), map(folded, titles)
    )
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
        raise unknown_device(connection, device_id)
    return device


def open_registry(state: Path, location: RegistryLocation | None = None) -> Registry:
    """The registry of the server with this state folder.

    Args:
        location: where it is; by default where the state folder says.
    Raises: RegistryError if it cannot be opened or is newer than this program; ConfigurationError
        if its place or its password cannot be read, or nothing is there any more.
    """
    return Registry.open((location or existing_location(state)).address)


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
