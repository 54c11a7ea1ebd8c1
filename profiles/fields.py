"""Checks that the frozen records of this package run on themselves when they are built.

profiles.checks says what a value has to be; here is the error of this package.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from profiles.checks import Check
from profiles.errors import InvalidProfileError


def check_fields(record: object, owner: str, /, **checks: Check) -> None:
    """Check the record's fields, each named as its attribute.

    Raises: InvalidProfileError naming the owner and the first field that fails.
    """
    for name, check in checks.items():
        check_value(owner, name, getattr(record, name), check)


def check_value(owner: str, field: str, value: object, check: Check) -> None:
    """Check one value.

    Raises: InvalidProfileError naming owner and field, what was expected and what was got.
    """
    need(check.accepts(value), owner, field, check.expected, value)


def need(condition: bool, owner: str, field: str, expected: str, got: object) -> None:
    """Raise InvalidProfileError unless `condition` holds."""
    if not condition:
        raise InvalidProfileError(
            f"{owner}: {field}: expected {expected}, got {got!r}; correct it where it was written"
        )


def exact_keys(owner: str, data: object, keys: Collection[str]) -> Mapping[str, object]:
    """Return `data` as a mapping with exactly these keys.

    An unknown key is refused: it is most likely a known one, misspelt.
    """
    if not isinstance(data, Mapping):
        raise InvalidProfileError(f"{owner}: expected an object, got {type(data).__name__}")
    missing = sorted(set(keys) - set(data))
    unknown = sorted(str(key) for key in set(data) - set(keys))
    need(not missing, owner, "fields", f"all of {', '.join(keys)}", f"without {missing}")
    need(not unknown, owner, "fields", f"none but {', '.join(keys)}", f"also {unknown}")
    return data
