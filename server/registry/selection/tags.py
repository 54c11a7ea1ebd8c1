"""Tags of devices: words of the operator's own, by which commands and roll-outs choose devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from sqlalchemy import Connection, select, update

from server.errors import BadRequestError
from server.registry.schema import devices
from server.registry.selection.titles import unknown_device
from server.registry.transactions import Transactions, check_id, record

MAX_TAGS: Final = 32


class Tags:
    """The tags of one registry's devices; safe from any thread. `Device.tags` shows them."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def add(self, device_id: str, tags: Iterable[str], *, who: str = "operator") -> tuple[str, ...]:
        """Give a device tags, beside those that it has; returns all of them, sorted.

        Raises: UnknownDeviceError; BadRequestError for a tag that is not 1 to 63 of a-z, 0-9 and
            '-', or above 32 tags.
        """
        new = _checked(tags)
        return self._change(device_id, lambda there: there | new, who)

    def remove(
        self, device_id: str, tags: Iterable[str], *, who: str = "operator"
    ) -> tuple[str, ...]:
        """Take tags from a device, which it need not have; returns those that it still has.

        Raises: UnknownDeviceError; BadRequestError for what is no tag.
        """
        gone = _checked(tags)
        return self._change(device_id, lambda there: there - gone, who)

    def replace(
        self, device_id: str, tags: Iterable[str], *, who: str = "operator"
    ) -> tuple[str, ...]:
        """Give a device exactly these tags; returns them sorted.

        Raises: as `add`.
        """
        wanted = _checked(tags)
        return self._change(device_id, lambda _: wanted, who)

    def all(self) -> dict[str, tuple[str, ...]]:
        """The devices of each tag in use, revoked ones left out, by tag."""
        query = select(devices.c.id, devices.c.tags).where(devices.c.revoked_at.is_(None))
        found: dict[str, list[str]] = {}
        with self._transactions.reading() as connection:
            for device, tags in connection.execute(query.order_by(devices.c.id)):
                for tag in tags:
                    found.setdefault(tag, []).append(device)
        return {tag: tuple(found[tag]) for tag in sorted(found)}

    def _change(
        self, device_id: str, change: Callable[[frozenset[str]], frozenset[str]], who: str
    ) -> tuple[str, ...]:
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            before = _locked_tags(connection, device_id)
            after = tuple(sorted(change(frozenset(before))))
            if len(after) > MAX_TAGS:
                raise BadRequestError(
                    f"device {device_id}: expected at most {MAX_TAGS} tags, got {len(after)}"
                )
            if after != before:
                this = devices.c.id == device_id
                connection.execute(update(devices).where(this).values(tags=after))
                detail = f"{device_id} tags={','.join(after) or 'none'}"
                record(connection, now, who, "device.tag", detail)
            return after


def _locked_tags(connection: Connection, device_id: str) -> tuple[str, ...]:
    query = select(devices.c.tags).where(devices.c.id == device_id).with_for_update()
    row = connection.execute(query).one_or_none()
    if row is None:
        raise unknown_device(connection, device_id)
    tags: tuple[str, ...] = row[0]
    return tags


def _checked(tags: Iterable[str]) -> frozenset[str]:
    wanted = frozenset(tags)
    for tag in wanted:
        check_id(tag, "tag")
    return wanted
