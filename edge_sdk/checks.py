"""Checks that records run on themselves when they are built.

profiles.checks says what a value has to be; here are the errors. A record checks itself so:

    def __post_init__(self) -> None:
        check_fields(self, batch=whole(1), momentum=number(least=0, below=1))
"""

from __future__ import annotations

from dataclasses import fields
from numbers import Real
from typing import TYPE_CHECKING

from edge_sdk.errors import ConfigurationError, SplitedgeError, shown
from profiles.checks import Check, is_whole

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def check_fields(record: object, owner: str = "", /, **checks: Check) -> None:
    """Check the record's fields, each named as its attribute.

    Args:
        owner: stands before the field's name in the error.
    Raises: ConfigurationError naming the first that fails, what was expected and what was got.
    """
    for name, check in checks.items():
        check_value(f"{owner}: {name}" if owner else name, getattr(record, name), check)


def check_value(
    name: str, value: object, check: Check, error: type[SplitedgeError] = ConfigurationError
) -> None:
    """Check one value.

    Raises: `error` naming it, what was expected and what was got.
    """
    need(check.accepts(value), name, check.expected, value, error)


def need(
    condition: bool,
    name: str,
    expected: str,
    got: object,
    error: type[SplitedgeError] = ConfigurationError,
) -> None:
    """Raise `error` naming the value, what was expected and what was got, unless `condition`."""
    if not condition:
        raise error(f"{name:.100}: expected {expected}, got {shown(got)}")


def make_plain(record: DataclassInstance) -> None:
    """Replace numpy's numbers in the fields of a frozen record by Python's own: JSON and SQLite
    take no others.
    """
    for field in fields(record):
        value = getattr(record, field.name)
        if is_whole(value):
            object.__setattr__(record, field.name, int(value))
        elif isinstance(value, Real) and not isinstance(value, bool):
            object.__setattr__(record, field.name, float(value))
