"""Checks of values: what a value has to be, in words and as a test.

They live on the ground floor, because records of every floor check themselves when they are built.
Each floor raises its own error: profiles.fields here, edge_sdk.checks above.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Check:
    """Requirement on a value.

    Attributes:
        expected: in words that follow "expected".
        accepts: whether a value passes; it takes any value.
    """

    expected: str
    accepts: Callable[[Any], bool]


@lru_cache(maxsize=256)
def whole(least: int, most: int | None = None) -> Check:
    """An int of at least `least` and at most `most`; a bool is none."""
    if most is not None:
        return Check(
            f"a whole number from {least} to {most}",
            lambda value: is_whole(value) and least <= value <= most,
        )
    return Check(
        f"a whole number of at least {least}", lambda value: is_whole(value) and value >= least
    )


@lru_cache(maxsize=256)
def number(
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    infinite: bool = False,
) -> Check:
    """An int or float within these bounds, and finite; a bool is none.

    Args:
        infinite: accept infinity too, where the bounds do.
    """
    low = -math.inf if least is None else least
    high = math.inf if most is None else most

    def accepts(value: Any) -> bool:
        if not (is_number(value) or (infinite and _is_real(value))):
            return False
        beyond = (above is not None and value <= above) or (below is not None and value >= below)
        return low <= value <= high and not beyond

    kind = "a number" if infinite else "a finite number"
    return Check(_bounds(kind, least, above, most, below), accepts)


@lru_cache(maxsize=256)
def text(most: int = 200) -> Check:
    """1 to `most` characters that are not all blank."""
    return Check(
        f"a text of 1 to {most} characters",
        lambda value: isinstance(value, str) and bool(value.strip()) and len(value) <= most,
    )


def one_of(known: Collection[object]) -> Check:
    """One of these values."""
    return Check(f"one of {', '.join(map(str, known))}", lambda value: value in known)


def optional(check: Check) -> Check:
    """None, or what `check` accepts."""
    return Check(check.expected, lambda value: value is None or check.accepts(value))


def is_whole(value: object) -> bool:
    """Whether a value is an int, numpy's included, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is an int or a float, numpy's included, finite and no bool."""
    if not _is_real(value):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float can hold
        return False


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _bounds(
    kind: str, least: float | None, above: float | None, most: float | None, below: float | None
) -> str:
    """A number within bounds, in words."""
    if least is not None and most is not None:
        return f"{kind} from {least:g} to {most:g}"
    named = {"of at least": least, "above": above, "at most": most, "below": below}
    words = [f"{word} {bound:g}" for word, bound in named.items() if bound is not None]
    return " ".join([kind, " and ".join(words)]).strip()


flag: Final = Check("true or false", lambda value: isinstance(value, bool))
share: Final = number(least=0, most=1)
