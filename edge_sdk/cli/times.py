"""Times as people read them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from math import inf
from typing import Final

import typer

# seconds, and the unit that is used from there on
_UNITS: Final = ((86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second"))

_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 7 * 86_400}
_LENGTH: Final = re.compile(r"(?:\d+(?:\.\d+)?[smhdw])+")
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")


def seconds(text: str) -> float:
    """The seconds of a length of time as people write it: `90s`, `10m`, `1h30m`, `7d`, `2w`.

    Raises: BadParameter, which names the option if this is its parser.
    """
    if _LENGTH.fullmatch(text) is None:
        raise typer.BadParameter(f"expected a time such as 90s, 30m, 1h30m or 7d, got {text!r}")
    return sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))


def length_in(unit: str, *, least: float = 0.0) -> Callable[[str | float], float]:
    """A parser of an option whose plain numbers are in `unit`, and which takes `10m` too.

    Args:
        unit: one of s, m, h, d, w.
        least: in that unit.
    Returns: a function from the option's text to its value in that unit; BadParameter says what is
        wrong with the text.
    """

    def read(text: str | float) -> float:
        try:
            value = float(text)
        except ValueError:
            value = seconds(str(text)) / _SECONDS[unit]
        if not least <= value < inf:
            raise typer.BadParameter(f"expected at least {least:g}{unit}, got {text}")
        return value

    return read


def ago(at: float | None, now: float | None = None) -> str:
    """The time since `at`, in the largest whole unit: `3 minutes ago`; empty for None.

    Args:
        at, now: UTC seconds since 1970; `now` is this moment by default.
    """
    if at is None:
        return ""
    passed = (time.time() if now is None else now) - at
    for seconds, unit in _UNITS:
        if passed >= seconds:
            return f"{plural(int(passed // seconds), unit)} ago"
    return "now" if passed > -60 else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def plural(count: int, noun: str) -> str:
    """A count and its noun: `1 device`, `2 devices`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
