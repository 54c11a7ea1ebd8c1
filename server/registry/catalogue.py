"""The catalogue of models: published versions, the active one of each name, each fleet's model.

A version is published once: its number is never used again, not even after it was removed. The
version that is published with a higher number than all before it becomes active. A fleet follows
the active version of its model, or stays at the version to which it is pinned. A fleet without an
assignment has the model that was published first. Every method is one transaction.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Final

from sqlalchemy import Connection, delete, insert, select, union, update

from server.errors import BadRequestError, ConflictError, UnknownModelError
from server.registry.records import FleetModel, ModelVersion
from server.registry.schema import devices, fleets, models, tokens
from server.registry.selection.standing import end_standing
from server.registry.transactions import MAX_ID, Transactions, check_id, record

logger = logging.getLogger(__name__)

MAX_VERSION: Final = 999_999_999


class ModelCatalogue:
    """The models of one registry; safe from any thread."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    # versions

    def versions(self) -> tuple[ModelVersion, ...]:
        """Every published version that is not removed, by name and version."""
        with self._transactions.reading() as connection:
            return _present(_all_versions(connection))

    def removed(self, name: str) -> tuple[ModelVersion, ...]:
        """The versions of a name that were removed; their numbers stay taken."""
        with self._transactions.reading() as connection:
            there = _all_versions(connection)
        return tuple(one for one in there if one.name == name and one.removed_at is not None)

    def check_free(self, name: str, version: int, digest: str) -> None:
        """Check that files with this digest may be published as that version, or are already.

        Raises: ConflictError if the number was used for other files, or was removed.
        """
        with self._transactions.reading() as connection:
            _check_free(_all_versions(connection), name, version, digest)

    def publish(
        self,
        name: str,
        version: int,
        digest: str | None = None,
        *,
        hold: bool = False,
        who: str = "server",
    ) -> ModelVersion:
        """Store a new version; it becomes active if its number is the highest of the name so far.

        A second call with the same digest changes nothing.

        Args:
            hold: whether the version waits for a roll-out or `activate`, unless it is the first of
                its name.
        Raises: BadRequestError for a name that is not an id or a version outside 1..999999999;
            ConflictError as `check_free`.
        """
        check_id(name, "model")
        if not 1 <= version <= MAX_VERSION:
            raise BadRequestError(f"version: expected 1 to {MAX_VERSION}, got {version}")
        now = self._transactions.now()
        this = (models.c.name == name) & (models.c.version == version)
        with self._transactions.reading() as connection:
            there = _all_versions(connection)
        _check_free(there, name, version, digest)
        known = [one for one in there if (one.name, one.version) == (name, version)]
        if known and digest in (None, known[0].digest):
            return known[0]
        with self._transactions.writing() as connection:
            there = locked_versions(connection, name)
            _check_free(there, name, version, digest)
            if any(one.version == version for one in there):
                if digest is not None:
                    connection.execute(update(models).where(this).values(digest=digest))
                return _need(_all_versions(connection), name, version)
            connection.execute(
                insert(models).values(
                    name=name, version=version, active=False, published_at=now, digest=digest
                )
            )
            record(connection, now, who, "model.publish", f"{name}/{version}")
            waits = hold and bool(_present(there))
            if not waits and all(version > one.version for one in there):
                set_active(connection, name, version, now, who)
            return _need(_all_versions(connection), name, version)

    def activate(self, name: str, version: int, *, who: str = "operator") -> ModelVersion:
        """Make that version the active one of its name; fleets that follow the name move to it.

        Raises: UnknownModelError naming the published versions.
        """
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            locked_versions(connection, name)
            if not _need(_all_versions(connection), name, version).active:
                set_active(connection, name, version, now, who)
            return _need(_all_versions(connection), name, version)

    def roll_back(self, name: str, *, who: str = "operator") -> tuple[ModelVersion, ModelVersion]:
        """Make the version active that was active before the present one.

        The version that is left counts as never activated, so a second call goes further back.

        Returns: the version that is active now, and the one that was left.
        Raises: UnknownModelError; ConflictError if no other version was ever active.
        """
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            of_name = [
                one for one in _present(locked_versions(connection, name)) if one.name == name
            ]
            left = next((one for one in of_name if one.active), None)
            if left is None:
                raise UnknownModelError(f"model {name[:MAX_ID]!r}: not published")
            earlier = [one for one in of_name if one is not left and one.activated_at is not None]
            if not earlier:
                raise ConflictError(
                    f"{left}: no other version of {name} was active before; activate one by its"
                    " number"
                )
            target = max(earlier, key=lambda one: (one.activated_at or 0.0, one.version))
            set_active(connection, name, target.version, now, who)
            this = (models.c.name == name) & (models.c.version == left.version)
            connection.execute(update(models).where(this).values(activated_at=None))
            there = _all_versions(connection)
            return _need(there, name, target.version), _need(there, name, left.version)

    def check_removable(self, name: str, version: int | None) -> tuple[ModelVersion, ...]:
        """The versions that `remove` would remove.

        Raises: as `remove`.
        """
        with self._transactions.reading() as connection:
            return _removable(connection, name, version, self._transactions.now())

    def remove(
        self, name: str, version: int | None, *, who: str = "operator"
    ) -> tuple[ModelVersion, ...]:
        """Remove a version, or all versions of a name; the numbers stay taken.

        Returns: what was removed.
        Raises: UnknownModelError; ConflictError for the active version while there are others, and
            for what a fleet should run, saying what to do first.
        """
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            locked_versions(connection, name)
            removed = _removable(connection, name, version, now)
            for one in removed:
                this = (models.c.name == name) & (models.c.version == one.version)
                connection.execute(update(models).where(this).values(active=False, removed_at=now))
                record(connection, now, who, "model.remove", str(one))
            return removed

    # fleets

    def fleets(self) -> tuple[FleetModel, ...]:
        """The model of every fleet that has devices, valid tokens or an assignment, by fleet."""
        with self._transactions.reading() as connection:
            return fleets_wanted(connection, self._transactions.now())

    def wanted(self, fleet: str) -> FleetModel:
        """The model of one fleet, whether it has devices or not."""
        with self._transactions.reading() as connection:
            return wanted(connection, (fleet,))[0]

    def assign(
        self, fleet: str, name: str, version: int | None = None, *, who: str = "operator"
    ) -> FleetModel:
        """Give a fleet a model: it follows the active version, or is pinned to `version`.

        Raises: UnknownModelError naming the published versions; BadRequestError for a fleet that is
            not an id.
        """
        check_id(fleet, "fleet")
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            there = _present(_all_versions(connection))
            if version is not None:
                _need(there, name, version)
            elif name not in {one.name for one in there}:
                raise _unknown(there, name)
            set_fleet(connection, fleet, (name, version), now, who)
            return wanted(connection, (fleet,))[0]

    def unassign(self, fleet: str, *, who: str = "operator") -> FleetModel:
        """Give a fleet the model that was published first, as a fleet without an assignment has.

        Raises: BadRequestError for a fleet that is not an id.
        """
        check_id(fleet, "fleet")
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            if connection.execute(delete(fleets).where(fleets.c.name == fleet)).rowcount:
                end_standing(connection, now, partial(wanted, connection))
                record(connection, now, who, "fleet.unassign", fleet)
            return wanted(connection, (fleet,))[0]


