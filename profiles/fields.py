"""Checks that the frozen records of this package run on themselves when they are built.

Each takes the record's name, the field and the value, and raises InvalidProfileError.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import TypeGuard

from profiles.errors import InvalidProfileError


def need(condition: bool, owner: str, field: str, expected: str, got: object) -> None:
    """Raise InvalidProfileError unless `condition` holds."""
    if not condition:
        raise InvalidProfileError(
            f"{owner}: {field}: expected {expected}, got {got!r}; correct it where it was written"
        )


def check_text(owner: str, field: str, value: object, *, most: int = 200) -> None:
    """Accept 1 to `most` characters that are not all blank."""
    fits = isinstance(value, str) and bool(value.strip()) and len(value) <= most
    need(fits, owner, field, f"a text of 1 to {most} characters", value)


def check_whole(owner: str, field: str, value: object, *, least: int) -> None:
    """Accept an int (not a bool) of at least `least`."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
    need(fits, owner, field, f"a whole number of at least {least}", value)


def check_number(owner: str, field: str, value: object, *, above: float) -> None:
    """Accept a finite int or float above `above`."""
    fits = _is_finite(value) and value > above
    need(fits, owner, field, f"a finite number above {above:g}", value)


def check_not_negative(owner: str, field: str, value: object) -> None:
    """Accept a finite int or float of at least 0."""
    fits = _is_finite(value) and value >= 0
    need(fits, owner, field, "a finite number of at least 0", value)


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


def _is_finite(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # math.isfinite raises on a huge int
