"""History of the devices: what each of them did and how it was, thinned with age.

    heartbeats of the last hour         as they came, at most one every RAW_S
    up to a day                         one point a minute
    up to 30 days                       one point a quarter of an hour

A point carries counts, so thinning adds up and loses no answer. All in all there are at most as
many points as `prune` allows; above that the oldest go first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson
from sqlalchemy import Connection, RowMapping, delete, distinct, func, insert, select, tuple_

from server.registry.schema import devices, telemetry, telemetry_last
from server.registry.telemetry.point import TelemetryPoint, merged, point_between
from server.registry.telemetry.reading import Reading
from server.registry.transactions import Transactions

RAW_S: Final = 10
POINTS_MOST: Final = 400_000
# points of one step become points of the next one when they are that old
STEPS: Final = ((0, 60, 3_600), (60, 900, 86_400))
AGE_MOST_S: Final = 30 * 86_400
# a transaction of so many rows takes some tens of milliseconds
ROWS_AT_ONCE: Final = 2_000
SHOWN_MOST: Final = 10_000
# what is further ahead of the clock was written while the clock was wrong
AHEAD_S: Final = 86_400


@dataclass(frozen=True, slots=True)
class FleetPoint:
    """Sums over several devices in one span of time.

    Attributes:
        at: end of the span, UTC seconds since 1970. span_s: its length.
        devices: number of devices of which there is a point in the span.
    """

    at: float
    span_s: float
    exits: int
    offloads: int
    fallbacks: int
    devices: int


@dataclass(frozen=True, slots=True)
class LastReading:
    """The last reading of a device, at a time by the server's clock."""

    at: float
    reading: Reading


@dataclass(frozen=True, slots=True)
class Recorded:
    """A point that was written, and whose it is."""

    device: str
    fleet: str
    point: TelemetryPoint


_Key = tuple[str, int, int]  # device, step, time


class TelemetryHistory:
    """The history of one registry's devices; safe from any thread."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def record(self, readings: Mapping[str, LastReading]) -> list[Recorded]:
        """Write a point for each of these devices, in one transaction; unknown ids are ignored.

        A reading that could not be written may be given again later, or be left out for a newer
        one: the next point then covers both.

        Returns: the points.
        """
        if not readings:
            return []
        with self._transactions.writing() as connection:
            query = select(devices.c.id, devices.c.fleet).where(devices.c.id.in_(readings))
            fleets = {str(device): str(fleet) for device, fleet in connection.execute(query)}
            before = _last(connection, list(fleets))
            written = []
            points: dict[_Key, list[TelemetryPoint]] = defaultdict(list)
            for device, fleet in fleets.items():
                now, old = readings[device], before.get(device)
                span_s = 0.0 if old is None else max(0.0, now.at - old.at)
                reading = None if old is None else old.reading
                point = point_between(reading, now.reading, at=now.at, span_s=span_s)
                points[device, 0, math.ceil(now.at)].append(point)
                written.append(Recorded(device, fleet, point))
            _add(connection, points)
            connection.execute(delete(telemetry_last).where(telemetry_last.c.device.in_(fleets)))
            rows = [_last_row(device, readings[device]) for device in fleets]
            if rows:
                connection.execute(insert(telemetry_last), rows)
        return written

    def thin(self, rows_most: int = ROWS_AT_ONCE) -> int:
        """Put points together that are old enough, at most about `rows_most` of them for each step.

        Returns: how many were put together.
        """
        now = self._transactions.now()
        taken = 0
        for fine, coarse, age_s in STEPS:
            due = math.floor((now - age_s) / coarse) * coarse
            this = (telemetry.c.step == fine) & (telemetry.c.at <= due)
            with self._transactions.reading() as connection:
                query = select(telemetry.c.at).where(this).order_by(telemetry.c.at)
                first = connection.scalars(query.limit(1)).first()
                if first is None:
                    continue
                until = connection.scalars(query.offset(rows_most).limit(1)).first()
            if until is not None:
                this = (telemetry.c.step == fine) & (telemetry.c.at <= until)
            with self._transactions.writing() as connection:
                gone = delete(telemetry).where(this).returning(telemetry)
                rows = connection.execute(gone).mappings().all()
                points: dict[_Key, list[TelemetryPoint]] = defaultdict(list)
                for row in rows:
                    bucket = -(-row["at"] // coarse) * coarse
                    points[row["device"], coarse, bucket].append(_point(row))
                _add(connection, points)
            taken += len(rows)
        return taken

    def prune(self, points_most: int = POINTS_MOST, *, by_age: bool = True) -> int:
        """Drop the points that are too old, or above `points_most` in all, oldest first.

        Args:
            by_age: whether those that are too old, or of the future, are dropped. Without it, by a
                clock that is behind, the points above the number are those that come in now.
        Returns: how many were dropped.
        """
        now = self._transactions.now()
        with self._transactions.reading() as connection:
            above = connection.execute(select(func.count()).select_from(telemetry)).scalar_one()
            query = select(telemetry.c.at).order_by(telemetry.c.at).limit(1)
            first = connection.scalars(query).first()
            last = connection.scalars(select(func.max(telemetry.c.at))).one()
            if first is None:
                return 0
            oldest, newest = first, last
            if by_age:
                oldest, newest = math.floor(now - AGE_MOST_S), math.floor(now + AHEAD_S)
            if above > points_most:
                kept = query.offset(above - points_most)
                oldest = max(oldest, connection.scalars(kept).one())
        if first >= oldest and last <= newest:
            return 0
        with self._transactions.writing() as connection:
            unwanted = (telemetry.c.at < oldest) | (telemetry.c.at > newest)
            return connection.execute(delete(telemetry).where(unwanted)).rowcount

    def of(
        self, device_id: str, *, since_s: float = 3600.0, points_max: int = 360
    ) -> list[TelemetryPoint]:
        """The points of a device in the last `since_s` seconds, oldest first.

        If there are more than `points_max`, neighbours are put together.
        """
        now = self._transactions.now()
        query = (
            select(telemetry)
            .where(telemetry.c.device == device_id)
            .where(telemetry.c.at.between(math.floor(now - since_s), now + AHEAD_S))
            .order_by(telemetry.c.at, telemetry.c.step.desc())
        )
        with self._transactions.reading() as connection:
            points = [_point(row) for row in connection.execute(query).mappings()]
        if len(points) <= points_max:
            return points
        step = since_s / points_max
        buckets: dict[int, list[TelemetryPoint]] = defaultdict(list)
        for point in points:
            bucket = math.ceil((point.at - now) / step)
            buckets[min(0, max(1 - points_max, bucket))].append(point)
        return [merged(some) for _, some in sorted(buckets.items())]

    def of_fleet(
        self, fleet: str | None = None, *, since_s: float = 3600.0, points_max: int = 120
    ) -> list[FleetPoint]:
        """Sums over the devices of a fleet, or over all, in the last `since_s` seconds.

        Spans have equal length, of a minute at least; those without a point are left out. It is
        summed up by the database.
        """
        now = self._transactions.now()
        step = max(60, math.ceil(since_s / points_max))
        number = ((telemetry.c.at + (step - 1)) // step).label("number")
        query = (
            select(
                number,
                func.sum(telemetry.c.exits),
                func.sum(telemetry.c.offloads),
                func.sum(telemetry.c.fallbacks),
                func.count(distinct(telemetry.c.device)),
            )
            .where(telemetry.c.at.between(math.floor(now - since_s), now + AHEAD_S))
            .group_by(number)
            .order_by(number)
        )
        if fleet is not None:
            of_fleet = select(devices.c.id).where(devices.c.fleet == fleet)
            query = query.where(telemetry.c.device.in_(of_fleet))
        with self._transactions.reading() as connection:
            rows = connection.execute(query).all()
        return [
            FleetPoint(
                float(index * step), float(step), int(exits), int(offloads), int(falls), many
            )
            for index, exits, offloads, falls, many in rows
        ]

    def sums(
        self, *, since_s: float = 600.0, device: str | None = None
    ) -> dict[str, tuple[int, int, int]]:
        """Exits, offloads and fallbacks in the last `since_s` seconds, by device that reported.

        Args:
            device: its id, for this one alone.
        """
        now = self._transactions.now()
        counts = (telemetry.c.exits, telemetry.c.offloads, telemetry.c.fallbacks)
        query = (
            select(telemetry.c.device, *(func.sum(column) for column in counts))
            .where(telemetry.c.at.between(math.floor(now - since_s), now + AHEAD_S))
            .group_by(telemetry.c.device)
        )
        if device is not None:
            query = query.where(telemetry.c.device == device)
        with self._transactions.reading() as connection:
            rows = connection.execute(query).all()
        return {name: (int(exits), int(asked), int(falls)) for name, exits, asked, falls in rows}

    def last_at(self) -> dict[str, float]:
        """When the last reading of each device came, UTC seconds since 1970."""
        query = select(telemetry_last.c.device, telemetry_last.c.at)
        with self._transactions.reading() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def last(self, device_ids: Iterable[str] | None = None) -> dict[str, LastReading]:
        """The last reading of each of these devices, or of all: counts since its agent's start."""
        with self._transactions.reading() as connection:
            return _last(connection, None if device_ids is None else list(device_ids))