def _all_versions(connection: Connection) -> tuple[ModelVersion, ...]:
    """Every version ever published, removed ones included."""
    query = select(models).order_by(models.c.name, models.c.version)
    return tuple(ModelVersion(**row) for row in connection.execute(query).mappings())


def _present(versions: Iterable[ModelVersion]) -> tuple[ModelVersion, ...]:
    return tuple(one for one in versions if one.removed_at is None)


def locked_versions(connection: Connection, name: str) -> tuple[ModelVersion, ...]:
    """Every version of a name, removed ones included, locked until the transaction ends."""
    # rows may be locked one by one: in one order, or two changes would deadlock
    query = select(models).where(models.c.name == name).order_by(models.c.version)
    found = connection.execute(query.with_for_update()).mappings()
    return tuple(ModelVersion(**row) for row in found)


def _need(versions: Iterable[ModelVersion], name: str, version: int) -> ModelVersion:
    there = _present(versions)
    for one in there:
        if (one.name, one.version) == (name, version):
            return one
    raise _unknown(there, name, version)


def _unknown(
    there: Iterable[ModelVersion], name: str, version: int | None = None
) -> UnknownModelError:
    known = ", ".join(map(str, there)) or "none"
    wanted = name[:MAX_ID] if version is None else f"{name[:MAX_ID]}/{version}"
    return UnknownModelError(f"model {wanted}: not published; available: {known}")


