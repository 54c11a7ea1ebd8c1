"""Titles of devices: they are what people call a device, beside the id of its login."""

from __future__ import annotations

import unicodedata
from typing import Final

from sqlalchemy import Connection, select, update
from sqlalchemy.exc import IntegrityError

from server.errors import BadRequestError, ConflictError, UnknownDeviceError
from server.registry.schema import devices
from server.registry.transactions import MAX_ID, Transactions, record, take_turns

MAX_TITLE: Final = 63
# any fixed number that no other lock has: whoever chooses a title or an id looks at all there are
NAMES_LOCK: Final = 0x7469746C


class Titles:
    """The titles of one registry's devices; safe from any thread. `Device.title` shows them."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def give(self, device_id: str, title: str, *, who: str = "operator") -> str | None:
        """Give a device a title in place of the one that it has; an empty one takes it away.

        Returns: the title as it is stored, without spaces at its ends; None for none.
        Raises: UnknownDeviceError; BadRequestError for a title that is longer than 63 characters
            or has one that cannot be shown; ConflictError for the title or the id of another
            device, whatever the case of its letters.
        """
        wanted = _checked(title)
        now = self._transactions.now()
        with self._transactions.writing() as connection:
            take_turns(connection, NAMES_LOCK)
            # all rows with a title: two devices with titles that differ in case are told apart here
            known = connection.execute(select(devices.c.id, devices.c.title)).all()
            titles = {str(device): found for device, found in known}
            if device_id not in titles:
                raise unknown_device(connection, device_id)
            if titles[device_id] == wanted:
                return wanted
            if wanted is not None:
                _check_free(wanted, device_id, titles)
            this = devices.c.id == device_id
            try:
                with connection.begin_nested():
                    connection.execute(update(devices).where(this).values(title=wanted))
            except IntegrityError as err:  # another process gave it away at the same moment
                raise ConflictError(f"title {wanted!r}: another device has it") from err
            record(connection, now, who, "device.rename", f"{device_id} title={wanted or 'none'}")
        return wanted


def unknown_device(connection: Connection, given: str) -> UnknownDeviceError:
    """The error for an id that no device has; it says so if that is the title of a device."""
    text = f"device {given[:MAX_ID]!r}: not enrolled here"
    if given and given.isprintable():  # other text is not looked up: a database may refuse it
        known = select(devices.c.id).where(devices.c.title == given)
        called = connection.execute(known).scalar_one_or_none()
        if called is not None:
            text += f"; that is the title of the device {called}"
    return UnknownDeviceError(text)


def folded(text: str) -> str:
    """A title in the form in which two that read the same are equal; an id stays as it is."""
    return unicodedata.normalize("NFKC", text).casefold()


def _checked(title: str) -> str | None:
    title = title.strip()
    if len(title) > MAX_TITLE or not title.isprintable():
        raise BadRequestError(
            f"title: expected at most {MAX_TITLE} characters that can be shown, without line breaks"
            f" and control characters, got {title[: MAX_TITLE + 1]!r}"
        )
    return title or None


def _check_free(wanted: str, device_id: str, titles: dict[str, str | None]) -> None:
    alike = folded(wanted)
    for other, title in titles.items():
        if other != device_id and alike in (other, folded(title or "")):
            raise ConflictError(
                f"title {wanted!r}: the device {other} is called so; choose another title"
            )