def _add(connection: Connection, points: Mapping[_Key, list[TelemetryPoint]]) -> None:
    """Write points; where there is one with the same key, they are put together."""
    keys = list(points)
    if not keys:
        return
    key_columns = tuple_(telemetry.c.device, telemetry.c.step, telemetry.c.at)
    found: dict[_Key, list[TelemetryPoint]] = defaultdict(list)
    for begin in range(0, len(keys), ROWS_AT_ONCE):
        some = key_columns.in_(keys[begin : begin + ROWS_AT_ONCE])
        gone = delete(telemetry).where(some).returning(telemetry)
        for row in connection.execute(gone).mappings():
            found[row["device"], row["step"], row["at"]].append(_point(row))
    rows = [
        _row(key, merged([*found[key], *new], at=float(key[2]) if key[1] else None))
        for key, new in points.items()
    ]
    connection.execute(insert(telemetry), rows)


def _row(key: _Key, point: TelemetryPoint) -> dict[str, Any]:
    device, step, at = key
    content = point.to_dict()
    counts = {name: content.pop(name, 0) for name in ("exits", "offloads", "fallbacks")}
    text = orjson.dumps(content).decode()
    return {"device": device, "step": step, "at": at, **counts, "content": text}


def _point(row: RowMapping) -> TelemetryPoint:
    counts = {name: row[name] for name in ("exits", "offloads", "fallbacks")}
    return TelemetryPoint.from_dict({**orjson.loads(row["content"]), **counts})


def _last(connection: Connection, device_ids: list[str] | None) -> dict[str, LastReading]:
    query = select(telemetry_last)
    if device_ids is not None:
        query = query.where(telemetry_last.c.device.in_(device_ids))
    return {
        row["device"]: LastReading(row["at"], Reading.from_dict(orjson.loads(row["content"])))
        for row in connection.execute(query).mappings()
    }


def _last_row(device: str, last: LastReading) -> dict[str, Any]:
    content = orjson.dumps(last.reading.to_dict()).decode()
    return {"device": device, "at": last.at, "content": content}