def _check_free(
    versions: Iterable[ModelVersion], name: str, version: int, digest: str | None
) -> None:
    for one in versions:
        if (one.name, one.version) != (name, version):
            continue
        if one.removed_at is not None:
            raise ConflictError(
                f"{one}: this number was published and removed, and a number is never used twice;"
                " export under a new version"
            )
        if digest is not None and one.digest not in (None, digest):
            raise ConflictError(
                f"{one}: this number was published with other files, and a number is never used"
                " twice; export under a new version"
            )


def set_active(connection: Connection, name: str, version: int, now: float, who: str) -> None:
    """Make a version the active one of its name, inside a transaction that has locked the name."""
    of_name = models.c.name == name
    connection.execute(update(models).where(of_name, models.c.active).values(active=False))
    connection.execute(
        update(models)
        .where(of_name, models.c.version == version)
        .values(active=True, activated_at=now)
    )
    end_standing(connection, now, partial(wanted, connection))
    record(connection, now, who, "model.activate", f"{name}/{version}")


def set_fleet(
    connection: Connection, fleet: str, model: tuple[str, int | None], now: float, who: str
) -> None:
    """Give a fleet a model inside a transaction; with a version it is pinned to it.

    Args:
        model: name, and version or None.
    """
    name, version = model
    connection.execute(delete(fleets).where(fleets.c.name == fleet))
    connection.execute(
        insert(fleets).values(name=fleet, model=name, version=version, assigned_at=now)
    )
    end_standing(connection, now, partial(wanted, connection))
    pin = "" if version is None else f"/{version}"
    record(connection, now, who, "fleet.assign", f"{fleet} model={name}{pin}")


def _removable(
    connection: Connection, name: str, version: int | None, now: float
) -> tuple[ModelVersion, ...]:
    there = _present(_all_versions(connection))
    of_name = tuple(one for one in there if one.name == name)
    if version is None and not of_name:
        raise _unknown(there, name)
    chosen = of_name if version is None else (_need(there, name, version),)
    for fleet in fleets_wanted(connection, now):
        _check_unused(fleet, chosen, whole=len(chosen) == len(of_name))
    if len(chosen) < len(of_name) and chosen[0].active:
        raise ConflictError(
            f"{chosen[0]} is the active version of {name}; activate another one first, or roll"
            " back, then remove it"
        )
    return chosen


def _check_unused(fleet: FleetModel, chosen: Iterable[ModelVersion], *, whole: bool) -> None:
    """Raises: ConflictError if the fleet needs one of the chosen versions."""
    for one in chosen:
        pinned = fleet.pinned and (fleet.model, fleet.version) == (one.name, one.version)
        if not pinned and not (whole and fleet.model == one.name):
            continue
        how = "by assignment" if fleet.assigned else "by default"
        need = f"is pinned to {one}" if pinned else f"has the model {one.name} {how}"
        raise ConflictError(
            f"{one}: fleet {fleet.fleet} {need}; assign the fleet another model or version first"
        )


def fleets_wanted(connection: Connection, now: float) -> tuple[FleetModel, ...]:
    """Models that fleets should run: those with devices, valid tokens or an assignment.

    Args:
        now: UTC seconds since 1970.
    """
    valid = tokens.c.used_at.is_(None) & (tokens.c.expires_at > now)
    known = union(
        select(devices.c.fleet).where(devices.c.revoked_at.is_(None)),
        select(tokens.c.fleet).where(valid),
        select(fleets.c.name),
    )
    return wanted(connection, sorted(connection.scalars(known)))


def wanted(connection: Connection, names: Iterable[str]) -> tuple[FleetModel, ...]:
    """Models that the fleets of these names should run, in their order."""
    versions = _all_versions(connection)
    there = _present(versions)
    first = _first_published(versions, {one.name for one in there})
    rows = {row["name"]: row for row in connection.execute(select(fleets)).mappings()}
    found = []
    for fleet in names:
        row = rows.get(fleet)
        model, pin = (first, None) if row is None else (row["model"], row["version"])
        follows = _followed([one for one in there if one.name == model])
        version = follows if pin is None else pin
        found.append(FleetModel(fleet, model, version, pin is not None, row is not None))
    return tuple(found)


def _first_published(versions: Iterable[ModelVersion], there: set[str]) -> str | None:
    """The name whose first version was published first, among those that have a version."""
    first = min(
        (one for one in versions if one.name in there),
        key=lambda one: (one.published_at, one.name),
        default=None,
    )
    return None if first is None else first.name


def _followed(of_name: list[ModelVersion]) -> int | None:
    """The version that fleets follow: the active one; the highest if none is."""
    chosen = max(of_name, key=lambda one: (one.active, one.version), default=None)
    return None if chosen is None else chosen.version
