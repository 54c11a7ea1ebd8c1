"""Devices' reports on their bundles: the one that runs, and the one that was refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sqlalchemy import Connection, Select, insert, select, update

from server.registry.records import DeviceReport
from server.registry.schema import devices, reports
from server.registry.trail.events import printable
from server.registry.transactions import Transactions, all_rows

MAX_WHY: Final = 500


class DeviceReports:
    """The last report of each device of one registry; safe from any thread."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def all(self) -> dict[str, DeviceReport]:
        """Every report, by device id."""
        with self._transactions.reading() as connection:
            return {one.device: one for one in _read(connection, select(reports))}

    def note_running(self, running: Mapping[str, str]) -> None:
        """Store the bundle that each of these devices runs; unknown ids are ignored."""
        with self._transactions.writing() as connection:
            known = connection.scalars(select(devices.c.id).where(devices.c.id.in_(running))).all()
            for device in known:
                _store(connection, device, running=running[device])

    def note_update(
        self, device: str, running: str | None, refused: str | None, why: str | None
    ) -> None:
        """Store the outcome of a device's update: what it runs now, and what it refused, if so."""
        now = self._transactions.now()
        why = None if why is None else printable(why, MAX_WHY)
        with self._transactions.writing() as connection:
            before = _read(connection, select(reports).where(reports.c.device == device))
            known = before[0] if before else DeviceReport(device)
            same = refused is not None and known.refused == refused
            refused_at = known.refused_at if same else (None if refused is None else now)
            _store(
                connection, device, running=running, refused=refused, why=why, refused_at=refused_at
            )


def _read(connection: Connection, query: Select[tuple[object, ...]]) -> list[DeviceReport]:
    return [DeviceReport(**row) for row in all_rows(connection, query)]


def _store(connection: Connection, device: str, **values: object) -> None:
    this = reports.c.device == device
    if connection.execute(update(reports).where(this).values(**values)).rowcount == 0:
        connection.execute(insert(reports).values(device=device, **values))
