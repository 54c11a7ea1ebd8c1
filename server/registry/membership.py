"""Membership of devices: approval, new credentials, and orders that they carry out by themselves.

A credential is replaced in two steps. `new_credential` makes one that is valid beside the old one;
`confirm_credential`, which the device calls with the new one, ends the old one. Whenever either
side stops in between, the device has a credential that works: the old one, or both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from sqlalchemy import Column, Connection, and_, delete, insert, select, update

from edge_sdk.wire.topics import ID_PATTERN
from server.errors import AuthenticationError, ConflictError
from server.registry.credentials import is_secret, mosquitto_hash, new_secret, secret_sha256
from server.registry.records import Order
from server.registry.schema import METADATA, devices, failures, orders, reports, tokens
from server.registry.selection.titles import unknown_device
from server.registry.transactions import Transactions, one_row, record

# a device confirms within a second; one that was cut off then asks for another credential
CONFIRM_S: Final = 600.0
ROTATE: Final = "rotate"
LIFT: Final = "lift-quarantine"
# how the audit log calls an order that a device has carried out: as the order, with an ending
_DONE: Final[Mapping[str, str]] = {ROTATE: "device.rotate.done", LIFT: "quarantine.lift.done"}


class Membership:
    """Approvals, credentials and orders of one registry's devices; safe from any thread."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def approve(self, device_id: str, *, who: str = "operator") -> bool:
        """Let a device in that waits for approval. A second call changes nothing.

        Returns: whether it waited.
        Raises: UnknownDeviceError; ConflictError if it was revoked or rejected.
        """
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            device = _device(connection, device_id)
            if device["revoked_at"] is not None:
                raise ConflictError(f"device {device_id}: revoked; enrol it with a new token")
            if device["approved_at"] is not None:
                return False
            _set(connection, device_id, approved_at=now)
            record(connection, now, who, "device.approve", device_id)
            return True

    def reject(self, device_id: str, *, who: str = "operator") -> None:
        """Refuse a device that waits for approval, for good.

        Raises: UnknownDeviceError; ConflictError if it does not wait.
        """
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            end_tokens_of(connection, device_id)
            device = _device(connection, device_id)
            if device["approved_at"] is not None:
                raise ConflictError(
                    f"device {device_id}: approved already; `splitedge server revoke {device_id}`"
                    " shuts it out"
                )
            if device["revoked_at"] is None:
                _set(connection, device_id, revoked_at=now)
                record(connection, now, who, "device.reject", device_id)

    def new_credential(self, device_id: str) -> str:
        """Make a credential that is valid beside the device's own, for CONFIRM_S.

        One that was made before and never confirmed is no longer valid.

        Raises: UnknownDeviceError.
        """
        now, credential = self._transactions.now(), new_secret()
        with self._transactions.writing() as connection:
            _device(connection, device_id)
            until = now + CONFIRM_S
            _set(connection, device_id, next_sha256=secret_sha256(credential), next_until=until)
            record(connection, now, device_id, "credential.new", "waits to be confirmed")
        return credential

    def confirm_credential(self, device_id: str, credential: str) -> None:
        """Make a new credential the only one. A second call with it changes nothing.

        Raises: UnknownDeviceError; AuthenticationError for a credential that is neither new nor
            the device's own.
        """
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            device = _device(connection, device_id)
            if is_secret(credential, device["credential_sha256"]):
                return
            waiting = device["next_sha256"]
            if waiting is None or device["next_until"] < now or not is_secret(credential, waiting):
                raise AuthenticationError("this credential is not the new one; ask for another")
            hashes = {
                "credential_sha256": waiting,
                "mosquitto_hash": mosquitto_hash(credential),
            }
            _set(connection, device_id, **hashes, next_sha256=None, next_until=None)
            _delete_order(connection, Order(device_id, ROTATE, "", now))
            record(connection, now, device_id, "credential.confirm", "the old one is not valid now")

    def ask_to_rotate(self, device_id: str, *, who: str = "operator") -> None:
        """Order a device to replace its credential.

        Raises: UnknownDeviceError; ConflictError if it is revoked or waits for approval.
        """
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            _check_active(_device(connection, device_id))
            _put_order(connection, Order(device_id, ROTATE, "", now))
            record(connection, now, who, "device.rotate", device_id)

    def remove(self, device_id: str, *, who: str = "operator") -> None:
        """Delete a device and all that is known of it but its entries in the audit log.

        It is refused from now on, and its name is free: a device that enrols under it keeps it. So
        tokens with which the removed device could have come back are refused, too.

        Raises: UnknownDeviceError.
        """
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            end_tokens_of(connection, device_id)  # first, in the order in which `redeem` locks
            _device(connection, device_id)
            for column in columns_with_devices():
                this = column == device_id
                if column.nullable:  # the row is of something else, and stays
                    connection.execute(update(column.table).where(this).values({column: None}))
                else:
                    connection.execute(delete(column.table).where(this))
            connection.execute(delete(devices).where(devices.c.id == device_id))
            record(connection, now, who, "device.remove", device_id)

    def refused_bundles(self, device_id: str) -> dict[str, str]:
        """The bundles that a device refused or had to leave, and why; newest last.

        Raises: UnknownDeviceError.
        """
        with self._transactions.reading() as connection:
            _device(connection, device_id)
            left = select(failures.c.bundle, failures.c.why).where(failures.c.device == device_id)
            rows = connection.execute(left.order_by(failures.c.failed_at)).all()
            found = {str(bundle): str(why) for bundle, why in rows}
            refused = one_row(connection, select(reports).where(reports.c.device == device_id))
            if refused is not None and refused["refused"] is not None:
                found.pop(refused["refused"], None)
                found[refused["refused"]] = refused["why"] or ""
            return found

    def lift(self, device_id: str, bundle: str, *, who: str = "operator") -> None:
        """Forget that a device refused a bundle, and order it to forget it too.

        Raises: UnknownDeviceError; ConflictError as `ask_to_rotate`, or if nothing is known of a
            refusal of that bundle, naming those there are.
        """
        known = self.refused_bundles(device_id)
        if bundle not in known:
            listed = ", ".join(known) or "none"
            raise ConflictError(
                f"device {device_id} has not refused {bundle[:160]}; it has {listed}"
            )
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            _check_active(_device(connection, device_id))
            this = reports.c.device == device_id, reports.c.refused == bundle
            nothing = {"refused": None, "why": None, "refused_at": None}
            connection.execute(update(reports).where(*this).values(**nothing))
            left = failures.c.device == device_id, failures.c.bundle == bundle
            connection.execute(delete(failures).where(*left))
            _put_order(connection, Order(device_id, LIFT, bundle, now))
            record(connection, now, who, "quarantine.lift", f"{device_id} {bundle}")

    def orders(self) -> tuple[Order, ...]:
        """All orders that are not done, oldest first."""
        with self._transactions.reading() as connection:
            query = select(orders).order_by(orders.c.asked_at)
            return tuple(Order(**row) for row in connection.execute(query).mappings())

    def done(self, device_id: str, op: str, argument: str) -> None:
        """Note that a device has carried out an order; one that is not known is ignored."""
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            if _delete_order(connection, Order(device_id, op, argument, now)):
                record(connection, now, device_id, _DONE.get(op, "device.order.done"), argument)


