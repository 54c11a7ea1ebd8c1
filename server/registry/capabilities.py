"""Capabilities of the devices: what they measured, what failed, and what the operator pinned.

Every method is one transaction. A device's reports are bounded, so that no device can fill the
database.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from sqlalchemy import ColumnElement, Connection, Table, delete, insert, select

from edge_sdk.errors import ManifestError
from edge_sdk.manifest import check_bundle_name
from profiles.measured import BundleMeasurement, Conditions
from server.errors import BadRequestError
from server.registry.records import Capability, Failure, FailureKind, Pin
from server.registry.schema import conditions, devices, failures, measurements, pins
from server.registry.selection.titles import unknown_device
from server.registry.trail.events import printable
from server.registry.transactions import Transactions, record

MAX_WHY: Final = 300
MAX_DEPTH: Final = 999
# the newest count: a device sees two variants a depth, and few versions matter
MEASUREMENTS_MOST: Final = 64
FAILURES_MOST: Final = 32
# failures further apart are not one trouble
FAILURES_APART_S: Final = 2 * 86_400.0


class Capabilities:
    """The capabilities of one registry's devices; safe from any thread."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def of(self, device_id: str) -> Capability:
        """Everything that is known of a device; empty for an unknown one."""
        with self._transactions.reading() as connection:
            return _capability(connection, device_id)

    def measured(self, device_id: str, measurement: BundleMeasurement) -> None:
        """Store what a bundle takes on a device, in place of an older measurement of it.

        Raises: UnknownDeviceError; BadRequestError for a name that no bundle has.
        """
        _check_bundle(measurement.bundle)
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            _check_device(connection, device_id)
            row = {"report": measurement.to_dict(), "measured_at": now}
            _replace(connection, measurements, device_id, measurement.bundle, row)
            _drop_oldest(connection, measurements, device_id, MEASUREMENTS_MOST)

    def report_conditions(self, device_id: str, found: Conditions) -> None:
        """Store a device's present state, in place of the one before.

        Raises: UnknownDeviceError; BadRequestError for a name that no bundle has.
        """
        _check_bundle(found.bundle)
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            _check_device(connection, device_id)
            connection.execute(delete(conditions).where(conditions.c.device == device_id))
            row = {"report": found.to_dict(), "reported_at": now}
            connection.execute(insert(conditions).values(device=device_id, **row))

    def conditions_of(self, device_ids: Collection[str]) -> dict[str, Conditions]:
        """The present state of each of these devices that has reported one, by its id."""
        query = select(conditions.c.device, conditions.c.report)
        query = query.where(conditions.c.device.in_(list(device_ids)))
        with self._transactions.reading() as connection:
            rows = connection.execute(query)
            return {device: Conditions.from_dict(report) for device, report in rows}

    def failed(
        self, device_id: str, bundle: str, why: str, *, kind: FailureKind = "memory"
    ) -> Failure:
        """Store that a device had to leave a bundle, and how often within days.

        Raises: UnknownDeviceError; BadRequestError for a name that no bundle has.
        """
        _check_bundle(bundle)
        why = printable(why, MAX_WHY)
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            _check_device(connection, device_id)
            before = _capability(connection, device_id).failures
            last = next((one for one in before if one.bundle == bundle), None)
            recent = last is not None and now - last.failed_at < FAILURES_APART_S
            count = last.count + 1 if last is not None and recent else 1
            row = {"kind": kind, "why": why, "failed_at": now, "count": count}
            _replace(connection, failures, device_id, bundle, row)
            _drop_oldest(connection, failures, device_id, FAILURES_MOST)
            return Failure(bundle, why, now, count, kind)

    def pin(
        self,
        device_id: str,
        *,
        depth: int | None = None,
        bundle: str | None = None,
        who: str = "operator",
    ) -> Pin:
        """Fix a device's depth, or its bundle, until `unpin`.

        Raises: UnknownDeviceError; BadRequestError unless exactly one is given and can be.
        """
        if (depth is None) == (bundle is None):
            raise BadRequestError("pin: expected a depth or a bundle, and only one of them")
        if bundle is not None:
            _check_bundle(bundle)
        if depth is not None and not 1 <= depth <= MAX_DEPTH:
            raise BadRequestError(f"depth: expected 1 to {MAX_DEPTH}, got {depth}")
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            _check_device(connection, device_id)
            connection.execute(delete(pins).where(pins.c.device == device_id))
            connection.execute(
                insert(pins).values(device=device_id, depth=depth, bundle=bundle, pinned_at=now)
            )
            record(connection, now, who, "device.pin", f"{device_id} {Pin(depth, bundle)}")
            return Pin(depth, bundle)

    def unpin(self, device_id: str, *, who: str = "operator") -> bool:
        """Let the fleet's rule choose again; returns whether the device was pinned.

        Raises: UnknownDeviceError.
        """
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            _check_device(connection, device_id)
            gone = connection.execute(delete(pins).where(pins.c.device == device_id)).rowcount > 0
            if gone:
                record(connection, now, who, "device.unpin", device_id)
            return gone

    def pinned(self) -> dict[str, Pin]:
        """Every pin, by device."""
        with self._transactions.reading() as connection:
            rows = connection.execute(select(pins.c.device, pins.c.depth, pins.c.bundle))
            return {device: Pin(depth, bundle) for device, depth, bundle in rows}


def _capability(connection: Connection, device_id: str) -> Capability:
    measured = connection.scalars(
        select(measurements.c.report)
        .where(measurements.c.device == device_id)
        .order_by(measurements.c.measured_at, measurements.c.bundle)
    )
    now = connection.scalars(
        select(conditions.c.report).where(conditions.c.device == device_id)
    ).one_or_none()
    fails = connection.execute(
        select(
            failures.c.bundle,
            failures.c.why,
            failures.c.failed_at,
            failures.c.count,
            failures.c.kind,
        )
        .where(failures.c.device == device_id)
        .order_by(failures.c.failed_at, failures.c.bundle)
    )
    pin = connection.execute(
        select(pins.c.depth, pins.c.bundle).where(pins.c.device == device_id)
    ).one_or_none()
    return Capability(
        measurements=tuple(BundleMeasurement.from_dict(report) for report in measured),
        conditions=None if now is None else Conditions.from_dict(now),
        failures=tuple(Failure(*row) for row in fails),
        pin=None if pin is None else Pin(*pin),
    )


def _replace(
    connection: Connection, table: Table, device_id: str, bundle: str, row: dict[str, object]
) -> None:
    connection.execute(delete(table).where(_this(table, device_id), table.c.bundle == bundle))
    connection.execute(insert(table).values(device=device_id, bundle=bundle, **row))


def _drop_oldest(connection: Connection, table: Table, device_id: str, most: int) -> None:
    at = next(column for column in table.c if column.name.endswith("_at"))
    newest = (
        select(table.c.bundle)
        .where(_this(table, device_id))
        .order_by(at.desc(), table.c.bundle.desc())
        .limit(most)
    )
    kept = connection.scalars(newest).all()
    connection.execute(delete(table).where(_this(table, device_id), table.c.bundle.not_in(kept)))


def _this(table: Table, device_id: str) -> ColumnElement[bool]:
    return table.c.device == device_id


def _check_device(connection: Connection, device_id: str) -> None:
    known = connection.scalars(select(devices.c.id).where(devices.c.id == device_id))
    if known.one_or_none() is None:
        raise unknown_device(connection, device_id)


def _check_bundle(name: str) -> None:
    try:
        check_bundle_name(name)
    except ManifestError as err:
        raise BadRequestError(str(err)) from err