def columns_with_devices() -> Iterator[Column[Any]]:
    """The columns of all tables that refer to a device."""
    for table in METADATA.sorted_tables:
        for key in table.foreign_keys:
            if key.column is devices.c.id:
                yield key.parent


def end_tokens_of(connection: Connection, device_id: str) -> None:
    """End the unused tokens with which a device could come back.

    They end at their creation: one that is being redeemed compares with a time before now.
    """
    if not ID_PATTERN.fullmatch(device_id):
        return  # as in `_device`
    unused = and_(tokens.c.device == device_id, tokens.c.used_at.is_(None))
    connection.execute(update(tokens).where(unused).values(expires_at=tokens.c.created_at))


def _device(connection: Connection, device_id: str) -> dict[str, Any]:
    row = None
    if ID_PATTERN.fullmatch(device_id):  # other text is not looked up: a database may refuse it
        row = one_row(connection, select(devices).where(devices.c.id == device_id))
    if row is None:
        raise unknown_device(connection, device_id)
    return dict(row)


def _set(connection: Connection, device_id: str, **values: object) -> None:
    connection.execute(update(devices).where(devices.c.id == device_id).values(**values))


def _check_active(device: dict[str, Any]) -> None:
    name = device["id"]
    if device["revoked_at"] is not None:
        raise ConflictError(f"device {name}: revoked; it takes no orders")
    if device["approved_at"] is None:
        raise ConflictError(
            f"device {name}: waits for approval; `splitedge server devices approve`"
        )


def _put_order(connection: Connection, order: Order) -> None:
    _delete_order(connection, order)
    values = {"op": order.op, "argument": order.argument, "asked_at": order.asked_at}
    connection.execute(insert(orders).values(device=order.device, **values))


def _delete_order(connection: Connection, order: Order) -> bool:
    this = (
        orders.c.device == order.device,
        orders.c.op == order.op,
        orders.c.argument == order.argument,
    )
    return connection.execute(delete(orders).where(*this)).rowcount > 0
